"""Attention in the latent space as Pallas kernels for TPUs (Mosaic): over a range of cache rows, or
over rows that each query selected.

Both take rows from the cache in HBM by blocks, copied ahead into one of two places in VMEM, and
have the same step for a block: scores in float32, online softmax, weighted rows. All heads of a
query read one block.

* Range: the grid is (sequence, group of queries); a group's (query, head) pairs are the rows of one
  product, at most 768 of them (8 queries of 96 heads, or 64 of 12). Blocks end at the last position
  of the group. Rows behind it are zeroed: they may hold NaN, and a weight of zero is not enough.
* Selection: the grid is (sequence, group of up to 8 queries), and the queries of a group follow one
  another without a gap between copies. Rows are copied one by one, bfloat16 as the pairs that share
  32-bit words, so twice the bytes are read; the right halves are taken in VMEM. Copying an aligned
  tile of 8 rows instead would read 8 times the bytes.

VMEM at C = 576, width 512, bfloat16 (columns to whole lanes, 640): range with 768 rows, blocks of
512 keys: queries 1.9 MiB, results 3 MiB, sums 2.3 MiB, blocks 1.3 MiB, scores and weights 3 MiB.
Selection with 96 heads, blocks of 256 rows: queries of a group 1.9 MiB, results 3 MiB, rows 1.3
MiB. By shapes 12 and 7 MiB; the limit is 56.

The compiler's schedule for a v5p starts the copy of a selected row in 19 cycles, 39,000 for 2,048
rows, and has about 1,340 for 96 heads over a block of 256 of them, 11,000 for all: a query of a
selection waits for its copies.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from k3jax.ops import mosaic_tpu
from k3jax.ops.mosaic_tpu import LANES, column, dot
from k3jax.ops.rows import Rows

KEYS = 512  # of a block of a range
PAIRS = 768  # (query, head) pairs of a group over a range
SELECTED = 256  # rows of a block of a selection
QUERIES = 8  # of a group with selections
_NN, _NT = (1, 0), (1, 1)  # contracted axes of two matrices


def refusal(q_BTHQ, rows: Rows, w_k_HNC, where) -> str | None:
    """Why the kernels cannot take these inputs; None if they can."""
    del where
    if q_BTHQ.shape[2] > PAIRS:
        return f"{q_BTHQ.shape[2]} heads, over {PAIRS}"
    if w_k_HNC.shape[2] % LANES:
        return f"the latent has {w_k_HNC.shape[2]} columns, no multiple of {LANES} lanes"
    return mosaic_tpu.refusal(rows)


def _iota(shape, axis):
    return lax.broadcasted_iota(jnp.int32, shape, axis)


def _start(top_ref, sum_ref, acc_ref):
    top_ref[...] = jnp.full(top_ref.shape, -jnp.inf, jnp.float32)
    sum_ref[...] = jnp.zeros_like(sum_ref)
    acc_ref[...] = jnp.zeros_like(acc_ref)


def _add(q_XC, rows_SC, mask_XS, scale, top_ref, sum_ref, acc_ref):
    """One block of rows: `blocks.partial_attention` and `blocks.merge`, in place."""
    score_XS = jnp.where(mask_XS, dot(q_XC, rows_SC, _NT) * scale, -jnp.inf)
    old_X1 = top_ref[:, :1]
    top_X1 = jnp.maximum(old_X1, jnp.max(score_XS, axis=1, keepdims=True))
    finite_X1 = jnp.where(top_X1 == -jnp.inf, 0.0, top_X1)
    weight_XS, shrink_X1 = jnp.exp(score_XS - finite_X1), jnp.exp(old_X1 - finite_X1)
    sum_X1 = sum_ref[:, :1] * shrink_X1 + jnp.sum(weight_XS, axis=1, keepdims=True)
    width = acc_ref.shape[1]
    update_XW = dot(weight_XS.astype(rows_SC.dtype), rows_SC[:, :width], _NN)
    acc_ref[...] = acc_ref[...] * shrink_X1 + update_XW
    top_ref[...] = jnp.broadcast_to(top_X1, top_ref.shape)
    sum_ref[...] = jnp.broadcast_to(sum_X1, sum_ref.shape)


def _end(top_ref, sum_ref, acc_ref):
    """(weighted rows [X, W], log of the sum of exponentials [1, X])."""
    top_XL, sum_XL = top_ref[...], sum_ref[...]
    seen_XL = top_XL > -jnp.inf
    lse_XL = jnp.where(seen_XL, top_XL + jnp.log(jnp.where(seen_XL, sum_XL, 1.0)), -jnp.inf)
    return acc_ref[...] / jnp.where(seen_XL, sum_XL, 1.0)[:, :1], lse_XL.T[:1]


def _range_kernel(
    layer_ref, last_ref, at_ref, pages_ref, q_ref, rows_ref, o_ref, lse_ref,
    block_ref, sem, top_ref, sum_ref, acc_ref, *, scale, heads,
):  # fmt: skip
    last = last_ref[pl.program_id(0), pl.program_id(1)]
    blocks = pl.cdiv(last + 1, KEYS)
    pairs = q_ref.shape[2]
    pair_X1, position_X1 = _iota((pairs, 1), 0), jnp.full((pairs, 1), -1, jnp.int32)
    for q in range(at_ref.shape[3]):
        position_X1 = jnp.where(pair_X1 >= q * heads, at_ref[0, 0, 0, q], position_X1)
    _start(top_ref, sum_ref, acc_ref)

    def use(i, block_ref):
        @pl.when(i + 1 == blocks)
        def _():
            written_S1 = i * KEYS + _iota((KEYS, 1), 0) <= last
            block_ref[...] = jnp.where(written_S1, block_ref[...], 0)

        mask_XS = i * KEYS + _iota((pairs, KEYS), 1) <= position_X1
        _add(q_ref[0, 0], block_ref[...], mask_XS, scale, top_ref, sum_ref, acc_ref)

    mosaic_tpu.each_block(rows_ref, layer_ref[0], pages_ref, blocks, block_ref, sem, use)
    o_ref[0, 0], lse_ref[0, 0] = _end(top_ref, sum_ref, acc_ref)


def _selection_kernel(
    layer_ref, at_ref, pages_ref, index_ref, q_ref, rows_ref, o_ref, lse_ref,
    block_ref, sem, top_ref, sum_ref, acc_ref, *, scale, keys, size,
):  # fmt: skip
    group, count = index_ref.shape[2:]
    pieces = count // size

    def fetch(i):
        slot, q, first = lax.rem(i, 2), lax.div(i, pieces), lax.rem(i, pieces) * size

        def copy(j, _):
            at = jnp.clip(at_ref[0, 0, q, first + j], 0, keys - 1)
            mosaic_tpu.start_row(
                rows_ref, layer_ref[0], pages_ref, at, block_ref.at[slot], j, sem.at[slot]
            )

        lax.fori_loop(0, size, copy, None, unroll=8)

    fetch(0)

    def step(i, _):
        slot, q, piece = lax.rem(i, 2), lax.div(i, pieces), lax.rem(i, pieces)

        @pl.when(i + 1 < group * pieces)
        def _():
            fetch(i + 1)

        @pl.when(piece == 0)
        def _():
            _start(top_ref, sum_ref, acc_ref)

        index_1S = index_ref[0, 0, pl.ds(q, 1), pl.ds(pl.multiple_of(piece * size, size), size)]
        index_S1 = column(index_1S)[:, :1]
        present_S1 = (index_S1 >= 0) & (index_S1 < keys)
        mosaic_tpu.wait(block_ref.at[slot], sem.at[slot])
        rows_SC = mosaic_tpu.halves(block_ref[slot], index_S1, q_ref.dtype)
        # An absent row is another one, which may hold NaN.
        rows_SC = jnp.where(present_S1, rows_SC, 0)
        mask_1S = (index_1S >= 0) & (index_1S < keys)
        _add(q_ref[0, 0, q], rows_SC, mask_1S, scale, top_ref, sum_ref, acc_ref)

        @pl.when(piece == pieces - 1)
        def _():
            o_ref[0, 0, q], lse_ref[0, 0, pl.ds(q, 1)] = _end(top_ref, sum_ref, acc_ref)

    lax.fori_loop(0, group * pieces, step, None)


def attention(
    q_BTHC: Array,
    rows: Rows,
    where: tuple[str, Array],
    *,
    scale: float,
    width: int,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """The function of ``LATENT``. ``interpret`` runs it without a TPU, for tests."""
    kind, value = where
    run = _over_range if kind == "positions" else _over_selection
    return run(q_BTHC, rows, value, scale=scale, width=width, interpret=interpret)


def _pad(x, queries: int, value=0):
    """``queries`` more of them."""
    return jnp.pad(x, ((0, 0), (0, queries), *((0, 0),) * (x.ndim - 2)), constant_values=value)


def _of_group(*shape, **options):
    index = lambda b, g, *_: (b, g, *(0,) * len(shape))  # noqa: E731
    return pl.BlockSpec((1, 1, *shape), index, **options)


def _call(kernel, operands, specs, scalars, outputs, block, pairs, width, interpret, name):
    """A kernel over the grid that the last operand but the rows leads with."""
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=scalars,
            grid=operands[-2].shape[:2],
            in_specs=[*specs, pl.BlockSpec(memory_space=pltpu.HBM)],
            out_specs=[_of_group(*x.shape[2:]) for x in outputs],
            scratch_shapes=[
                pltpu.VMEM((2, *block.shape), block.dtype),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.VMEM((pairs, LANES), jnp.float32),
                pltpu.VMEM((pairs, LANES), jnp.float32),
                pltpu.VMEM((pairs, width), jnp.float32),
            ],
        ),
        out_shape=outputs,
        compiler_params=mosaic_tpu.PARAMETERS,
        interpret=interpret,
        name=name,
    )(*operands)


def _over_range(q_BTHC, rows: Rows, positions_BT, *, scale, width, interpret):
    batch, queries, heads, row = q_BTHC.shape
    group = queries
    if queries * heads > PAIRS:
        group = 1 << (PAIRS // heads).bit_length() - 1
    groups = pl.cdiv(queries, group)
    extra = groups * group - queries
    positions_BT = _pad(jnp.minimum(positions_BT, rows.shape[1] - 1), extra, -1)
    positions_BGQ = positions_BT.reshape(batch, groups, group)
    q_BGXC = _pad(q_BTHC, extra).reshape(batch, groups, group * heads, row)
    layer_1, pages_B1M, stack_LNPC = mosaic_tpu.operands(rows)
    o_BGXW, lse_BG1X = _call(
        partial(_range_kernel, scale=scale, heads=heads),
        [layer_1, positions_BGQ.max(-1), positions_BGQ[:, :, None], pages_B1M, q_BGXC, stack_LNPC],
        [
            _of_group(1, group, memory_space=pltpu.SMEM),
            mosaic_tpu.pages_spec(pages_B1M),
            _of_group(group * heads, row),
        ],
        2,
        [
            jax.ShapeDtypeStruct((batch, groups, group * heads, width), jnp.float32),
            jax.ShapeDtypeStruct((batch, groups, 1, group * heads), jnp.float32),
        ],
        jax.ShapeDtypeStruct((KEYS, row), rows.dtype),
        *(group * heads, width, interpret, "latent_range"),
    )
    o_BTHW = o_BGXW.reshape(batch, -1, heads, width)[:, :queries]
    return o_BTHW, lse_BG1X.reshape(batch, -1, heads)[:, :queries]


def _over_selection(q_BTHC, rows: Rows, indices_BTk, *, scale, width, interpret):
    batch, queries, heads, row = q_BTHC.shape
    count = indices_BTk.shape[2]
    group = next(g for g in range(min(QUERIES, queries), 0, -1) if queries % g == 0)
    groups, slots = queries // group, pl.cdiv(count, LANES) * LANES
    size = SELECTED if slots % SELECTED == 0 else LANES
    at_BGQk = jnp.pad(indices_BTk, ((0, 0), (0, 0), (0, slots - count)), constant_values=-1)
    at_BGQk = at_BGQk.reshape(batch, groups, group, slots)
    q_BGQHC = q_BTHC.reshape(batch, groups, group, heads, row)
    layer_1, pages_B1M, stack_LNPC = mosaic_tpu.operands(rows)
    word = jnp.uint32 if rows.dtype == jnp.bfloat16 else rows.dtype
    o_BGQHW, lse_BGQH = _call(
        partial(_selection_kernel, scale=scale, keys=rows.shape[1], size=size),
        [layer_1, at_BGQk, pages_B1M, at_BGQk, q_BGQHC, stack_LNPC],
        [
            _of_group(group, slots, memory_space=pltpu.SMEM),
            mosaic_tpu.pages_spec(pages_B1M),
            _of_group(group, slots),
            _of_group(group, heads, row),
        ],
        1,
        [
            jax.ShapeDtypeStruct((batch, groups, group, heads, width), jnp.float32),
            jax.ShapeDtypeStruct((batch, groups, group, heads), jnp.float32),
        ],
        jax.ShapeDtypeStruct((size, row), word),
        *(heads, width, interpret, "latent_selection"),
    )
    o_BTHW = o_BGQHW.reshape(batch, queries, heads, width)
    return o_BTHW, lse_BGQH.reshape(batch, queries, heads)
