"""The delta rule itself, its gate and its norm: public functions with their checks."""

import logging
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from k3jax.errors import InputError
from k3jax.ops.kda import xla

# name -> f(q_BTHK, k_BTHK, v_BTHV, g_BTHK, beta_BTH, state_BHVK) -> (o_BTHV f32, state_BHVK f32),
# with inputs already checked and masked.
IMPLEMENTATIONS: dict[str, Callable[..., tuple[Array, Array]]] = {
    "recurrent": xla.recurrent,
    "chunked": xla.chunked,
    "associative": xla.associative,
}
_log = logging.getLogger(__name__)


def kda(
    q_BTHK: Array,
    k_BTHK: Array,
    v_BTHV: Array,
    g_BTHK: Array,
    beta_BTH: Array,
    state_BHVK: Array | None = None,
    *,
    valid_BT: Array | None = None,
    implementation: str = "auto",
) -> tuple[Array, Array]:
    """Runs the gated delta rule over T tokens, in float32 whatever the input dtypes.

    For each token, with S the [V, K] state of one head:

        S <- S diag(exp(g));   u = beta (v - S k);   S <- S + u k^T;   o = S q

    Source: Kimi Linear paper and Moonshot's published modelling code.

    Args:
      q_BTHK: queries, L2-normalised and scaled by K**-0.5; floating.
      k_BTHK: keys, L2-normalised; floating.
      v_BTHV: values; floating. V may differ from K.
      g_BTHK: log decay of each key channel in nats, <= 0, float32 (see `decay`). No lower bound
        is assumed.
      beta_BTH: write strength in (0, 1), float32.
      state_BHVK: float32 state before the first token; zeros if absent.
      valid_BT: bool; rows that are False may hold anything, NaN included, in every other input.
        They leave the state as it is and their outputs are zero. A batch row without any valid
        row returns its state bit for bit.
      implementation: "recurrent" (scan over tokens), "chunked" (chunks of 64), "associative"
        (parallel prefix over chunk maps), or "auto": recurrent if T == 1, else chunked.

    Returns:
      (o_BTHV in the dtype of v, state_BHVK float32 after the last token).

    Raises:
      InputError: a shape or dtype that does not fit, T == 0, or an unknown implementation.
    """
    _check(q_BTHK, k_BTHK, v_BTHV, g_BTHK, beta_BTH, state_BHVK, valid_BT)
    batch, length, heads, k_dim = k_BTHK.shape
    if implementation == "auto":
        implementation = "recurrent" if length == 1 else "chunked"
        _log.debug("kda: %s for %s tokens", implementation, length)
    if implementation not in IMPLEMENTATIONS:
        names = ", ".join(["auto", *IMPLEMENTATIONS])
        raise InputError(f"kda: implementation {implementation!r} is not one of {names}")
    if state_BHVK is None:
        state_BHVK = jnp.zeros((batch, heads, v_BTHV.shape[-1], k_dim), jnp.float32)

    inputs = (q_BTHK, k_BTHK, v_BTHV, g_BTHK, beta_BTH)
    if valid_BT is not None:
        inputs = tuple(zero_unless(valid_BT, x) for x in inputs)
    o_BTHV, new_state_BHVK = IMPLEMENTATIONS[implementation](*inputs, state_BHVK)
    if valid_BT is not None:
        # Zeroed rows change nothing but the sign of a zero and the payload of a NaN; a row of
        # padding alone keeps those too.
        o_BTHV = zero_unless(valid_BT, o_BTHV)
        any_B111 = jnp.any(valid_BT, axis=1)[:, None, None, None]
        new_state_BHVK = jnp.where(any_B111, new_state_BHVK, state_BHVK)
    return o_BTHV.astype(v_BTHV.dtype), new_state_BHVK


def decay(z_BTHK: Array, A_log_H: Array, dt_bias_HK: Array, lower_bound: float | None) -> Array:
    """Log decay g <= 0 of each key channel, float32 [B, T, H, K].

        g = lower_bound * sigmoid(exp(A_log) * (z + dt_bias))        (Kimi K3: lower_bound = -5)
        g = -exp(A_log) * softplus(z + dt_bias)                      (lower_bound None: Kimi Linear)

    Source: Moonshot's published modelling code.

    Args:
      z_BTHK: output of the low-rank decay projection, floating.
      A_log_H: log rate of each head, float32.
      dt_bias_HK: bias of each channel, float32.
      lower_bound: negative, or None.

    Raises:
      InputError: a shape that does not fit, or lower_bound >= 0.
    """
    if z_BTHK.ndim != 4 or not jnp.issubdtype(z_BTHK.dtype, jnp.floating):
        raise InputError(f"decay: z is {describe(z_BTHK)}, expected floating [B, T, H, K]")
    heads, k_dim = z_BTHK.shape[2:]
    expect("decay: A_log", A_log_H, (heads,), jnp.float32)
    expect("decay: dt_bias", dt_bias_HK, (heads, k_dim), jnp.float32)
    expect_bound("decay", lower_bound)
    rate_H1 = jnp.exp(A_log_H)[:, None]
    shifted_BTHK = z_BTHK.astype(jnp.float32) + dt_bias_HK
    if lower_bound is None:
        return -rate_H1 * jax.nn.softplus(shifted_BTHK)
    return lower_bound * jax.nn.sigmoid(rate_H1 * shifted_BTHK)


def l2norm(x: Array, eps: float = 1e-6) -> Array:
    """x * rsqrt(sum(x^2) + eps) over the last axis, float32. Zeros stay zeros."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + eps)


def zero_unless(valid_BT, x):
    """x in the rows that are True, zeros in the others."""
    return jnp.where(valid_BT.reshape(*valid_BT.shape, *[1] * (x.ndim - 2)), x, jnp.zeros_like(x))


def describe(x):
    return f"{x.dtype}{list(x.shape)}"


def expect_bound(op, lower_bound):
    if lower_bound is not None and not lower_bound < 0:
        raise InputError(f"{op}: lower_bound is {lower_bound}, expected a negative number or None")


def expect(name, x, shape, dtype):
    if tuple(x.shape) != shape or x.dtype != dtype:
        raise InputError(f"{name} is {describe(x)}, expected {jnp.dtype(dtype)}{list(shape)}")


def _check(q_BTHK, k_BTHK, v_BTHV, g_BTHK, beta_BTH, state_BHVK, valid_BT):
    for name, x in (("q", q_BTHK), ("k", k_BTHK), ("v", v_BTHV)):
        if x.ndim != 4 or not jnp.issubdtype(x.dtype, jnp.floating):
            raise InputError(f"kda: {name} is {describe(x)}, expected floating [B, T, H, channels]")
    batch, length, heads, k_dim = k_BTHK.shape
    if length == 0:
        raise InputError(f"kda: k is {describe(k_BTHK)}: no tokens (T = 0)")
    expect("kda: q", q_BTHK, k_BTHK.shape, q_BTHK.dtype)
    expect("kda: v", v_BTHV, (batch, length, heads, v_BTHV.shape[-1]), v_BTHV.dtype)
    expect("kda: g", g_BTHK, k_BTHK.shape, jnp.float32)
    expect("kda: beta", beta_BTH, (batch, length, heads), jnp.float32)
    if state_BHVK is not None:
        expected = (batch, heads, v_BTHV.shape[-1], k_dim)
        expect("kda: state", state_BHVK, expected, jnp.float32)
    if valid_BT is not None:
        expect("kda: valid", valid_BT, (batch, length), jnp.bool_)
