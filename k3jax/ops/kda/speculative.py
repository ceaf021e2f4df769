"""Speculative decoding through a KDA mixer: verify a window of drafts, then replay what was kept.

A state of [V, K] floats a head cannot be rolled back, and one copy a draft would be 6 MB a layer
and sequence at K3's size. So a window is run without storing any state; what is kept are its
projected inputs (`Window`, 98 kB a token there), and the accepted rows are replayed from them onto
the state of before. Both are `kda_decode` row by row, so a replay leaves the bits of plain decode
with any implementation whose steps round alike in every program: the portable form sees to that
with barriers, a kernel is opaque to the compiler.

    o, window = verify_window(...)                    # T rows: the last token and T - 1 drafts
    o, state, tails, window = replay_and_verify(window, accepted_B, ...)      # and so on, or
    state, tails = commit(window, accepted_B, ...)

The convolution tails are committed with the state. With ``slot``, state and tails are stacks of
layers and change in place if they are donated; a window is always of one layer.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array, lax

from k3jax.ops.kda.core import expect
from k3jax.ops.kda.decode import kda_decode
from k3jax.ops.stacks import take


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Window:
    """What a replay needs of T rows.

    Attributes:
      qkv_3BTP: projections of q, k and v before the convolution.
      z_BTHK, b_BTH: decay projection and write logit.
    """

    qkv_3BTP: Array
    z_BTHK: Array
    b_BTH: Array


def _rows(inputs, count_B):
    """Inputs with the rows leading, and which rows count."""
    inputs = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), inputs)
    length = inputs[1].shape[0]
    return inputs, jnp.arange(length, dtype=jnp.int32)[:, None] < count_B


def verify_window(
    qkv_3BTP: tuple[Array, Array, Array],
    z_BTHK: Array,
    b_BTH: Array,
    gate_BTHV: Array,
    conv_3PW: tuple[Array, Array, Array],
    A_log_H: Array,
    dt_bias_HK: Array,
    norm_V: Array,
    state_BHVK: Array,
    tails_3BWP: Array,
    *,
    lower_bound: float | None,
    eps: float,
    lengths_B: Array | None = None,
    slot: Array | None = None,
    implementation: str = "auto",
) -> tuple[Array, Window]:
    """The outputs of T rows as `kda_decode` would give them one by one; state and tails stay.

    Args:
      qkv_3BTP, z_BTHK, b_BTH, gate_BTHV: see `kda_decode`, with T rows.
      lengths_B: int32 number of real rows, 0..T; outputs behind are zero. All are real if absent.
      others: see `kda_decode`.

    Returns:
      (o_BTHV in the dtype of qkv, the window to `commit`).

    Raises:
      InputError: as `kda_decode`.
    """
    batch, length = z_BTHK.shape[:2]
    if lengths_B is None:
        lengths_B = jnp.full((batch,), length, jnp.int32)
    expect("verify_window: lengths", lengths_B, (batch,), jnp.int32)
    # A loop over the stack would copy all layers.
    state_BHVK, tails_3BWP = take(state_BHVK, slot), take(tails_3BWP, slot)

    def step(carry, row):
        (qkv_3BP, z_BHK, b_BH, gate_BHV), valid_B = row
        o_BHV, *carry = kda_decode(
            *(qkv_3BP, z_BHK, b_BH, gate_BHV, conv_3PW, A_log_H, dt_bias_HK, norm_V, *carry),
            lower_bound=lower_bound,
            eps=eps,
            valid_B=valid_B,
            implementation=implementation,
        )
        return tuple(carry), o_BHV

    rows = _rows((tuple(qkv_3BTP), z_BTHK, b_BTH, gate_BTHV), lengths_B)
    o_TBHV = lax.scan(step, (state_BHVK, tails_3BWP), rows)[1]
    return jnp.moveaxis(o_TBHV, 0, 1), Window(jnp.stack(qkv_3BTP), z_BTHK, b_BTH)


def commit(
    window: Window,
    accepted_B: Array,
    conv_3PW: tuple[Array, Array, Array],
    A_log_H: Array,
    dt_bias_HK: Array,
    state_BHVK: Array,
    tails_3BWP: Array,
    *,
    lower_bound: float | None,
    slot: Array | None = None,
    implementation: str = "auto",
) -> tuple[Array, Array]:
    """State and tails after the first ``accepted_B`` rows of a window.

    Args:
      window: of the call that verified it, from this very state and these tails.
      accepted_B: int32, 0..T (clipped to that), of real rows; 0 keeps state and tails bit for bit.
      others: see `kda_decode`.

    Returns:
      (state, tails), bit for bit what ``accepted_B`` calls of `kda_decode` leave.

    Raises:
      InputError: as `kda_decode`.
    """
    expect("commit: accepted", accepted_B, window.b_BTH.shape[:1], jnp.int32)
    batch, _, heads, _ = window.z_BTHK.shape
    v_dim = window.qkv_3BTP.shape[-1] // heads
    # Neither gate nor norm touches the state; the outputs of a replay are never computed.
    gate_BHV = jnp.zeros((batch, heads, v_dim), window.qkv_3BTP.dtype)

    def step(carry, row):
        (qkv_3BP, z_BHK, b_BH), valid_B = row
        _, *carry = kda_decode(
            *(qkv_3BP, z_BHK, b_BH, gate_BHV, conv_3PW, A_log_H, dt_bias_HK, jnp.ones(v_dim)),
            *carry,
            lower_bound=lower_bound,
            eps=1.0,
            valid_B=valid_B,
            slot=slot,
            implementation=implementation,
        )
        return tuple(carry), None

    rows = _rows((tuple(window.qkv_3BTP), window.z_BTHK, window.b_BTH), accepted_B)
    (state_BHVK, tails_3BWP), _ = lax.scan(step, (state_BHVK, tails_3BWP), rows)
    return state_BHVK, tails_3BWP


def replay_and_verify(
    window: Window,
    accepted_B: Array,
    qkv_3BTP: tuple[Array, Array, Array],
    z_BTHK: Array,
    b_BTH: Array,
    gate_BTHV: Array,
    conv_3PW: tuple[Array, Array, Array],
    A_log_H: Array,
    dt_bias_HK: Array,
    norm_V: Array,
    state_BHVK: Array,
    tails_3BWP: Array,
    *,
    lower_bound: float | None,
    eps: float,
    lengths_B: Array | None = None,
    slot: Array | None = None,
    implementation: str = "auto",
) -> tuple[Array, Array, Array, Window]:
    """`commit` of one window and `verify_window` of the next one, in one call.

    The next window begins with the bonus token, the model's own choice behind the accepted drafts.

    Returns:
      (o_BTHV of the next window, committed state and tails, the next window).
    """
    weights = (conv_3PW, A_log_H, dt_bias_HK)
    common = {"lower_bound": lower_bound, "slot": slot, "implementation": implementation}
    committed = commit(window, accepted_B, *weights, state_BHVK, tails_3BWP, **common)
    inputs = (qkv_3BTP, z_BTHK, b_BTH, gate_BTHV, *weights, norm_V, *committed)
    o_BTHV, window = verify_window(*inputs, eps=eps, lengths_B=lengths_B, **common)
    return o_BTHV, *committed, window
