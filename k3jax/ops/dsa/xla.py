"""Sparse attention in portable JAX: streamed exact top-k, and attention over gathered rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from k3jax.ops.mla import blocks
from k3jax.ops.mla import xla as dense
from k3jax.ops.rows import Rows, Scaled

ABSENT = jnp.iinfo(jnp.int32).max  # sorts after every position


def scores(q_BTHK, k_BSK, w_BTH, factor_BS1=None):
    """The indexer's scores for every query and key, float32 [B, T, S]."""
    if factor_BS1 is not None:  # codes are bfloat16 numbers, and their products exact in float32
        q_BTHK, k_BSK = q_BTHK.astype(jnp.bfloat16), k_BSK.astype(jnp.bfloat16)
    dot_BTHS = blocks.einsum("bthk,bsk->bths", q_BTHK, k_BSK)
    # A ReLU that keeps NaN. XLA:CPU turns relu(NaN) into 0 once maximum is fused (its fast
    # minimum and maximum), and a NaN key would rank above every negative score.
    relu_BTHS = jnp.where(dot_BTHS <= 0, 0.0, dot_BTHS)
    score_BTS = (relu_BTHS * w_BTH[..., None]).sum(2)
    return score_BTS if factor_BS1 is None else score_BTS * factor_BS1[:, None, :, 0]


def block_scores(q_BTHK, rows: Rows | Scaled, w_BTH, start, size: int):
    """`scores` of the ``size`` keys from ``start`` on."""
    if isinstance(rows, Scaled):
        factor_BS1 = rows.factors.block(start, size)
        return scores(q_BTHK, rows.codes.block(start, size), w_BTH, factor_BS1)
    return scores(q_BTHK, rows.block(start, size), w_BTH)


def ranked(score_BTS, legal_BTS):
    """Scores as keys with one order on every backend: legal finite > NaN > not legal.

    Not legal is -inf, NaN the lowest finite float, and every other score at least the float
    above it. -0.0, which a negative head weight makes of a ReLU's zero, becomes +0.0: top_k puts
    -0.0 below +0.0, although the two are equal.
    """
    lowest = jnp.finfo(jnp.float32).min
    above = jnp.nextafter(lowest, jnp.float32(0))
    score_BTS = jnp.where(score_BTS == 0, 0.0, score_BTS)
    score_BTS = jnp.where(jnp.isnan(score_BTS), lowest, jnp.maximum(score_BTS, above))
    return jnp.where(legal_BTS, score_BTS, -jnp.inf)


def ordered(rank):
    """float32 -> int32 in the same order; also within kernels."""
    bits = jax.lax.bitcast_convert_type(rank, jnp.int32)
    return bits ^ (jax.lax.shift_right_arithmetic(bits, 31) & 0x7FFFFFFF)


def unordered(key):
    """The inverse of `ordered`."""
    bits = key ^ (jax.lax.shift_right_arithmetic(key, 31) & 0x7FFFFFFF)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def streamed(q_BTHK, rows: Rows | Scaled, w_BTH, positions_BT, topk, *, query_block, key_block):
    """Exact causal top-k that holds scores of one query block and one key block at a time.

    A running list of the best ``topk``, ordered by (score down, position up), is merged with each
    block by one stable top_k. The list stands before the block and keys come in ascending order,
    so a tie goes to the lower position whatever the block sizes.

    Returns:
      (rank_BTk, at_BTk) in that order; rank is ``ranked`` of the score, -inf for none.
    """
    keys = rows.shape[1]

    def one_block(q_BTHK, w_BTH, positions_BT):
        shape = (*positions_BT.shape, topk)
        best = (jnp.full(shape, -jnp.inf, jnp.float32), jnp.full(shape, -1, jnp.int32))

        def step(best, start, fresh_S):
            at_S = start + jnp.arange(key_block, dtype=jnp.int32)
            legal_BTS = (at_S <= positions_BT[..., None]) & fresh_S
            rank_BTS = ranked(block_scores(q_BTHK, rows, w_BTH, start, key_block), legal_BTS)
            at_BTS = jnp.broadcast_to(at_S, rank_BTS.shape)
            rank = jnp.concatenate([best[0], rank_BTS], -1)
            at = jnp.concatenate([best[1], at_BTS], -1)
            rank, order = jax.lax.top_k(rank, topk)
            return rank, jnp.take_along_axis(at, order, -1, mode="promise_in_bounds")

        return blocks.over_keys(step, best, keys, key_block, positions_BT.max())

    return blocks.over_queries(one_block, query_block, (q_BTHK, w_BTH, positions_BT), (0, 0, -1))


def ascending(rank_BTk, at_BTk):
    """Positions in ascending order, what is not legal as -1 at the end."""
    at_BTk = jnp.sort(jnp.where(rank_BTk == -jnp.inf, ABSENT, at_BTk), -1)
    return jnp.where(at_BTk == ABSENT, -1, at_BTk)


def everything(positions_BT, keys: int, topk: int):
    """The selection when no more than ``topk`` keys exist: all of them up to the position."""
    at_k = jnp.arange(topk, dtype=jnp.int32)
    legal_BTk = (at_k <= positions_BT[..., None]) & (at_k < keys)
    return jnp.where(legal_BTk, at_k, -1)


def gathered(q_BTHQ, cache_BSC, w_k_HNC, w_v_HVC, indices_BTk, *, scale, query_block, spread=None):
    """Absorbed attention of every query over its own rows, gathered by query blocks."""
    rows = Rows.of(cache_BSC)
    keys = rows.shape[1]

    def one_block(q_BTHQ, indices_BTk):
        present_BTk = (indices_BTk >= 0) & (indices_BTk < keys)
        at_BTk = jnp.where(present_BTk, indices_BTk, 0)
        # Row 0 stands in for an absent one and may hold NaN: zero it, a weight of 0 is not enough.
        rows_BTkC = jnp.where(present_BTk[..., None], rows.take(at_BTk), 0)
        if spread is None:
            live_BT = present_BTk.any(-1)
            q_BTHC = dense.absorb_query(jnp.where(live_BT[..., None, None], q_BTHQ, 0), w_k_HNC)
        else:
            q_BTHC = spread.queries(dense.absorb_query(q_BTHQ, w_k_HNC))
        mask_BTHk = present_BTk[:, :, None]
        total = blocks.partial_attention(q_BTHC, rows_BTkC, rows_BTkC, mask_BTHk, scale)
        if spread is not None:
            total = spread.merge(total)
        row_BTHC = blocks.normalise(total)
        return dense.value_from_latent(row_BTHC.astype(q_BTHQ.dtype), w_v_HVC)

    return blocks.over_queries(one_block, query_block, (q_BTHQ, indices_BTk), (0, -1))
