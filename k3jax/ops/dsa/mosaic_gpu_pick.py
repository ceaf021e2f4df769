"""The best k of some thousand candidates a query, by bisection over the bits of their ranks.

A block of one warpgroup holds all candidates of a query in registers.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from k3jax.ops.dsa import mosaic_gpu_lanes as lanes
from k3jax.ops.mosaic_gpu import LANE, Interpret, mode

MOST = 16384  # candidates, 128 registers a thread
_NONE = -(2**31) + 0x7FFFFF  # `lanes.ordered` of -inf
_i32 = jnp.int32


def _greatest(count, wanted, bits: range, start):
    """The greatest number t, of which only ``bits`` are set, with count(t) >= wanted."""

    def step(n, t):
        trial = t + lax.shift_left(jnp.int32(1), jnp.int32(bits.start) - n)
        return lax.select(count(trial) >= wanted, trial, t)

    return lax.fori_loop(0, len(bits), step, start)


def _load(ref, interpret):
    return ref[...] if interpret else plgpu.load(ref, layout=lanes.strided(ref.shape[-1]))


def _number(condition):
    return jnp.sum(jnp.where(condition, 1, 0).astype(_i32))


def _floor_kernel(rank_g, wanted_g, key_g, *, interpret):
    row = lax.axis_index("row")
    keys = lanes.ordered(_load(rank_g.at[row], interpret))
    count = lambda t: _number(keys >= t)  # noqa: E731
    # 20 bits: sign, exponent and 11 of the mantissa; the floor may be a little lower than asked for
    key_g[row] = _greatest(count, wanted_g[row], range(31, 11, -1), jnp.int32(-(2**31)))


def floor(rank_RC: Array, wanted_R: Array, *, interpret: Interpret = False) -> Array:
    """float32_R, at least ``wanted`` of the ranks are at or above it, and few more; -inf where there
    are not so many."""
    rows, size = rank_RC.shape
    key_R = plgpu.kernel(
        functools.partial(_floor_kernel, interpret=interpret),
        out_type=jax.ShapeDtypeStruct((rows,), _i32),
        grid=(rows,),
        grid_names=("row",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=LANE),
        interpret=mode(interpret),
    )(rank_RC, wanted_R)
    return jnp.where(key_R <= _NONE, -jnp.inf, lanes.unordered(key_R))


def _pick_kernel(rank_g, at_g, best_g, kept_g, count_s, *, topk, interpret):
    row = lax.axis_index("row")
    keys = lanes.ordered(_load(rank_g.at[row], interpret))
    size = best_g.shape[-1]
    for ref, value in ((best_g, -jnp.inf), (kept_g, -1)):
        empty = jnp.full((size,), value, ref.dtype)
        ref[row] = empty if interpret else plgpu.layout_cast(empty, lanes.strided(size))
    count_s[0] = jnp.int32(0)
    total = _number(keys > _NONE)
    wanted = jnp.minimum(total, topk)
    least = _greatest(
        lambda t: _number(keys >= t), wanted, range(31, -1, -1), jnp.int32(-(2**31))
    )
    least = jnp.maximum(least, _NONE + 1)
    above, equal = _number(keys > least), _number(keys == least)

    def last_of_ties(ties):
        """The position of the last that is kept among equals."""
        at = _load(at_g.at[row], interpret)
        # Bisection for the greatest t with at least n of the positions at or above it, upside down.
        late = jnp.where(keys == least, ~at, jnp.int32(-(2**31)))
        return ~_greatest(lambda t: _number(late >= t), ties, range(31, -1, -1), jnp.int32(-(2**31)))

    ties = wanted - above
    last = lax.cond(equal > ties, last_of_ties, lambda _: jnp.int32(2**31 - 1), ties)
    plgpu.commit_smem()
    lanes.compact(keys, least, last, at_g, best_g, kept_g, count_s, row, interpret=interpret)


def pick(
    rank_RC: Array, at_RC: Array, topk: int, *, interpret: Interpret = False
) -> tuple[Array, Array]:
    """The best ``topk`` candidates of each row, equal ranks by position, in any order.

    Args:
      rank_RC: float32, -inf for none; C a multiple of 512, up to `MOST`.
      at_RC: int32, read where there is a rank.

    Returns:
      (rank_Rk, at_Rk), k is topk rounded up to a multiple of 512; the rest is -inf and -1.
    """
    rows, size = rank_RC.shape
    k = -(-topk // 512) * 512
    return plgpu.kernel(
        functools.partial(_pick_kernel, topk=topk, interpret=interpret),
        out_type=(
            jax.ShapeDtypeStruct((rows, k), jnp.float32),
            jax.ShapeDtypeStruct((rows, k), _i32),
        ),
        scratch_types=[plgpu.SMEM((1,), _i32)],
        grid=(rows,),
        grid_names=("row",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=LANE),
        interpret=mode(interpret),
    )(rank_RC, at_RC)
