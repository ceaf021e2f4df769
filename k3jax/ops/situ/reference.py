"""SiTU in float64 NumPy."""

from __future__ import annotations

import numpy as np


def situ(gate: np.ndarray, up: np.ndarray, beta: float, linear_beta: float | None) -> np.ndarray:
    """See :func:`k3jax.ops.situ.situ`; float64 out."""
    g, u = np.asarray(gate, np.float64), np.asarray(up, np.float64)
    if linear_beta is not None:
        u = linear_beta * np.tanh(u / linear_beta)
    sigmoid = np.exp(-np.logaddexp(0.0, -g))  # neither overflows nor cancels
    return beta * np.tanh(g / beta) * sigmoid * u
