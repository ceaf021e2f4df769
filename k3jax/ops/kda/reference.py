"""Kimi Delta Attention, one token at a time in NumPy: the yardstick of every implementation.

Sequential on purpose, in whatever precision the inputs have (the tests hand in float64). Batch and
heads are the only vectorised axes.
"""

import numpy as np


def kda(q_BTHK, k_BTHK, v_BTHV, g_BTHK, beta_BTH, state_BHVK=None):
    """Runs the gated delta rule over T tokens.

    For each token, with S the [V, K] state of one head (Kimi Linear paper, the gated delta rule
    with one decay per key channel):

        S <- S diag(exp(g));   u = beta (v - S k);   S <- S + u k^T;   o = S q

    Args:
      q_BTHK: queries, already L2-normalised and scaled by K**-0.5.
      k_BTHK: keys, already L2-normalised.
      v_BTHV: values.
      g_BTHK: log decay per key channel, <= 0.
      beta_BTH: write strength in (0, 1).
      state_BHVK: state before the first token; zeros if absent.

    Returns:
      (o_BTHV, state_BHVK), in the common dtype of the inputs.
    """
    batch, length, heads, k_dim = k_BTHK.shape
    dtype = np.result_type(q_BTHK, k_BTHK, v_BTHV, g_BTHK, beta_BTH)
    if state_BHVK is None:
        state_BHVK = np.zeros((batch, heads, v_BTHV.shape[-1], k_dim), dtype)
    state_BHVK = np.array(state_BHVK, dtype)
    o_BTHV = np.empty(v_BTHV.shape, dtype)
    for t in range(length):
        state_BHVK = np.exp(g_BTHK[:, t])[..., None, :] * state_BHVK
        held_BHV = np.einsum("bhvk,bhk->bhv", state_BHVK, k_BTHK[:, t])
        u_BHV = beta_BTH[:, t, :, None] * (v_BTHV[:, t] - held_BHV)
        state_BHVK = state_BHVK + u_BHV[..., None] * k_BTHK[:, t, :, None, :]
        o_BTHV[:, t] = np.einsum("bhvk,bhk->bhv", state_BHVK, q_BTHK[:, t])
    return o_BTHV, state_BHVK


def decay(z_BTHK, A_log_H, dt_bias_HK, lower_bound=None):
    """Log decay of each key channel; see `k3jax.ops.kda.decay` for the two formulas."""
    rate_H1 = np.exp(A_log_H)[:, None]
    shifted_BTHK = z_BTHK + dt_bias_HK
    if lower_bound is None:
        return -rate_H1 * np.logaddexp(shifted_BTHK, 0)
    # The sigmoid as a tanh: 1 / (1 + exp(-x)) would overflow for very negative x.
    return lower_bound * 0.5 * (1 + np.tanh(0.5 * rate_H1 * shifted_BTHK))


def l2norm(x, eps=1e-6):
    """x / sqrt(sum(x^2) + eps) over the last axis."""
    return x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + eps)
