"""The router in float64 NumPy, one token at a time."""

from __future__ import annotations

import numpy as np


def route(x_ND, w_ED, bias_E, k, scaling=1.0, renormalize=True):
    """See :func:`k3jax.ops.routing.route`; ids int32 and weights float64, both [N, k]."""
    w_ED, bias_E = np.asarray(w_ED, np.float64), np.asarray(bias_E, np.float64)
    ids, weights = [], []
    for x in np.asarray(x_ND, np.float64):
        score = 1.0 / (1.0 + np.exp(-(w_ED @ x)))
        chosen = np.argsort(-(score + bias_E), kind="stable")[:k]
        weight = score[chosen]
        if renormalize:
            weight = weight / (weight.sum() + 1e-20)
        ids.append(chosen)
        weights.append(weight * scaling)
    shape = (-1, k)
    return np.array(ids, np.int32).reshape(shape), np.array(weights, np.float64).reshape(shape)
