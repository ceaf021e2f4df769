"""Assignments of tokens to experts as rows that are sorted by expert, and tiles of such rows."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

COMPARED = 1 << 24
"""Pairs of numbers that are compared to count instead of sorting: one pass of a device, where a
sort is a chain of several."""


ALIGNMENT = 8
"""An expert's rows begin at a multiple of it: bulk copies take whole tiles of 8 rows."""


NOWHERE = 2**30


class Rows(NamedTuple):
    """Sorted by expert, then by token, with up to 7 rows without a token behind each expert's.

    Attributes:
      token_R: int32, the token of a row; 0 where there is none.
      place_Nk: int32, the row of each assignment; `NOWHERE` where it has no expert.
      begin_E: int32, the first row of each expert.
      end_E: int32, the row after its last.
    """

    token_R: jax.Array
    place_Nk: jax.Array
    begin_E: jax.Array
    end_E: jax.Array


class Tiles(NamedTuple):
    """Runs of rows of one expert. Only the first ``used`` tiles are any.

    Attributes:
      expert_T, start_T, count_T: int32; the rows are ``start .. start + count - 1``.
      used: int32 [1].
    """

    expert_T: jax.Array
    start_T: jax.Array
    count_T: jax.Array
    used: jax.Array


def _before(x_E: jax.Array) -> jax.Array:
    """Sums of what stands before each number: one reduction, where a scan is a chain of them."""
    at_E = jnp.arange(len(x_E), dtype=jnp.int32)
    return jnp.where(at_E < at_E[:, None], x_E, 0).sum(1, dtype=jnp.int32)


def bound(assignments: int, num_experts: int) -> int:
    """Rows that so many assignments may need."""
    rows = assignments + min(assignments, num_experts) * (ALIGNMENT - 1)
    return -(-rows // ALIGNMENT) * ALIGNMENT


def sort(ids_Nk: jax.Array, num_experts: int) -> Rows:
    """Rows of assignments; ids outside 0..num_experts-1 are no experts. R is `bound`."""
    tokens, k = ids_Nk.shape
    total = tokens * k
    real_A = ((ids_Nk >= 0) & (ids_Nk < num_experts)).reshape(total)
    expert_A = jnp.where(real_A, ids_Nk.reshape(total), num_experts)
    at_A = jnp.arange(total, dtype=jnp.int32)
    if total * total <= COMPARED:
        before_AA = (expert_A[None] < expert_A[:, None]) | (
            (expert_A[None] == expert_A[:, None]) & (at_A[None] < at_A[:, None])
        )
        rank_A = before_AA.sum(1, dtype=jnp.int32)
    else:
        order_A = jnp.argsort(expert_A, stable=True).astype(jnp.int32)
        rank_A = jnp.zeros_like(order_A).at[order_A].set(at_A, unique_indices=True)
    experts_E1 = jnp.arange(num_experts, dtype=jnp.int32)[:, None]
    before_E = (expert_A[None] < experts_E1).sum(1, dtype=jnp.int32)
    count_E = (expert_A[None] <= experts_E1).sum(1, dtype=jnp.int32) - before_E
    room_E = -(-count_E // ALIGNMENT) * ALIGNMENT
    begin_E = _before(room_E)
    rows = bound(total, num_experts)
    place_A = rank_A + (begin_E - before_E).at[expert_A].get(mode="fill", fill_value=0)
    place_A = jnp.where(real_A, place_A, NOWHERE)
    token_R = jnp.zeros((rows,), jnp.int32).at[place_A].set(at_A // k, mode="drop")
    return Rows(token_R, place_A.reshape(tokens, k), begin_E, begin_E + count_E)


def cut(begin_E: jax.Array, end_E: jax.Array, first, rows: int, size: int) -> Tiles:
    """Tiles of at most ``size`` rows of the rows ``first .. first + rows - 1``; starts count from
    ``first``.

    R rows of U = min(R, E) experts need at most (R + U (size - 1)) / size tiles.
    """
    num_experts = len(begin_E)
    count = max(1, (rows + min(rows, num_experts) * (size - 1)) // size)
    begin_E = jnp.clip(begin_E - first, 0, rows)
    end_E = jnp.clip(end_E - first, 0, rows)
    tiles_E = (end_E - begin_E + size - 1) // size
    after_E = _before(tiles_E) + tiles_E
    tile_T = jnp.arange(count, dtype=jnp.int32)
    expert_T = (after_E[None] <= tile_T[:, None]).sum(1, dtype=jnp.int32)
    expert_T = jnp.minimum(expert_T, num_experts - 1)
    start_T = begin_E[expert_T] + (tile_T - after_E[expert_T] + tiles_E[expert_T]) * size
    count_T = jnp.clip(end_E[expert_T] - start_T, 0, size)
    return Tiles(expert_T, start_T, count_T, after_E[-1:])


def combine(sum_NL, y_RL, place_Nk, weights_Nk, first):
    """Adds to each token what rows ``first`` and on hold for it, weighted, one after the other in
    the order of places, so that a sum does not depend on where segments end.

    Args:
      sum_NL: float32.
      y_RL: bfloat16, the columns in the same order.
      place_Nk: ascending; rows elsewhere add nothing.
    """
    rows = y_RL.shape[0]
    for j in range(place_Nk.shape[1]):
        at_N = place_Nk[:, j] - first
        there_N1 = ((at_N >= 0) & (at_N < rows))[:, None]
        y_NL = y_RL[jnp.clip(at_N, 0, rows - 1)].astype(jnp.float32)
        sum_NL = sum_NL + jnp.where(there_N1, y_NL * weights_Nk[:, j, None], 0.0)
    return sum_NL


def ascending(place_Nk, weights_Nk):
    """Both in the order of places."""
    k = place_Nk.shape[1]
    at_k = jnp.arange(k, dtype=jnp.int32)
    before = (place_Nk[:, None] < place_Nk[..., None]) | (
        (place_Nk[:, None] == place_Nk[..., None]) & (at_k < at_k[:, None])
    )
    rank_Nk = before.sum(-1, dtype=jnp.int32)
    chosen_Nkk = rank_Nk[:, None] == at_k[:, None]
    pick = lambda x_Nk: jnp.where(chosen_Nkk, x_Nk[:, None], 0).sum(-1)  # noqa: E731
    return pick(place_Nk), pick(weights_Nk)
