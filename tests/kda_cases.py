"""Inputs for the tests of Kimi Delta Attention: one batch row is one case."""

import numpy as np

from k3jax.ops.kda import reference

REGIMES = (
    "random",
    "saturated",
    "half_saturated",
    "equal_keys",
    "near_keys",
    "opposite_keys",
    "two_directions",
    "zero_keys",
    "slow_decay",
    "no_decay",
    "bound_-6",
    "bound_-20",
    "softplus",
    "huge_state",
    "zero_state",
)


def _sigmoid(x):
    return 0.5 * (1 + np.tanh(0.5 * x))


def draw(regime, rng, length, heads, k_dim, v_dim):
    """float64 q [T,H,K], k, v [T,H,V], g, beta [T,H], state [H,V,K] of one case."""
    q = reference.l2norm(rng.standard_normal((length, heads, k_dim))) * k_dim**-0.5
    k = reference.l2norm(rng.standard_normal((length, heads, k_dim)))
    v = rng.standard_normal((length, heads, v_dim))
    z = 2 * rng.standard_normal((length, heads, k_dim))
    g = -5 * _sigmoid(z)
    beta = _sigmoid(rng.standard_normal((length, heads)))
    state = rng.standard_normal((heads, v_dim, k_dim))
    if regime == "saturated":  # within 1e-3 of the bound
        g = -5 + 1e-3 * rng.uniform(size=g.shape)
    elif regime == "half_saturated":
        g[..., : k_dim // 2] = -5
        g[..., k_dim // 2 :] = -1e-6
    elif regime == "equal_keys":
        k[:] = k[:1]
        g = np.full_like(g, -1e-5)
        beta[:] = 0.999
    elif regime == "near_keys":  # mean cosine 0.9999
        k = reference.l2norm(k[:1] + 0.01 * k)
        g = np.full_like(g, -1e-5)
        beta[:] = 0.999
    elif regime == "opposite_keys":
        k = k[:1] * np.where(np.arange(length) % 2, 1.0, -1.0)[:, None, None]
        g = np.full_like(g, -1e-5)
    elif regime == "two_directions":
        mix = rng.standard_normal((length, heads, 2))
        k = reference.l2norm(mix[..., :1] * k[:1] + mix[..., 1:] * k[-1:])
        g = np.full_like(g, -1e-5)
        beta[:] = 0.999
    elif regime == "zero_keys":
        k[rng.uniform(size=length) < 0.5] = 0
    elif regime == "slow_decay":
        g *= 1e-3
    elif regime == "no_decay":
        g[:] = 0
    elif regime == "bound_-6":
        g *= 6 / 5
    elif regime == "bound_-20":
        g *= 4
    elif regime == "softplus":  # down to about -500
        g = -16 * np.logaddexp(5 * z, 0)
    elif regime == "huge_state":
        state[0, 0, 0], state[0, -1, -1] = 65536, 1e6
    elif regime == "zero_state":
        state[:] = 0
    return q, k, v, g, beta, state


def batch(seed, rows, length, heads, k_dim, v_dim, regimes=REGIMES):
    """float32 (q, k, v, g, beta, state); row b is of regime b modulo their number."""
    rng = np.random.default_rng([seed, length, k_dim, v_dim])
    cases = [draw(regimes[b % len(regimes)], rng, length, heads, k_dim, v_dim) for b in range(rows)]
    return tuple(np.stack(x).astype(np.float32) for x in zip(*cases, strict=True))


def float64(inputs):
    """The reference loop in float64 on the very same float32 numbers."""
    return reference.kda(*[np.asarray(x, np.float64) for x in inputs])


def errors_by_row(got, expected):
    """max|d| / max|expected| of each batch row. Rows that decayed below 1e-30 count absolutely."""
    axes = tuple(range(1, expected.ndim))
    size = np.maximum(np.abs(expected).max(axes), 1e-30)
    return np.abs(np.asarray(got, np.float64) - expected).max(axes) / size
