"""What kernels for Hopper GPUs (Pallas, Mosaic GPU) share: layouts, products, small formulas.

Kernels are lowered by lanes (`LANE`): each array knows its layout, and a layout error points at a
line. A matrix in registers has the layout of a warpgroup product, `WGMMA`: warp w of four holds
rows 16 w .. 16 w + 15 of each 64. Its row vectors have the layout `ROWS`, its column vectors
`COLUMNS`.

Interpret mode runs kernels on a CPU. It knows no product with an operand in registers, so
`products` computes plain dots there: rounding of operands is the same, the order of sums is not.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

WGMMA = plgpu.Layout.WGMMA
ROWS = plgpu.Layout.WGMMA.reduce(1)
COLUMNS = plgpu.Layout.WGMMA.reduce(0)
LANE = plgpu.LoweringSemantics.Lane
LOG2E = math.log2(math.e)
Interpret = bool | plgpu.InterpretGPUParams  # whether to run in interpret mode, on a CPU, and how


PARAMETERS = plgpu.CompilerParams(
    lowering_semantics=LANE,
    approx_math=True,
    unsafe_no_auto_barriers=True,
    reduction_scratch_bytes=0,
)
"""Of a kernel whose warpgroups have different roles."""


def swizzled(dtype):
    """Transforms of shared memory whose rows are 128 bytes, in tiles of 8: piece p of row r, 16
    bytes, stands at piece p xor (r % 8)."""
    columns = 128 // jnp.dtype(dtype).itemsize
    tiling = plgpu.TilingTransform((8, columns))  # pyright: ignore[reportAbstractUsage]
    swizzle = plgpu.SwizzleTransform(128)  # pyright: ignore[reportAbstractUsage]
    return (tiling, swizzle)


def smem(shape: tuple[int, ...], dtype):
    """Shared memory that a warpgroup product and a bulk copy can both read."""
    return plgpu.SMEM(shape, dtype, transforms=swizzled(dtype))


def mode(interpret: Interpret) -> plgpu.InterpretGPUParams | None:
    """What `plgpu.kernel` takes."""
    return plgpu.InterpretGPUParams() if interpret is True else interpret or None


def iota(shape: tuple[int, int], axis: int):
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=WGMMA)


def by_row(x_M, shape: tuple[int, int]):
    """A vector of `ROWS` as a matrix of equal columns."""
    return lax.broadcast_in_dim(x_M, shape, (0,))


def by_column(x_N, shape: tuple[int, int]):
    """A vector of `COLUMNS` as a matrix of equal rows."""
    return lax.broadcast_in_dim(x_N, shape, (1,))


def sigmoid(x):
    """1 / (1 + exp(-x)), the quotient as a squared reciprocal root: two fast instructions."""
    root = lax.rsqrt(1.0 + jnp.exp2(-LOG2E * x))
    return root * root


def _value(x):
    return (x if isinstance(x, jax.Array) else x[...]).astype(jnp.float32)


def products(*sums, interpret) -> list[jax.Array]:
    """Sums of matrix products in float32, all in flight at once.

    Args:
      *sums: each is (shape, initial value or None, [(a, b), ...]) and becomes
        initial + sum of a @ b; a in registers or shared memory, b in shared memory, of one 16-bit
        dtype. All sums have an initial value or none has.
      interpret: whether the kernel is interpreted.
    """
    if interpret:
        results = []
        for shape, initial, pairs in sums:
            total = jnp.zeros(shape, jnp.float32) if initial is None else initial
            for a, b in pairs:
                total = total + jnp.dot(_value(a), _value(b), precision=lax.Precision.HIGHEST)
            results.append(total)
        return results

    def issue(accumulators):
        for accumulator, (_, _, pairs) in zip(accumulators, sums, strict=True):
            for a, b in pairs:
                plgpu.wgmma(accumulator, a, b)

    if all(initial is None for _, initial, _ in sums):

        def scoped(*accumulators):
            issue(accumulators)
            plgpu.wgmma_wait(0)
            return [accumulator[...] for accumulator in accumulators]

        return pl.run_scoped(scoped, *[plgpu.ACC(shape, jnp.float32) for shape, _, _ in sums])
    # Typed as references, which it turns into arrays.
    values = pl.run_state(issue)([plgpu.ACC.init(initial) for _, initial, _ in sums])
    return values  # pyright: ignore[reportReturnType]


def first_row(x_MN, *, interpret):
    """The first row of a matrix of equal rows, in `COLUMNS`, from a warp's own registers."""
    if interpret:
        return x_MN[0]
    from jax.experimental.mosaic import gpu as mgpu

    shape = (x_MN.shape[1],)

    @plgpu.inline_mgpu(
        arg_types=(WGMMA,),
        return_type=plgpu.ShapeDtypeStruct(shape, x_MN.dtype, layout=COLUMNS),
    )
    def pick(_, x):
        layout = mgpu.WGMMA_LAYOUT.reduce((0,))
        registers = x.registers[0, :, 0, 0, 0].reshape(layout.registers_shape(shape))
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return pick(x_MN)  # pyright: ignore[reportCallIssue]  # it passes the first one itself
