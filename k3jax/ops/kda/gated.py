"""KDA over many tokens from what the projections give: norms and gates are part of the op."""

import logging
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from k3jax.errors import InputError
from k3jax.ops import target
from k3jax.ops.kda import mosaic_tpu_chunked
from k3jax.ops.kda.choice import Kernel, select
from k3jax.ops.kda.core import decay, describe, expect, kda, l2norm, zero_unless

_log = logging.getLogger(__name__)


def _xla(q_BTHK, k_BTHK, v_BTHV, z_BTHK, b_BTH, A_log_H, dt_bias_HK, state_BHVK, lengths_B, bound):
    valid_BT = None
    if lengths_B is not None:
        valid_BT = jnp.arange(k_BTHK.shape[1], dtype=jnp.int32) < lengths_B[:, None]
        # Before the norms and gates: `kda` masks their results, but their derivatives would turn
        # what padding holds into NaN times zero.
        inputs = (q_BTHK, k_BTHK, v_BTHV, z_BTHK, b_BTH)
        q_BTHK, k_BTHK, v_BTHV, z_BTHK, b_BTH = (zero_unless(valid_BT, x) for x in inputs)
    return kda(
        l2norm(q_BTHK) * k_BTHK.shape[-1] ** -0.5,
        l2norm(k_BTHK),
        v_BTHV,
        decay(z_BTHK, A_log_H, dt_bias_HK, bound),
        jax.nn.sigmoid(b_BTH.astype(jnp.float32)),
        state_BHVK,
        valid_BT=valid_BT,
    )


def with_xla_gradient(kernel):
    """A kernel of the table whose backward pass is that of the portable form.

    It keeps the inputs and runs the portable form again, forwards and backwards.
    """

    @partial(jax.custom_vjp, nondiff_argnums=(9,))
    def run(q, k, v, z, b, A_log, dt_bias, state, lengths_B, lower_bound):
        return kernel(q, k, v, z, b, A_log, dt_bias, state, lengths_B, lower_bound)

    def forward(*arguments):
        return run(*arguments), arguments[:-1]

    def backward(lower_bound, saved, cotangents):
        *inputs, lengths_B = saved
        portable = partial(_xla, lengths_B=lengths_B, bound=lower_bound)
        _, pull = jax.vjp(portable, *inputs)
        return (*pull(cotangents), None)

    run.defvjp(forward, backward)
    return run


# name -> f(q, k, v, z, b, A_log, dt_bias, state, lengths or None, lower_bound) -> (o, state)
IMPLEMENTATIONS: dict[str, Callable[..., tuple[Array, Array]]] = {
    "xla": _xla,
    "mosaic_tpu": with_xla_gradient(mosaic_tpu_chunked.gated_kda),
}
# What "auto" tries, in this order; refusals take (q, v, z, b).
KERNELS = {"mosaic_tpu": Kernel(target.is_tpu, mosaic_tpu_chunked.refusal)}


def gated_kda(
    q_BTHK: Array,
    k_BTHK: Array,
    v_BTHV: Array,
    z_BTHK: Array,
    b_BTH: Array,
    A_log_H: Array,
    dt_bias_HK: Array,
    state_BHVK: Array | None = None,
    *,
    lower_bound: float | None,
    lengths_B: Array | None = None,
    implementation: str = "auto",
) -> tuple[Array, Array]:
    """`kda` on raw inputs:

        kda(l2norm(q) K**-0.5, l2norm(k), v, decay(z, A_log, dt_bias, lower_bound), sigmoid(b))

    Args:
      q_BTHK, k_BTHK, v_BTHV: after the short convolution, floating.
      z_BTHK: output of the low-rank decay projection; see `decay`.
      b_BTH: logit of the write strength.
      A_log_H, dt_bias_HK: float32; see `decay`.
      state_BHVK: float32 state before the first token; zeros if absent.
      lower_bound: of the log decay; see `decay`.
      lengths_B: int32 number of real rows of each batch row, 0..T; the rows behind may hold
        anything, NaN included: outputs there are zero and the state does not see them. All rows
        are real if absent.
      implementation: "auto" or a name in `IMPLEMENTATIONS`. "auto" takes the kernel of the device
        that the program is for, or "xla" where there is none or it refuses these inputs.

    Returns:
      (o_BTHV in the dtype of v, state_BHVK float32 after the last real token).

    Raises:
      InputError: a shape or dtype that does not fit, T == 0, or an implementation that is unknown,
        is for other devices, or refuses these inputs.
    """
    for name, x in (("q", q_BTHK), ("k", k_BTHK), ("v", v_BTHV), ("z", z_BTHK)):
        if x.ndim != 4 or not jnp.issubdtype(x.dtype, jnp.floating):
            raise InputError(
                f"gated_kda: {name} is {describe(x)}, expected floating [B, T, H, channels]"
            )
    batch, length, heads, k_dim = k_BTHK.shape
    if length == 0:
        raise InputError(f"gated_kda: k is {describe(k_BTHK)}: no tokens (T = 0)")
    expect("gated_kda: q", q_BTHK, k_BTHK.shape, q_BTHK.dtype)
    expect("gated_kda: z", z_BTHK, k_BTHK.shape, z_BTHK.dtype)
    expect("gated_kda: v", v_BTHV, (batch, length, heads, v_BTHV.shape[-1]), v_BTHV.dtype)
    expect("gated_kda: b", b_BTH, (batch, length, heads), b_BTH.dtype)
    expect("gated_kda: A_log", A_log_H, (heads,), jnp.float32)
    expect("gated_kda: dt_bias", dt_bias_HK, (heads, k_dim), jnp.float32)
    state_shape = (batch, heads, v_BTHV.shape[-1], k_dim)
    if state_BHVK is None:
        state_BHVK = jnp.zeros(state_shape, jnp.float32)
    expect("gated_kda: state", state_BHVK, state_shape, jnp.float32)
    if lengths_B is not None:
        expect("gated_kda: lengths", lengths_B, (batch,), jnp.int32)
    arrays = (q_BTHK, v_BTHV, z_BTHK, b_BTH)
    implementation, reason = select(
        "gated_kda", implementation, IMPLEMENTATIONS, KERNELS, target.device_kind(), arrays
    )
    _log.debug("gated_kda: %s (%s), T = %s", implementation, reason, length)
    inputs = (q_BTHK, k_BTHK, v_BTHV, z_BTHK, b_BTH, A_log_H, dt_bias_HK, state_BHVK, lengths_B)
    return IMPLEMENTATIONS[implementation](*inputs, lower_bound)
