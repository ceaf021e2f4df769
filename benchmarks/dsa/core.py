"""Latent attention on absorbed queries in portable JAX: the contract of `k3jax.ops.mla.latent`.

In bf16 it is the portable form of a row, in float32 the reference of the error rows.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from k3jax.ops.mla import blocks
from k3jax.ops.rows import Rows

PIECE = 8192  # cache rows at a time, for every query: float32 weights of 96 heads take 3 MB each


def attention(q_BTHC, rows: Rows, where, *, scale: float, width: int):
    """(o_BTHW float32, lse_BTH float32) by blocks of queries; see `k3jax.ops.mla.latent.LATENT`.

    Works in the rows' dtype with float32 sums, float32 at full precision.
    """
    kind, value = where
    one_block, columns = (_dense, 1) if kind == "positions" else (_gathered, value.shape[-1])
    heads, row = q_BTHC.shape[2:]
    per_query = rows.batch * columns * (row * rows.dtype.itemsize * 2 + heads * 8)
    if kind == "positions":
        per_query = rows.batch * heads * 8 * min(PIECE, rows.shape[1])
    block = max(1, blocks.BUDGET_BYTES // per_query)

    def run(q_BTHC, value):
        total = one_block(q_BTHC, rows, value, scale)
        lse_BTH = total.top_XM + jnp.log(total.sum_XM)
        return blocks.normalise(total)[..., :width], lse_BTH

    return blocks.over_queries(run, block, (q_BTHC, value), (0, -1))


def _gathered(q_BTHC, rows: Rows, at_BTk, scale: float) -> blocks.Partial:
    present_BTk = (at_BTk >= 0) & (at_BTk < rows.shape[1])
    rows_BTkC = rows.take(jnp.where(present_BTk, at_BTk, 0))
    rows_BTkC = jnp.where(present_BTk[..., None], rows_BTkC, 0)
    mask_BTHk = present_BTk[:, :, None]
    return blocks.partial_attention(q_BTHC, rows_BTkC, rows_BTkC, mask_BTHk, scale)


def _dense(q_BTHC, rows: Rows, positions_BT, scale: float) -> blocks.Partial:
    batch, queries, heads, row = q_BTHC.shape
    keys = rows.shape[1]
    piece = min(PIECE, keys)
    q_BXC = q_BTHC.reshape(batch, queries * heads, row)

    def step(total, start, fresh_S):
        rows_BSC = rows.block(start, piece)
        at_S = start + jnp.arange(piece, dtype=jnp.int32)
        seen_BS = at_S <= positions_BT.max(1, keepdims=True)
        rows_BSC = jnp.where(seen_BS[..., None], rows_BSC, 0)
        mask_BTS = (at_S <= positions_BT[..., None]) & fresh_S
        mask_BTHS = jnp.broadcast_to(mask_BTS[:, :, None], (batch, queries, heads, piece))
        mask_BXS = mask_BTHS.reshape(batch, queries * heads, piece)
        part = blocks.partial_attention(q_BXC, rows_BSC, rows_BSC, mask_BXS, scale)
        return blocks.merge(total, part)

    empty = blocks.empty_partial((batch, queries * heads), row)
    total = blocks.over_keys(step, empty, keys, piece, positions_BT.max())
    return blocks.reshape(total, (batch, queries, heads))


def float32(rows: jax.Array) -> Rows:
    return Rows.of(rows.astype(jnp.float32))
