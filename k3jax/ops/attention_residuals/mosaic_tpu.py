"""A depth read, mix and RMSNorm, as one Pallas kernel for TPUs (Mosaic).

The grid is (tiles of up to `ROWS` tokens, bank rows). A step has one source of a tile of tokens in
VMEM: it scores the source in float32 and merges it by online softmax into the sum of the tile; the
running sum of the block comes first. Steps past the count, a prefetched scalar, repeat the last
block, so bank rows behind it are neither copied nor looked at. The last step norms and writes.

Every source is read from HBM once, nothing but the result is written, and no float32 copy of a
source exists outside registers. Within a step tokens go in groups of 16 over columns of 128 lanes,
twice: for the score, and for the sum.

VMEM at 128 tokens, D = 7168, bfloat16: source, running sum and result 3.5 MiB each (a block twice
for the pipeline), the sum in float32 3.5 MiB, vectors below 0.2 MiB.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from k3jax.ops.mosaic_tpu import LANES, VMEM_LIMIT

ROWS = 128  # tokens of a tile
GROUP = 16  # tokens at a time: the rows of a tile of bfloat16
MAX_WIDTH = 16_384


def refusal(bank_NBTD, partial_BTD) -> str | None:
    """Why the kernel cannot take these inputs; None if it can."""
    del partial_BTD
    if bank_NBTD.dtype not in (jnp.float32, jnp.bfloat16):
        return f"sources are {bank_NBTD.dtype}, not float32 or bfloat16"
    if bank_NBTD.shape[0] == 0:
        return "the bank has no rows"
    if bank_NBTD.shape[3] % LANES or bank_NBTD.shape[3] > MAX_WIDTH:
        return f"D is {bank_NBTD.shape[3]}, no multiple of {LANES} lanes up to {MAX_WIDTH}"
    return None


def _mean(total_GL, width: int):
    """[G, 1]: the mean over a row, from its sums a lane."""
    return jnp.sum(total_GL, axis=1, keepdims=True) / width


def _kernel(
    count_ref, bank_ref, partial_ref, key_ref, norm_ref, o_ref, sum_ref, top_ref, total_ref,
    *, eps, out_eps, weight_after_cast,
):  # fmt: skip
    n, last = pl.program_id(1), pl.num_programs(1) - 1
    rows, width = sum_ref.shape
    group = min(rows, GROUP)
    columns = [slice(c, c + LANES) for c in range(0, width, LANES)]

    def each_group(use):
        def step(i, _):
            use(pl.ds(pl.multiple_of(i * group, group), group))

        lax.fori_loop(0, rows // group, step, None)

    def score(ref, at):
        square_GL = dot_GL = jnp.zeros((group, LANES), jnp.float32)
        for c in columns:
            v_GL = ref[at, c].astype(jnp.float32)
            square_GL, dot_GL = square_GL + v_GL * v_GL, dot_GL + v_GL * key_ref[:, c]
        return jnp.sum(dot_GL, axis=1, keepdims=True) * lax.rsqrt(_mean(square_GL, width) + eps)

    def keep(at, top_G1, total_G1):
        top_ref[at] = jnp.broadcast_to(top_G1, (group, LANES))
        total_ref[at] = jnp.broadcast_to(total_G1, (group, LANES))

    @pl.when(n == 0)
    def _():
        def start(at):
            top_G1 = score(partial_ref, at)
            keep(at, top_G1, jnp.ones_like(top_G1))
            for c in columns:
                sum_ref[at, c] = partial_ref[at, c].astype(jnp.float32)

        each_group(start)

    @pl.when(n < count_ref[0])
    def _():
        def merge(at):
            score_G1, old_G1 = score(bank_ref.at[0], at), top_ref[at][:, :1]
            top_G1 = jnp.maximum(old_G1, score_G1)
            shrink_G1, weight_G1 = jnp.exp(old_G1 - top_G1), jnp.exp(score_G1 - top_G1)
            keep(at, top_G1, total_ref[at][:, :1] * shrink_G1 + weight_G1)
            for c in columns:
                v_GL = bank_ref[0, at, c].astype(jnp.float32)
                sum_ref[at, c] = sum_ref[at, c] * shrink_G1 + v_GL * weight_G1

        each_group(merge)

    @pl.when(n == last)
    def _():
        def norm(at):
            total_G1, square_GL = total_ref[at][:, :1], jnp.zeros((group, LANES), jnp.float32)
            for c in columns:
                mixed_GL = (sum_ref[at, c] / total_G1).astype(o_ref.dtype).astype(jnp.float32)
                square_GL += mixed_GL * mixed_GL
                sum_ref[at, c] = mixed_GL
            scale_G1 = lax.rsqrt(_mean(square_GL, width) + out_eps)
            for c in columns:
                y_GL, weight_1L = sum_ref[at, c] * scale_G1, norm_ref[:, c]
                if weight_after_cast:
                    y_GL = y_GL.astype(o_ref.dtype).astype(jnp.float32)
                o_ref[at, c] = (y_GL * weight_1L).astype(o_ref.dtype)

        each_group(norm)


def read(
    bank_NBTD: Array,
    partial_BTD: Array,
    norm_D: Array,
    query_D: Array,
    out_norm_D: Array,
    count: Array,
    *,
    eps: float,
    out_eps: float,
    weight_after_cast: bool,
    interpret: bool = False,
) -> Array:
    """See :func:`k3jax.ops.attention_residuals.read`. ``interpret`` runs it without a TPU."""
    sources, *lead, width = bank_NBTD.shape
    tokens = partial_BTD.size // width
    if tokens == 0:
        return partial_BTD
    rows = tokens if tokens < GROUP else min(ROWS, tokens // GROUP * GROUP)
    key_1D = norm_D.astype(jnp.float32) * query_D.astype(jnp.float32)

    def of_bank(i, n, count):
        return jnp.minimum(n, jnp.maximum(count[0] - 1, 0)), i, 0

    tile = pl.BlockSpec((rows, width), lambda i, n, count: (i, 0))
    vector = pl.BlockSpec((1, width), lambda i, n, count: (0, 0))
    y_RD = pl.pallas_call(
        partial(_kernel, eps=eps, out_eps=out_eps, weight_after_cast=weight_after_cast),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(pl.cdiv(tokens, rows), sources),
            in_specs=[pl.BlockSpec((1, rows, width), of_bank), tile, vector, vector],
            out_specs=tile,
            scratch_shapes=[
                pltpu.VMEM((rows, width), jnp.float32),
                *[pltpu.VMEM((rows, LANES), jnp.float32)] * 2,
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((tokens, width), partial_BTD.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT
        ),
        interpret=interpret,
        name="depth_read",
    )(
        count.reshape(1),
        bank_NBTD.reshape(sources, tokens, width),
        partial_BTD.reshape(tokens, width),
        key_1D[None],
        out_norm_D.astype(jnp.float32)[None],
    )
    return y_RD.reshape(*lead, width)
