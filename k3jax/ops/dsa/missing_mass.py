"""What a selection leaves out: the softmax mass of the other rows, and what that can change."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from k3jax.ops import mla
from k3jax.ops.mla import blocks
from k3jax.ops.mla.xla import member_mask
from k3jax.ops.rows import Rows


class MissingMass(NamedTuple):
    """Of every query and head, float32 [B, T, H].

    Attributes:
      mass: softmax weight of dense attention on rows outside of the selection, 0 to 1.
      bound: on the Euclidean distance between the dense and the sparse read of a head.
    """

    mass_BTH: jax.Array
    bound_BTH: jax.Array


def missing_mass(
    q_BTHQ: jax.Array,
    cache_BSC: jax.Array | Rows,
    w_k_HNC: jax.Array,
    w_v_HVC: jax.Array,
    positions_BT: jax.Array,
    indices_BTk: jax.Array,
    *,
    scale: float,
    query_block: int | None = None,
    key_block: int | None = None,
) -> MissingMass:
    """How much attention a selection loses, for research.

    With p = softmax over all rows s <= position of a head's scores (formula of ``mla``), values
    ``v[s] = w_v[h] c[s]`` and a selection I of those rows::

        mass  = sum of p[s] over rows outside of I
        bound = 2 * mass * max ||v[s]||           Euclidean norm, over all rows s <= position

    Why it bounds ``||o - o'||`` of the dense read ``o = sum p[s] v[s]`` and the sparse one o':
    for 0 < mass < 1, ``o = (1 - mass) o' + mass u``, where o' and u are averages of v over I and
    over the rest with the weights p. So ``o - o' = mass (u - o')``, and neither average is longer
    than the longest v. Without a selected row o' = 0 and mass = 1: ``||o|| <= max ||v||``. The
    bound is reached where v is one vector on I and its opposite on the rest.

    The output gate and o_proj are not part of it. The mass is summed over the rows outside, not
    taken from 1, so that a small one is exact too: all is float32, with a relative error of about
    1e-7 times the largest score, and below 1e-38 it becomes 0. Memory is bounded as in ``mla``, by
    blocks of queries and keys; each query block expands all rows to values once.

    Args:
      q_BTHQ, cache_BSC, w_k_HNC, w_v_HVC, positions_BT: as for ``mla``. Rows after every position
        may hold anything.
      indices_BTk: int32 from ``select``; negative entries and rows after the position are absent.
      scale: as for ``mla``.
      query_block, key_block: as for ``mla``.

    Returns:
      `MissingMass`; zeros for a padded query.

    Raises:
      ValueError: shapes or dtypes that do not fit.
    """
    for where in (positions_BT, indices_BTk):
        mla.check(q_BTHQ, cache_BSC, w_k_HNC, w_v_HVC, where, "dsa.missing_mass")
    rows = Rows.of(cache_BSC)
    batch, keys, row = rows.shape
    queries, heads, _ = q_BTHQ.shape[1:]
    value, width = w_v_HVC.shape[1:]
    planned = blocks.plan(
        queries,
        keys,
        pair=batch * heads * 3 * 4,  # scores, weights, norms of the rows that a query sees
        per_key=batch * (row + 2 * heads * value) * 4,
        per_query=batch * heads * (row + 4) * 4,
    )
    query_block = query_block or planned[0]
    key_block = min(key_block or planned[1], keys)
    w_k_HNC, w_v_HVC = w_k_HNC.astype(jnp.float32), w_v_HVC.astype(jnp.float32)
    nope = w_k_HNC.shape[1]

    def one_block(q_BTHQ, positions_BT, indices_BTk):
        # A padded query may hold NaN.
        q_BTHQ = jnp.where((positions_BT >= 0)[..., None, None], q_BTHQ, 0).astype(jnp.float32)
        q_BTHC = blocks.einsum("bthn,hnc->bthc", q_BTHQ[..., :nope], w_k_HNC)
        q_BTHC = jnp.concatenate([q_BTHC, q_BTHQ[..., nope:]], -1)

        def step(sums, start, fresh_S):
            top_BTH, all_BTH, outside_BTH, longest_BTH = sums
            at_S = start + jnp.arange(key_block, dtype=jnp.int32)
            seen_BTS = (at_S <= positions_BT[..., None]) & fresh_S
            rows_BSC = jnp.where(seen_BTS.any(1)[..., None], rows.block(start, key_block), 0)
            rows_BSC = rows_BSC.astype(jnp.float32)
            score_BTHS = blocks.einsum("bthc,bsc->bths", q_BTHC, rows_BSC) * scale
            score_BTHS = jnp.where(seen_BTS[:, :, None], score_BTHS, -jnp.inf)
            new_BTH = jnp.maximum(top_BTH, score_BTHS.max(-1))
            finite_BTH = jnp.where(new_BTH == -jnp.inf, 0, new_BTH)
            weight_BTHS = jnp.exp(score_BTHS - finite_BTH[..., None])
            left_BTS = ~member_mask(jnp.where(indices_BTk < 0, -1, indices_BTk - start), key_block)
            kept_BTH = jnp.exp(top_BTH - finite_BTH)
            v_BSHV = blocks.einsum("bsc,hvc->bshv", rows_BSC[..., :width], w_v_HVC)
            norm_BHS = jnp.sqrt(jnp.square(v_BSHV).sum(-1)).swapaxes(1, 2)
            norm_BTHS = jnp.where(seen_BTS[:, :, None], norm_BHS[:, None], 0)
            return (
                new_BTH,
                all_BTH * kept_BTH + weight_BTHS.sum(-1),
                outside_BTH * kept_BTH + jnp.where(left_BTS[:, :, None], weight_BTHS, 0).sum(-1),
                jnp.maximum(longest_BTH, norm_BTHS.max(-1)),
            )

        zero_BTH = jnp.zeros(q_BTHC.shape[:3], jnp.float32)
        none = (zero_BTH - jnp.inf, zero_BTH, zero_BTH, zero_BTH)
        sums = blocks.over_keys(step, none, keys, key_block, positions_BT.max())
        _, all_BTH, outside_BTH, longest_BTH = sums
        mass_BTH = jnp.minimum(outside_BTH / jnp.where(all_BTH == 0, 1, all_BTH), 1)
        return MissingMass(mass_BTH, 2 * mass_BTH * longest_BTH)

    return blocks.over_queries(
        one_block, query_block, (q_BTHQ, positions_BT, indices_BTk), (0, -1, -1)
    )
