"""The routed experts on packed MXFP4 as two Pallas kernels for TPUs (Mosaic).

Assignments are sorted by expert and cut into tiles of M rows of one expert each (`xla.tile_map`).
Two kernels go over the tiles: latents to activations (w1 and w3 of an expert, then SiTU), and
activations to the weighted sum (w2). Stacks of weights stay in HBM whole; a prefetched row of the
stack a tile says which blocks to copy to VMEM. The grid ends with the used tiles, a number known at
run time: experts without a row are neither copied nor computed.

* The grid is (blocks of output columns, used tiles). A block of weights is unpacked to bfloat16 in
  VMEM once an expert, however many tiles the expert has.
* Even and odd columns of a weight are two operands (`mosaic_tpu_unpack`), and what is contracted
  with it comes in even and odd columns too.
* The even rows of w1 and w3 are unpacked apart from the odd ones, so activations leave the first
  kernel as even and odd columns, which the second one wants. Rows of w2 are kept in order.
* The second kernel holds the sums of all tokens for its columns in VMEM and adds the rows of a tile
  one by one, in ascending order of experts: no product goes to HBM.

At most `ROWS` rows of tiles are gathered at a time, in a loop that ends with the used tiles, and at
most `TOKENS` tokens. VMEM at L = 3584, F = 3072, M = 128, copied blocks twice for the pipeline.
First kernel, 512 activations a step: codes 3.5 MiB, unpacked weights 7, latents 1.8, activations
0.3. Second, 512 outputs a step: codes 1.5, unpacked weights 3, activations 1.5, sums 32 MiB at
4,096 tokens and 0.5 at 64. Scales take below 0.5 MiB in both; the limit is 56 MiB.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from k3jax.ops.grouped_matmul import xla
from k3jax.ops.grouped_matmul.mosaic_tpu_unpack import ALTERNATE, NEIGHBOURS, scratch, unpack
from k3jax.ops.mosaic_tpu import LANES, SUBLANES, VMEM_LIMIT, dot
from k3jax.ops.situ import situ
from k3jax.quantization import mxfp8
from k3jax.quantization.mxfp4 import GROUP, MXFP4

TILE_ROWS = 16, 128  # at least and at most
TOKENS_PER_ROW = 32
ROWS = 2048  # of tiles that are gathered at a time
TOKENS = 4096  # of a call of the second kernel
_COLUMNS = 256  # outputs of a block are a multiple of these: even and odd ones fill lanes
_NT = (1, 1)
_PARAMETERS = pltpu.CompilerParams(
    dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT
)


def refusal(z_NL, ids_Nk, w13, w2, activations) -> str | None:
    """Why the kernels cannot take these inputs; None if they can."""
    del ids_Nk, activations
    if not isinstance(w13, MXFP4) or not isinstance(w2, MXFP4):
        return "weights are not packed"
    if z_NL.dtype != jnp.bfloat16:
        return f"z is {z_NL.dtype}, not bfloat16"
    for name, width in (("L", w13.shape[-1]), ("F", w2.shape[-1])):
        if width % _COLUMNS:
            return f"{name} is {width}, no multiple of {_COLUMNS}"
        if width > GROUP * LANES:
            return f"{name} is {width}, over {GROUP * LANES}: scales of a row fill {LANES} lanes"
    return None


def tile_rows(tokens: int) -> int:
    """Rows of a tile, a power of two within `TILE_ROWS`.

    Experts of K3 have one row for 56 tokens on average, wherever they live: most tiles are filled
    by one expert, and it seldom needs a second one. Rows cost little beside an expert's weights.
    """
    least, most = TILE_ROWS
    return max(least, min(most, 1 << (tokens // TOKENS_PER_ROW - 1).bit_length()))


def _fresh(expert_ref, t):
    """Whether tile t is the first of its expert, or the first of all."""
    return (t == 0) | (expert_ref[t] != expert_ref[jnp.maximum(t - 1, 0)])


def _product(x_ref, words):
    """[M, O] in float32, of even and odd columns: of x, and of pairs of rows of a weight."""
    parts = [dot(x_ref[i], pltpu.bitcast(words[i], jnp.bfloat16), _NT) for i in (0, 1)]
    return parts[0] + parts[1]


def _largest(even_MO, odd_MO):
    """The largest of each group, in all of its lanes: 16 of the even columns and of the odd."""
    largest, width = jnp.maximum(even_MO, odd_MO), even_MO.shape[1]
    lane_MO = lax.broadcasted_iota(jnp.int32, even_MO.shape, 1)
    for step in (1, 2, 4, 8):
        upper = pltpu.roll(largest, width - step, 1)
        partner = jnp.where(lane_MO & step == 0, upper, pltpu.roll(largest, step, 1))
        largest = jnp.maximum(largest, partner)
    return largest


def _up_kernel(
    expert_ref, x_ref, gate_ref, gate_scale_ref, up_ref, up_scale_ref, h_ref,
    words_ref, lanes_ref, float4_ref=None, *, betas, activations,
):  # fmt: skip
    @pl.when(_fresh(expert_ref, pl.program_id(1)))
    def _():
        blocks = (gate_ref, gate_scale_ref), (up_ref, up_scale_ref)
        for half, (codes_ref, scales_ref) in enumerate(blocks):

            def store(i, which, odd, words, half=half):
                at = pl.ds(pl.multiple_of(i * SUBLANES, SUBLANES), SUBLANES)
                words_ref[half, which, odd, at] = words

            unpack(codes_ref.at[0], scales_ref.at[0], lanes_ref, float4_ref, ALTERNATE, store)

    h_2MO = []
    for odd in (0, 1):
        gate_MO, up_MO = (
            _product(x_ref, words_ref.at[half, odd]).astype(h_ref.dtype).astype(jnp.float32)
            for half in (0, 1)
        )
        h_2MO.append(situ(gate_MO, up_MO, *betas))
    if activations is not None:
        largest = _largest(*(mxfp8.magnitudes(h_MO) for h_MO in h_2MO))
        h_2MO = [mxfp8.round_within(h_MO, largest) for h_MO in h_2MO]
    for odd in (0, 1):
        h_ref[odd] = h_2MO[odd].astype(h_ref.dtype)


def _down_kernel(
    expert_ref, count_ref, token_ref, weight_ref, h_ref, codes_ref, scales_ref,
    before_ref, r_ref, words_ref, y_ref, lanes_ref, float4_ref=None,
):  # fmt: skip
    t, rows, columns = pl.program_id(1), h_ref.shape[1], words_ref.shape[1]

    @pl.when(t == 0)
    def _():
        r_ref[...] = before_ref[...]

    @pl.when(_fresh(expert_ref, t))
    def _():
        def store(i, which, odd, words):
            # Words of rows 0, 1 and of rows 2, 3 lie in turn, so rows are in order. Only
            # arrays of one tile of lanes have such stores.
            at = pl.ds(i * 2 * SUBLANES + which, SUBLANES, stride=2)
            for c in range(columns):
                words_ref.at[odd, c][at] = words[:, c * LANES : (c + 1) * LANES]

        unpack(codes_ref.at[0], scales_ref.at[0], lanes_ref, float4_ref, NEIGHBOURS, store)

    y_ML = _product(
        h_ref, [jnp.concatenate([words_ref[i, c] for c in range(columns)], 1) for i in (0, 1)]
    )
    y_ref[...] = y_ML.astype(h_ref.dtype).astype(jnp.float32)

    def add(m, _):
        at = pl.ds(token_ref[t * rows + m], 1)
        r_ref[at] += y_ref[pl.ds(m, 1)] * weight_ref[t * rows + m]

    lax.fori_loop(0, count_ref[t], add, None)


def _block(width: int) -> int:
    return 2 * _COLUMNS if width % (2 * _COLUMNS) == 0 else _COLUMNS


def _weight_specs(w: MXFP4, size: int, offset: int = 0):
    """Blocks of codes and of scales: ``size`` rows of the expert of a tile."""
    codes = pl.BlockSpec(
        (1, size, w.codes.shape[2]), lambda o, t, expert, *_: (expert[t], o + offset, 0)
    )
    scales = pl.BlockSpec(
        (1, w.scales.shape[2], size), lambda o, t, expert, *_: (expert[t], 0, o + offset)
    )
    return [codes, scales]


def _arrays(w: MXFP4) -> list[Array]:
    """Codes, and scales with rows innermost.

    That is how a TPU keeps [.., O, groups] unless groups fill lanes. An operand with groups
    innermost is a copy of the scales of all layers, 1.5 GB of K3.1's on one of 64 devices.
    """
    return [w.codes, w.scales.swapaxes(1, 2)]


def _up(used, expert_T, x_2RC, w13: MXFP4, betas, activations, interpret) -> Array:
    """Activations [2, R, F / 2] of sorted latents [2, R, L / 2], even and odd columns apart."""
    rows, width = x_2RC.shape[1] // expert_T.shape[0], w13.shape[1] // 2
    size = _block(width)
    blocks = width // size

    def of_tile(columns, index):
        return pl.BlockSpec((2, rows, columns), lambda o, t, _: (0, t, index(o)))

    return pl.pallas_call(
        partial(_up_kernel, betas=betas, activations=activations),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(blocks, used),
            in_specs=[
                of_tile(x_2RC.shape[2], lambda o: 0),
                *_weight_specs(w13, size),
                *_weight_specs(w13, size, blocks),
            ],
            out_specs=of_tile(size // 2, lambda o: o),
            scratch_shapes=[
                pltpu.VMEM((2, 2, 2, size // 4, w13.codes.shape[2]), jnp.uint32),
                *scratch(w13, size),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((2, x_2RC.shape[1], width // 2), x_2RC.dtype),
        compiler_params=_PARAMETERS,
        interpret=interpret,
        name="experts_up",
    )(expert_T, x_2RC, *_arrays(w13) * 2)


def _down(used, expert_T, count_T, token_R, weight_R, h_2RC, w2: MXFP4, r_NL, interpret) -> Array:
    """r_NL and the weighted outputs of the tiles, in place."""
    rows, (tokens, width) = h_2RC.shape[1] // expert_T.shape[0], r_NL.shape
    size = _block(width)
    sums = pl.BlockSpec((tokens, size), lambda o, t, *_: (0, o))
    scalars = expert_T, count_T, token_R, weight_R
    return pl.pallas_call(
        _down_kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(width // size, used),
            in_specs=[
                pl.BlockSpec((2, rows, h_2RC.shape[2]), lambda o, t, *_: (0, t, 0)),
                *_weight_specs(w2, size),
                sums,
            ],
            out_specs=sums,
            scratch_shapes=[
                pltpu.VMEM((2, w2.codes.shape[2] // LANES, size // 2, LANES), jnp.uint32),
                pltpu.VMEM((rows, size), jnp.float32),
                *scratch(w2, size),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(r_NL.shape, r_NL.dtype),
        input_output_aliases={len(scalars) + 3: 0},
        compiler_params=_PARAMETERS,
        interpret=interpret,
        name="experts_down",
    )(*scalars, h_2RC, *_arrays(w2), r_NL)


def experts(
    z_NL: Array,
    ids_Nk: Array,
    weights_Nk: Array,
    w13: MXFP4,
    w2: MXFP4,
    *,
    first: Array | None,
    num_experts: int,
    out_dtype: jnp.dtype,
    situ_beta: float,
    situ_linear_beta: float | None,
    activations: str | None,
    interpret: bool = False,
) -> Array:
    """See :func:`k3jax.ops.grouped_matmul.experts`. ``interpret`` runs it without a TPU."""
    betas = situ_beta, situ_linear_beta
    z_NL = z_NL if activations is None else mxfp8.round_trip(z_NL)
    (N, L), k = z_NL.shape, ids_Nk.shape[1]
    if ids_Nk.size == 0:
        return jnp.zeros((N, L), out_dtype)
    first = jnp.int32(0) if first is None else first

    def some(z_NL, ids_Nk, weights_Nk):
        tokens = z_NL.shape[0]
        rows = tile_rows(tokens)
        tiles = xla.tile_map(ids_Nk, num_experts, rows)
        total = tiles.expert_T.shape[0]
        size = min(total, ROWS // rows)
        pad = (0, -total % size)
        expert_T = jnp.pad(tiles.expert_T, pad)
        assignment_TM = jnp.pad(tiles.assignment_TM, (pad, (0, 0)), constant_values=tokens * k)
        z_2NC = jnp.stack([z_NL[:, ::2], z_NL[:, 1::2]])

        def add(i, r_NL):
            cut = lambda a: lax.dynamic_slice_in_dim(a, i * size, size)  # noqa: E731
            expert_S, assignment_SM = cut(expert_T), cut(assignment_TM)
            used, expert_S = jnp.minimum(tiles.used - i * size, size), expert_S + first
            count_S = (assignment_SM < tokens * k).sum(1, dtype=jnp.int32)
            token_R = assignment_SM.reshape(-1) // k
            weight_R = weights_Nk.reshape(-1).at[assignment_SM.reshape(-1)].get(mode="clip")
            x_2RC = z_2NC.at[:, token_R].get(mode="fill", fill_value=0)
            h_2RC = _up(used, expert_S, x_2RC, w13, betas, activations, interpret)
            return _down(used, expert_S, count_S, token_R, weight_R, h_2RC, w2, r_NL, interpret)

        r_NL = jnp.zeros((tokens, L), jnp.float32)
        return lax.fori_loop(0, pl.cdiv(tiles.used, size), add, r_NL).astype(out_dtype)

    if N <= TOKENS:
        return some(z_NL, ids_Nk, weights_Nk)
    pad = ((0, -N % TOKENS), (0, 0))
    arrays = jnp.pad(z_NL, pad), jnp.pad(ids_Nk, pad, constant_values=-1), jnp.pad(weights_Nk, pad)
    parts = [a.reshape(-1, TOKENS, a.shape[1]) for a in arrays]
    return lax.map(lambda x: some(*x), parts).reshape(-1, L)[:N]
