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


def sigmoid(x):
    """As a tanh: 1 / (1 + exp(-x)) would overflow for very negative x."""
    return 0.5 * (1 + np.tanh(0.5 * x))


def decay(z_BTHK, A_log_H, dt_bias_HK, lower_bound=None):
    """Log decay of each key channel; see `k3jax.ops.kda.decay` for the two formulas."""
    rate_H1 = np.exp(A_log_H)[:, None]
    shifted_BTHK = z_BTHK + dt_bias_HK
    if lower_bound is None:
        return -rate_H1 * np.logaddexp(shifted_BTHK, 0)
    return lower_bound * sigmoid(rate_H1 * shifted_BTHK)


def l2norm(x, eps=1e-6):
    """x / sqrt(sum(x^2) + eps) over the last axis."""
    return x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + eps)


def gated_kda(
    q_BTHK, k_BTHK, v_BTHV, z_BTHK, b_BTH, A_log_H, dt_bias_HK, state_BHVK, lengths_B=None,
    lower_bound=None,
):  # fmt: skip
    """`kda` with its norms and gates; see `k3jax.ops.kda.gated_kda`.

    Rows behind ``lengths_B`` are taken out before anything is computed, whatever they hold.
    """
    if lengths_B is not None:
        real_BT = np.arange(k_BTHK.shape[1]) < np.asarray(lengths_B)[:, None]
        arrays = (q_BTHK, k_BTHK, v_BTHV, z_BTHK, b_BTH)
        q_BTHK, k_BTHK, v_BTHV, z_BTHK, b_BTH = (
            np.where(real_BT.reshape(*real_BT.shape, *[1] * (x.ndim - 2)), x, 0) for x in arrays
        )
    g_BTHK = decay(z_BTHK, A_log_H, dt_bias_HK, lower_bound)
    beta_BTH = sigmoid(b_BTH)
    if lengths_B is not None:
        g_BTHK = np.where(real_BT[..., None, None], g_BTHK, 0)
        beta_BTH = np.where(real_BT[..., None], beta_BTH, 0)
    q_BTHK = l2norm(q_BTHK) * k_BTHK.shape[-1] ** -0.5
    return kda(q_BTHK, l2norm(k_BTHK), v_BTHV, g_BTHK, beta_BTH, state_BHVK)


def kda_decode(
    qkv_3BP, z_BHK, b_BH, gate_BHV, conv_3PW, A_log_H, dt_bias_HK, norm_V, state_BHVK, tails_3BWP,
    *, lower_bound, eps, rounded=lambda x: x,
):  # fmt: skip
    """One token of the mixer, all rows real; see `k3jax.ops.kda.kda_decode`.

    ``rounded`` is applied where the op rounds to the dtype of the projections.
    """
    batch, heads, _ = z_BHK.shape
    mixed, new_tails = [], []
    for x_BP, w_PW, tail_BWP in zip(qkv_3BP, conv_3PW, tails_3BWP, strict=True):
        window_BWP = np.concatenate([tail_BWP, x_BP[:, None]], axis=1)
        y_BP = np.einsum("bwp,pw->bp", window_BWP, w_PW)
        mixed.append(rounded(y_BP * sigmoid(y_BP)).reshape(batch, 1, heads, -1))
        new_tails.append(window_BWP[:, 1:])
    q_B1HK, k_B1HK, v_B1HV = mixed
    o_B1HV, state_BHVK = gated_kda(
        q_B1HK, k_B1HK, v_B1HV, z_BHK[:, None], b_BH[:, None], A_log_H, dt_bias_HK, state_BHVK,
        lower_bound=lower_bound,
    )  # fmt: skip
    o_BHV = rounded(o_B1HV[:, 0])
    o_BHV = o_BHV / np.sqrt(np.mean(o_BHV**2, axis=-1, keepdims=True) + eps)
    return rounded(o_BHV * norm_V * sigmoid(gate_BHV)), state_BHVK, np.stack(new_tails)
