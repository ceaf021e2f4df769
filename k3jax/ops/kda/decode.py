"""One token of a whole KDA mixer, from the projections to the normed output of each head."""

import logging
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax

from k3jax.errors import InputError
from k3jax.ops import target
from k3jax.ops.choice import Kernel, select
from k3jax.ops.kda import mosaic_gpu_decode, mosaic_tpu_decode
from k3jax.ops.kda.core import describe, expect, expect_bound, kda, zero_unless
from k3jax.ops.kda.gated import normalised
from k3jax.ops.short_conv import short_conv
from k3jax.ops.stacks import put, take

_log = logging.getLogger(__name__)


def gated_norm(o: Array, gate: Array, norm_V: Array, eps: float) -> Array:
    """RMSNorm over the last axis, times ``norm_V`` and sigmoid(gate); float32, one cast."""
    wide = o.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + jnp.float32(eps))
    return (wide * scale * norm_V * jax.nn.sigmoid(gate.astype(jnp.float32))).astype(o.dtype)


def _xla(inputs, weights, state, tails, valid_B, slot, bound, eps):
    """The layer is taken out of its stack and put back.

    The barriers keep XLA from fusing a stage with what surrounds it, and so from summing in
    another order: a step gives the same bits in every program (`k3jax.ops.kda.speculative`). They
    stand at small arrays only; a barrier at the state would copy it.
    """
    qkv_3BP, z_BHK, b_BH, gate_BHV = inputs
    qkv_3BP, z_BHK, b_BH, valid_B = _apart((qkv_3BP, z_BHK, b_BH, valid_B))
    conv_3PW, A_log_H, dt_bias_HK, norm_V = weights
    lengths_B = None if valid_B is None else valid_B.astype(jnp.int32)
    valid_B1 = None if valid_B is None else valid_B[:, None]
    mixed, new_tails = [], []
    for x_BP, w_PW, tail_BWP in zip(qkv_3BP, conv_3PW, take(tails, slot), strict=True):
        y_B1P, tail_BWP = short_conv(x_BP[:, None], w_PW, tail_BWP, lengths_B)
        mixed.append(y_B1P.reshape(*y_B1P.shape[:2], b_BH.shape[1], -1))
        new_tails.append(tail_BWP)
    mixed = _apart((*mixed, z_BHK[:, None], b_BH[:, None]))
    q, k, v, g, beta = _apart(normalised(mixed, A_log_H, dt_bias_HK, bound))
    o_B1HV, new_state_BHVK = kda(q, k, v, g, beta, take(state, slot), valid_BT=valid_B1)
    o_BHV, gate_BHV = _apart((o_B1HV[:, 0], gate_BHV))
    o_BHV = _apart(gated_norm(o_BHV, gate_BHV, norm_V, eps))
    o_BHV = o_BHV if valid_B is None else zero_unless(valid_B1, o_BHV)
    return o_BHV, put(state, new_state_BHVK, slot), put(tails, jnp.stack(new_tails), slot)


_apart = lax.optimization_barrier


# name -> f((qkv, z, b, gate), (conv, A_log, dt_bias, norm), state, tails, valid or None,
#           slot or None, lower_bound, eps) -> (o, state, tails)
IMPLEMENTATIONS: dict[str, Callable[..., tuple[Array, Array, Array]]] = {
    "xla": _xla,
    "mosaic_gpu": mosaic_gpu_decode.kda_decode,
    "mosaic_tpu": mosaic_tpu_decode.kda_decode,
}
# What "auto" tries, in this order; refusals take (q, z, b, gate, lower_bound).
KERNELS = {
    "mosaic_gpu": Kernel(target.is_hopper, mosaic_gpu_decode.refusal),
    "mosaic_tpu": Kernel(target.is_tpu, mosaic_tpu_decode.refusal),
}


def kda_decode(
    qkv_3BP: tuple[Array, Array, Array],
    z_BHK: Array,
    b_BH: Array,
    gate_BHV: Array,
    conv_3PW: tuple[Array, Array, Array],
    A_log_H: Array,
    dt_bias_HK: Array,
    norm_V: Array,
    state_BHVK: Array,
    tails_3BWP: Array,
    *,
    lower_bound: float | None,
    eps: float,
    valid_B: Array | None = None,
    slot: Array | None = None,
    implementation: str = "auto",
) -> tuple[Array, Array, Array]:
    """Short convolution, SiLU, L2 norms, decay, the delta rule and the gated head norm of a token.

    The same numbers as `short_conv`, `gated_kda` and `gated_norm` in a row.

    Args:
      qkv_3BP: projections of q, k and v before the convolution, one dtype; P = H K = H V.
      z_BHK, b_BH: decay projection and write logit; see `gated_kda`.
      gate_BHV: logit of the output gate.
      conv_3PW: float32 filters of q, k and v; see `short_conv`.
      A_log_H, dt_bias_HK: float32; see `decay`.
      norm_V: float32 weight of the head norm.
      state_BHVK: float32; tails_3BWP: the last W - 1 inputs of the convolutions, oldest first, in
        the dtype of qkv. With ``slot`` both lead with an axis of layers.
      lower_bound: of the log decay; eps: of the head norm.
      valid_B: bool; a row that is False keeps state and tails bit for bit, its output is zero, and
        its other inputs may hold anything.
      slot: int32, which layer of the stacks; the others come back as they were.
      implementation: "auto" or a name in `IMPLEMENTATIONS`; see `gated_kda`. Kernels have no
        gradient.

    Returns:
      (o_BHV in the dtype of qkv, state, tails), the last two in place if they are donated.

    Raises:
      InputError: a shape or dtype that does not fit, or an implementation that is unknown, is
        for other devices, or refuses these inputs.
    """
    q_BP = qkv_3BP[0]
    if q_BP.ndim != 2 or not jnp.issubdtype(q_BP.dtype, jnp.floating):
        raise InputError(f"kda_decode: q is {describe(q_BP)}, expected floating [B, P]")
    if z_BHK.ndim != 3 or not jnp.issubdtype(z_BHK.dtype, jnp.floating):
        raise InputError(f"kda_decode: z is {describe(z_BHK)}, expected floating [B, H, K]")
    batch, heads, k_dim = z_BHK.shape
    v_dim, width = gate_BHV.shape[-1], conv_3PW[0].shape[-1]
    channels = {"q": heads * k_dim, "k": heads * k_dim, "v": heads * v_dim}
    for (name, P), x_BP, w_PW in zip(channels.items(), qkv_3BP, conv_3PW, strict=True):
        expect(f"kda_decode: {name}", x_BP, (batch, P), q_BP.dtype)
        expect(f"kda_decode: conv of {name}", w_PW, (P, width), jnp.float32)
    expect("kda_decode: b", b_BH, (batch, heads), b_BH.dtype)
    expect("kda_decode: gate", gate_BHV, (batch, heads, v_dim), gate_BHV.dtype)
    expect_bound("kda_decode", lower_bound)
    expect("kda_decode: A_log", A_log_H, (heads,), jnp.float32)
    expect("kda_decode: dt_bias", dt_bias_HK, (heads, k_dim), jnp.float32)
    expect("kda_decode: norm", norm_V, (v_dim,), jnp.float32)
    layers = () if slot is None else state_BHVK.shape[:1]
    expect("kda_decode: state", state_BHVK, (*layers, batch, heads, v_dim, k_dim), jnp.float32)
    tails_shape = (*layers, 3, batch, width - 1, heads * k_dim)
    expect("kda_decode: tails", tails_3BWP, tails_shape, q_BP.dtype)
    if valid_B is not None:
        expect("kda_decode: valid", valid_B, (batch,), jnp.bool_)
    arrays = (q_BP, z_BHK, b_BH, gate_BHV, lower_bound)
    implementation, reason = select(
        "kda_decode", implementation, IMPLEMENTATIONS, KERNELS, target.device_kind(), arrays
    )
    _log.debug("kda_decode: %s (%s), batch %s", implementation, reason, batch)
    return IMPLEMENTATIONS[implementation](
        (qkv_3BP, z_BHK, b_BH, gate_BHV),
        (conv_3PW, A_log_H, dt_bias_HK, norm_V),
        state_BHVK,
        tails_3BWP,
        valid_B,
        slot,
        lower_bound,
        eps,
    )
