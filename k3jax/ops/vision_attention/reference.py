"""Full attention written out in NumPy float64: the oracle of the fast forms."""

from __future__ import annotations

import numpy as np


def attend(q_NHD, k_NHD, v_NHD, length: int, *, scale: float) -> np.ndarray:
    """Same contract as ``k3jax.ops.vision_attention.attend``; float64 inside and out."""
    q, k, v = (np.asarray(a[:length], np.float64) for a in (q_NHD, k_NHD, v_NHD))
    out = np.zeros(np.shape(v_NHD))
    for head in range(q.shape[1] if length else 0):
        score_TS = q[:, head] @ k[:, head].T * scale
        weight_TS = np.exp(score_TS - score_TS.max(-1, keepdims=True))
        weight_TS /= weight_TS.sum(-1, keepdims=True)
        out[:length, head] = weight_TS @ v[:, head]
    return out
