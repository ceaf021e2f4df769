"""KDA over many tokens from what the projections give: norms and gates are part of the op."""

import logging
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from k3jax.errors import InputError
from k3jax.ops import target
from k3jax.ops.choice import Kernel, select
from k3jax.ops.kda import mosaic_gpu_chunked, mosaic_tpu_chunked, xla
from k3jax.ops.kda.core import (
    decay,
    describe,
    expect,
    expect_bound,
    kda,
    l2norm,
    zero_unless,
)
from k3jax.ops.kda.packing import pack
from k3jax.ops.packed import Lengths, bounds, expect_alone

_log = logging.getLogger(__name__)


def normalised(inputs, A_log_H, dt_bias_HK, bound):
    """(q, k, v, g, beta) of `kda` from (q, k, v, z, b) of `gated_kda`."""
    q_BTHK, k_BTHK, v_BTHV, z_BTHK, b_BTH = inputs
    return (
        l2norm(q_BTHK) * k_BTHK.shape[-1] ** -0.5,
        l2norm(k_BTHK),
        v_BTHV,
        decay(z_BTHK, A_log_H, dt_bias_HK, bound),
        jax.nn.sigmoid(b_BTH.astype(jnp.float32)),
    )


def _xla(
    q_BTHK, k_BTHK, v_BTHV, z_BTHK, b_BTH, A_log_H, dt_bias_HK, state, lengths_B, bound, packing
):
    inputs = (q_BTHK, k_BTHK, v_BTHV, z_BTHK, b_BTH)
    if packing is None:
        valid_BT = None
        if lengths_B is not None:
            valid_BT = jnp.arange(k_BTHK.shape[1], dtype=jnp.int32) < lengths_B[:, None]
            # Before the norms and gates: `kda` masks their results, but their derivatives would
            # turn what padding holds into NaN times zero.
            inputs = [zero_unless(valid_BT, x) for x in inputs]
        q, k, v, g, beta = normalised(inputs, A_log_H, dt_bias_HK, bound)
        return kda(q, k, v, g, beta, state, valid_BT=valid_BT)
    # Rows move first: every sequence begins at a whole chunk then, and XLA:CPU, which sums the last
    # rows of an array in another order than the others, sums them alike wherever it stands. Only
    # rows of a sequence are read, so what stands behind the last one may be anything.
    padded = normalised(map(packing.pad, inputs), A_log_H, dt_bias_HK, bound)
    q, k, v, g, beta = (zero_unless(packing.row_R[None] >= 0, x) for x in padded)
    o_1RHV, state = xla.packed(q, k, v, g, beta, state, packing)
    return packing.unpad(o_1RHV).astype(v_BTHV.dtype), state


def with_xla_gradient(kernel):
    """A kernel of the table whose backward pass is that of the portable form.

    It keeps the inputs and runs the portable form again, forwards and backwards.
    """

    @partial(jax.custom_vjp, nondiff_argnums=(9,))
    def run(q, k, v, z, b, A_log, dt_bias, state, lengths_B, lower_bound, packing):
        inputs = (q, k, v, z, b, A_log, dt_bias, state)
        return kernel(*inputs, lengths_B, lower_bound, packing)

    def forward(*arguments):
        *inputs, lengths_B, _, packing = arguments
        return run(*arguments), (inputs, lengths_B, packing)

    def backward(lower_bound, saved, cotangents):
        inputs, lengths_B, packing = saved
        portable = partial(_xla, lengths_B=lengths_B, bound=lower_bound, packing=packing)
        _, pull = jax.vjp(portable, *inputs)
        return (*pull(cotangents), None, None)

    run.defvjp(forward, backward)
    return run


# name -> f(q, k, v, z, b, A_log, dt_bias, state, lengths or None, lower_bound, packing or None)
#           -> (o, state); with a `Packing` B is 1 and the state [N, H, V, K].
IMPLEMENTATIONS: dict[str, Callable[..., tuple[Array, Array]]] = {
    "xla": _xla,
    "mosaic_gpu": with_xla_gradient(mosaic_gpu_chunked.gated_kda),
    "mosaic_tpu": with_xla_gradient(mosaic_tpu_chunked.gated_kda),
}
# What "auto" tries, in this order; refusals take (q, v, z, b, lower_bound, packing or None).
KERNELS = {
    "mosaic_gpu": Kernel(target.is_hopper, mosaic_gpu_chunked.refusal),
    "mosaic_tpu": Kernel(target.is_tpu, mosaic_tpu_chunked.refusal),
}


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
    packed_lengths_N: Lengths | None = None,
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
      packed_lengths_N: the one batch row holds N sequences of these lengths, one after another;
        their sum is T. The state is [N, H, V, K] then, one a sequence, and a sequence of length 0
        keeps its own bit for bit. A sequence gives the same bits whatever the others hold and
        wherever it stands: what the same program gives where the others have length 0. Under a
        trace lengths cannot be checked: they are clipped to T, and rows behind their sum are
        padding.
      implementation: "auto" or a name in `IMPLEMENTATIONS`. "auto" takes the kernel of the device
        that the program is for, or "xla" where there is none or it refuses these inputs.

    Returns:
      (o_BTHV in the dtype of v, state_BHVK float32 after the last real token).

    Raises:
      InputError: a shape or dtype that does not fit, T == 0, both kinds of lengths, packed lengths
        that are negative or do not sum to T, or an implementation that is unknown, is for other
        devices, or refuses these inputs.
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
    expect_bound("gated_kda", lower_bound)
    expect("gated_kda: A_log", A_log_H, (heads,), jnp.float32)
    expect("gated_kda: dt_bias", dt_bias_HK, (heads, k_dim), jnp.float32)
    states, packing = batch, None
    if packed_lengths_N is not None:
        expect_alone("gated_kda", batch, lengths_B)
        start_N, length_N = bounds("gated_kda", packed_lengths_N, length)
        states, packing = len(start_N), pack(start_N, length_N, length, xla.chunk_size(length))
    state_shape = (states, heads, v_BTHV.shape[-1], k_dim)
    if state_BHVK is None:
        state_BHVK = jnp.zeros(state_shape, jnp.float32)
    expect("gated_kda: state", state_BHVK, state_shape, jnp.float32)
    if lengths_B is not None:
        expect("gated_kda: lengths", lengths_B, (batch,), jnp.int32)
    arrays = (q_BTHK, v_BTHV, z_BTHK, b_BTH, lower_bound, packing)
    implementation, reason = select(
        "gated_kda", implementation, IMPLEMENTATIONS, KERNELS, target.device_kind(), arrays
    )
    _log.debug("gated_kda: %s (%s), T = %s", implementation, reason, length)
    inputs = (q_BTHK, k_BTHK, v_BTHV, z_BTHK, b_BTH, A_log_H, dt_bias_HK, state_BHVK, lengths_B)
    return IMPLEMENTATIONS[implementation](*inputs, lower_bound, packing)
