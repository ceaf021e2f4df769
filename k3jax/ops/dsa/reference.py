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


def missing_mass(
    q_BTHQ, cache_BSC, w_k_HNC, w_v_HVC, positions_BT, indices_BTk, *, scale: float
) -> tuple[np.ndarray, np.ndarray]:
    """(mass, bound) of ``k3jax.ops.dsa.missing_mass`` in float64."""
    q, cache, w_k, w_v = (np.asarray(a, np.float64) for a in (q_BTHQ, cache_BSC, w_k_HNC, w_v_HVC))
    positions, indices = np.asarray(positions_BT), np.asarray(indices_BTk)
    nope, latent = w_k.shape[1:]
    mass, longest = np.zeros(q.shape[:3]), np.zeros(q.shape[:3])
    for b, t in np.ndindex(*positions.shape):
        if positions[b, t] < 0:
            continue
        rows = cache[b, : positions[b, t] + 1]
        key = np.einsum("sc,hnc->shn", rows[:, :latent], w_k)
        score = np.einsum("hn,shn->hs", q[b, t, :, :nope], key)
        score = (score + q[b, t, :, nope:] @ rows[:, latent:].T) * scale
        weight = np.exp(score - score.max(-1, keepdims=True))
        outside = ~np.isin(np.arange(len(rows)), indices[b, t])
        mass[b, t] = weight[:, outside].sum(-1) / weight.sum(-1)
        value = np.einsum("sc,hvc->hsv", rows[:, :latent], w_v)
        longest[b, t] = np.linalg.norm(value, axis=-1).max(-1)
    return mass, 2 * mass * longest
