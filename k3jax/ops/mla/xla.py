"""Latent attention in portable JAX: the expanded and the absorbed form over one driver."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from k3jax.ops.mla import blocks
from k3jax.ops.rows import Rows


def expanded(q_BTHQ, cache_BSC, w_k_HNC, w_v_HVC, where, *, scale, query_block, key_block):
    """Keys and values of every head are made once from the latent, then ordinary attention.

    ``where`` is ("positions", positions_BT) or ("indices", indices_BTk): which rows a query sees.
    """
    width = w_k_HNC.shape[-1]
    cache_BSC = Rows.of(cache_BSC).whole()
    cache_BSC = jnp.where(_used(where, cache_BSC.shape[1])[..., None], cache_BSC, 0)
    latent_BSC, rope_BSR = cache_BSC[..., :width], cache_BSC[..., width:]
    nope_BHSN = blocks.einsum("bsc,hnc->bhsn", latent_BSC, w_k_HNC).astype(q_BTHQ.dtype)
    v_BHSV = blocks.einsum("bsc,hvc->bhsv", latent_BSC, w_v_HVC).astype(q_BTHQ.dtype)
    rope_BHSR = jnp.broadcast_to(
        rope_BSR[:, None], (*nope_BHSN.shape[:3], rope_BSR.shape[-1])
    )  # one raw part for all heads
    k_BHSQ = jnp.concatenate([nope_BHSN, rope_BHSR], -1)

    def load(start, size):
        return tuple(jax.lax.dynamic_slice_in_dim(a, start, size, 2) for a in (k_BHSQ, v_BHSV))

    return _attend(
        q_BTHQ,
        where,
        load,
        enter=lambda q_BTHQ: q_BTHQ,
        leave=lambda o_BTHV: o_BTHV,
        keys=k_BHSQ.shape[2],
        width=v_BHSV.shape[-1],
        per_head=True,
        scale=scale,
        sizes=(query_block, key_block),
    )


def absorbed(
    q_BTHQ, cache_BSC, w_k_HNC, w_v_HVC, where, *, scale, query_block, key_block, spread=None
):
    """Queries are moved into the latent space and every head reads the same cache rows.

    ``spread`` is None, or an `ops.mla.Spread` when other devices hold other rows of the cache.
    """
    rows = Rows.of(cache_BSC)
    used_BS = _used(where, rows.shape[1])

    def load(start, size):
        rows_BSC = rows.block(start, size)
        used = jax.lax.dynamic_slice_in_dim(used_BS, start, size, 1)
        rows_BSC = jnp.where(used[..., None], rows_BSC, 0)
        return rows_BSC, rows_BSC

    return _attend(
        q_BTHQ,
        where,
        load,
        enter=lambda q_BTHQ: absorb_query(q_BTHQ, w_k_HNC),
        leave=lambda row_BTHC: value_from_latent(row_BTHC, w_v_HVC),
        keys=rows.shape[1],
        width=rows.shape[2],
        per_head=False,
        scale=scale,
        sizes=(query_block, key_block),
        spread=spread,
    )


def absorb_query(q_BTHQ, w_k_HNC):
    """[nope | rope] -> [w_k^T nope | rope], which scores against a cache row."""
    nope = w_k_HNC.shape[1]
    latent_BTHC = blocks.einsum("bthn,hnc->bthc", q_BTHQ[..., :nope], w_k_HNC)
    return jnp.concatenate([latent_BTHC.astype(q_BTHQ.dtype), q_BTHQ[..., nope:]], -1)


def value_from_latent(row_BTHC, w_v_HVC):
    """Weighted cache rows -> w_v times their latent part, in the rows' dtype.

    Values are read as whole rows of C + R, so that the latent part needs no copy of the cache;
    the R columns (1/9 more products at K3's 512 + 64) are dropped here.
    """
    latent_BTHC = row_BTHC[..., : w_v_HVC.shape[-1]]
    return blocks.einsum("bthc,hvc->bthv", latent_BTHC, w_v_HVC).astype(row_BTHC.dtype)


def member_mask(indices_BTk, keys: int):
    """True at [b, t, s] when row s is among ``indices[b, t]``; negative entries are absent."""
    # A negative index would count from the end: send it past the end, where scatter drops it.
    safe_BTk = jnp.where(indices_BTk < 0, keys, indices_BTk)
    empty_S = jnp.zeros((keys,), bool)
    return jax.vmap(jax.vmap(lambda i: empty_S.at[i].set(True, mode="drop")))(safe_BTk)


def _used(where, keys: int):
    """True at [b, s] when at least one query of the batch row may see cache row s."""
    kind, value = where
    if kind == "positions":
        return jnp.arange(keys, dtype=jnp.int32) <= value.max(1, keepdims=True)
    return member_mask(value.reshape(value.shape[0], 1, -1), keys)[:, 0]


def _attend(q_BTHQ, where, load, *, enter, leave, keys, width, per_head, scale, sizes, spread=None):
    """Softmax attention by query blocks and, for long ``keys``, by key blocks.

    ``enter`` takes a block of queries to the width of the keys that ``load`` gives, ``leave`` the
    weighted values (of ``width``) to the output, so that neither exists for all queries at once.
    """
    kind, value = where
    query_block, key_block = sizes

    def one_block(q_BTHQ, value):
        length = q_BTHQ.shape[1]
        if spread is None:
            live_BT = value >= 0 if kind == "positions" else (value >= 0).any(-1)
            q_BTHD = enter(jnp.where(live_BT[..., None, None], q_BTHQ, 0))
        else:
            q_BTHD = spread.queries(enter(q_BTHQ))
        batch, _, heads, _ = q_BTHD.shape
        if per_head:
            rows, q_XMD = (batch, heads, length), q_BTHD.swapaxes(1, 2)
        else:
            rows, q_XMD = (batch, length * heads), q_BTHD.reshape(batch, length * heads, -1)
        member_BTS = None if kind == "positions" else member_mask(value, keys)

        def mask(start, size, fresh_S):
            if member_BTS is None:
                at_S = start + jnp.arange(size, dtype=jnp.int32)
                mask_BTS = at_S <= value[..., None]
            else:
                mask_BTS = jax.lax.dynamic_slice_in_dim(member_BTS, start, size, 2)
            if fresh_S is not None:
                mask_BTS = mask_BTS & fresh_S
            if per_head:
                return mask_BTS[:, None]
            mask_BTHS = jnp.broadcast_to(mask_BTS[:, :, None], (batch, length, heads, size))
            return mask_BTHS.reshape(batch, length * heads, size)

        def piece(start, size, fresh_S):
            k_XSD, v_XSV = load(start, size)
            return blocks.partial_attention(q_XMD, k_XSD, v_XSV, mask(start, size, fresh_S), scale)

        if key_block >= keys:
            total = piece(0, keys, None)
        else:
            total = blocks.over_keys(
                lambda c, start, fresh_S: blocks.merge(c, piece(start, key_block, fresh_S)),
                blocks.empty_partial(rows, width),
                keys,
                key_block,
                value.max(),
            )
        if spread is not None:
            total = spread.merge(blocks.reshape(total, (batch, length, heads)))
            return leave(blocks.normalise(total).astype(q_BTHQ.dtype))
        o_XMV = blocks.normalise(total).astype(q_BTHQ.dtype)
        if per_head:
            return leave(o_XMV.swapaxes(1, 2))
        return leave(o_XMV.reshape(batch, length, heads, width))

    return blocks.over_queries(one_block, query_block, (q_BTHQ, value), (0, -1))
