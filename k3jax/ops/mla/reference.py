"""Latent attention written out per query in NumPy float64: the oracle of the fast forms."""

from __future__ import annotations

import numpy as np


def mla(q_BTHQ, cache_BSC, w_k_HNC, w_v_HVC, positions_BT, *, scale: float) -> np.ndarray:
    """Same contract as ``k3jax.ops.mla.mla``; float64 inside and out."""
    q, cache, w_k, w_v = (np.asarray(a, np.float64) for a in (q_BTHQ, cache_BSC, w_k_HNC, w_v_HVC))
    positions = np.asarray(positions_BT)
    rows = [
        [np.arange(min(p + 1, cache.shape[1])) for p in positions[b]] for b in range(len(positions))
    ]
    return attend_rows(q, cache, w_k, w_v, rows, scale)


def attend_rows(q, cache, w_k, w_v, rows, scale: float) -> np.ndarray:
    """Attention of query (b, t) over the cache rows ``rows[b][t]``; zeros for an empty set."""
    (heads, nope, latent), width = w_k.shape, w_v.shape[1]
    out = np.zeros((*q.shape[:2], heads, width))
    for b in range(q.shape[0]):
        used = np.unique(np.concatenate([np.zeros(0, int), *rows[b]])).astype(int)
        k_nope = np.full((cache.shape[1], heads, nope), np.nan)
        value = np.full((cache.shape[1], heads, width), np.nan)
        k_nope[used] = np.einsum("sc,hnc->shn", cache[b, used, :latent], w_k, optimize=True)
        value[used] = np.einsum("sc,hvc->shv", cache[b, used, :latent], w_v, optimize=True)
        for t in range(q.shape[1]):
            at = rows[b][t]
            if len(at) == 0:
                continue
            score = np.einsum("hn,shn->hs", q[b, t, :, :nope], k_nope[at])
            score = (score + q[b, t, :, nope:] @ cache[b, at, latent:].T) * scale
            weight = np.exp(score - score.max(-1, keepdims=True))
            weight /= weight.sum(-1, keepdims=True)
            out[b, t] = np.einsum("hs,shv->hv", weight, value[at])
    return out
