"""Gated DSA's selection and attention, query by query in NumPy float64: the oracle."""

from __future__ import annotations

import numpy as np

from k3jax.ops.mla.reference import attend_rows


def scores(q_BTHK, k_BSK, w_BTH) -> np.ndarray:
    """sum_h w[b,t,h] relu(q[b,t,h] . k[b,s]) in float64."""
    q, k, w = (np.asarray(a, np.float64) for a in (q_BTHK, k_BSK, w_BTH))
    return np.stack(
        [
            np.einsum("ths,th->ts", np.maximum(np.einsum("thk,sk->ths", q_, k_), 0), w_)
            for q_, k_, w_ in zip(q, k, w, strict=True)
        ]
    )


def top_positions(score_S, position: int, topk: int) -> np.ndarray:
    """Ascending positions of the best ``topk`` among 0..position; ties to the lower, NaN last."""
    legal = np.asarray(score_S, np.float64)[: position + 1] + 0.0  # -0.0 becomes 0.0
    down = np.where(np.isnan(legal), np.inf, -np.maximum(legal, np.finfo(np.float64).min))
    return np.sort(np.argsort(down, kind="stable")[:topk])


def select(q_BTHK, k_BSK, w_BTH, positions_BT, topk: int) -> np.ndarray:
    """Same contract as ``k3jax.ops.dsa.select``."""
    score, positions = scores(q_BTHK, k_BSK, w_BTH), np.asarray(positions_BT)
    out = np.full((*positions.shape, topk), -1, np.int32)
    for b, t in np.ndindex(*positions.shape):
        chosen = top_positions(score[b, t], int(positions[b, t]), topk)
        out[b, t, : len(chosen)] = chosen
    return out


def attend(q_BTHQ, cache_BSC, w_k_HNC, w_v_HVC, indices_BTk, *, scale: float) -> np.ndarray:
    """Same contract as ``k3jax.ops.dsa.attend``; float64 inside and out."""
    q, cache, w_k, w_v = (np.asarray(a, np.float64) for a in (q_BTHQ, cache_BSC, w_k_HNC, w_v_HVC))
    rows = [[i[i >= 0] for i in per_row] for per_row in np.asarray(indices_BTk)]
    return attend_rows(q, cache, w_k, w_v, rows, scale)
