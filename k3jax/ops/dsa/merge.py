"""One top-k out of candidates that several devices hold, by counting instead of collecting them.

The k-th best rank is found digit by digit: how many candidates lie at or above each of 15 trial
thresholds is a sum over devices of 15 integers a query. Thirteen such sums replace a gather of
k candidates from every device.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

DIGIT = 4  # bits found by one sum over devices

AllReduce = Callable[[jax.Array], jax.Array]


def keep(
    rank_BTk: jax.Array, position_BTk: jax.Array, topk: int, length: int, all_reduce: AllReduce
) -> jax.Array:
    """Which of this device's candidates are among the best ``topk`` of all devices.

    Equal ranks go to the lower position; a rank of -inf is never kept.

    Args:
      rank_BTk: float32 of `k3jax.ops.dsa.candidates`.
      position_BTk: int32 in 0..length-1, the position in the sequence; no two candidates of a query
        share one.
      length: rows of the whole cache.
      all_reduce: sum of an int32 array over the devices that hold candidates.
    Returns:
      bool_BTk.
    """
    wanted_BT = jnp.full(rank_BTk.shape[:-1], topk, jnp.int32)
    legal_BTk = rank_BTk > -jnp.inf
    key_BTk = jnp.where(legal_BTk, _sortable(rank_BTk), jnp.uint32(0))
    limit_BT = _threshold(key_BTk, wanted_BT, 32, all_reduce)[..., None]
    above_BTk = key_BTk > limit_BT
    wanted_BT = wanted_BT - all_reduce(above_BTk.sum(-1, dtype=jnp.int32))
    equal_BTk = legal_BTk & (key_BTk == limit_BT)
    # Lower positions first: they get the higher keys. Candidates that do not tie get 0.
    late_BTk = jnp.where(equal_BTk, length - position_BTk, 0).astype(jnp.uint32)
    last_BT = _threshold(late_BTk, wanted_BT, length.bit_length(), all_reduce)[..., None]
    return above_BTk | (equal_BTk & (late_BTk >= last_BT))


def _sortable(x: jax.Array) -> jax.Array:
    """float32 -> uint32 in the same order; every float maps above 0."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    negative = bits >> 31 == 1
    return jnp.where(negative, ~bits, bits | jnp.uint32(1 << 31))


def _threshold(key_BTk, wanted_BT, bits: int, all_reduce: AllReduce) -> jax.Array:
    """uint32_BT: the largest t with at least ``wanted`` keys >= t on all devices; 0 if none."""
    limit_BT = jnp.zeros(wanted_BT.shape, jnp.uint32)
    for shift in reversed(range(0, bits, DIGIT)):
        digits = jnp.arange(1, 1 << DIGIT, dtype=jnp.uint32) << shift
        trial_BTd = limit_BT[..., None] + digits
        # One trial at a time, so that no [.., k, 15] array is made.
        counts = [
            (key_BTk >= trial_BTd[..., i : i + 1]).sum(-1, dtype=jnp.int32)
            for i in range(len(digits))
        ]
        count_BTd = all_reduce(jnp.stack(counts, -1))
        found_BT = (count_BTd >= wanted_BT[..., None]).sum(-1).astype(jnp.uint32)
        limit_BT = limit_BT + (found_BT << shift)
    return limit_BT
