"""Short causal depthwise convolution with SiLU, and the tail it carries between calls."""

import jax.numpy as jnp
from jax import Array

from k3jax.errors import InputError
from k3jax.ops.packed import Lengths, bounds, expect_alone
from k3jax.ops.short_conv.xla import filtered, packed

__all__ = ["short_conv"]


def short_conv(
    x_BTP: Array,
    w_PW: Array,
    tail_BWP: Array | None = None,
    lengths_B: Array | None = None,
    packed_lengths_N: Lengths | None = None,
) -> tuple[Array, Array]:
    """silu(sum_w w[p, w] * x[t - (W - 1) + w, p]): tap W-1 meets the current token.

    Sum and SiLU in float32, one cast at the end. Source: Moonshot's published modelling code
    (width 4, no bias, separate convolutions for q, k and v).

    Args:
      x_BTP: inputs, floating.
      w_PW: one filter of W taps for each channel, float32.
      tail_BWP: [B, W-1, P] in the dtype of x: the inputs just before x, oldest first; zeros at
        the start of a sequence (and if absent).
      lengths_B: int32 number of real rows of each batch row, 0..T (clipped to that); the rows
        behind are padding and may hold anything, NaN included. All rows are real if absent.
      packed_lengths_N: the one batch row holds N sequences of these lengths, one after another;
        their sum is T. No sequence sees another one's rows, and there is one tail a sequence,
        [N, W-1, P]. Under a trace lengths cannot be checked: they are clipped to T, and rows
        behind their sum are padding.

    Returns:
      (y_BTP in the dtype of x, zero in padding rows;
       new tail [B, W-1, P]: the last W-1 rows of tail followed by x[:length], copied bit for bit,
       so a row of length 0 keeps its tail).

    Raises:
      InputError: a shape or dtype that does not fit, T == 0, both kinds of lengths, or packed
        lengths that are negative or do not sum to T.
    """
    if x_BTP.ndim != 3 or not jnp.issubdtype(x_BTP.dtype, jnp.floating):
        raise InputError(f"short_conv: x is {_describe(x_BTP)}, expected floating [B, T, P]")
    batch, length, channels = x_BTP.shape
    if length == 0:
        raise InputError(f"short_conv: x is {_describe(x_BTP)}: no tokens (T = 0)")
    if w_PW.ndim != 2 or w_PW.shape[0] != channels or w_PW.shape[1] == 0 or w_PW.dtype != "float32":
        raise InputError(f"short_conv: w is {_describe(w_PW)}, expected float32[{channels}, W]")
    width = w_PW.shape[1]
    tails, sequences = batch, None
    if packed_lengths_N is not None:
        expect_alone("short_conv", batch, lengths_B)
        sequences = bounds("short_conv", packed_lengths_N, length)
        tails = len(sequences[0])
    tail_shape = (tails, width - 1, channels)
    if tail_BWP is None:
        tail_BWP = jnp.zeros(tail_shape, x_BTP.dtype)
    elif tail_BWP.shape != tail_shape or tail_BWP.dtype != x_BTP.dtype:
        expected = f"{x_BTP.dtype}{list(tail_shape)}"
        raise InputError(f"short_conv: tail is {_describe(tail_BWP)}, expected {expected}")
    if sequences is not None:
        return packed(x_BTP, w_PW, tail_BWP, *sequences)
    if lengths_B is None:
        history_BSP = jnp.concatenate([tail_BWP, x_BTP], axis=1)
        return filtered(history_BSP, w_PW), history_BSP[:, length:]

    if lengths_B.shape != (batch,) or lengths_B.dtype != jnp.int32:
        raise InputError(f"short_conv: lengths is {_describe(lengths_B)}, expected int32[{batch}]")
    lengths_B = jnp.clip(lengths_B, 0, length)
    real_BT1 = (jnp.arange(length, dtype=jnp.int32) < lengths_B[:, None])[..., None]
    # A NaN left in a padding row would be harmless to the outputs and fatal to the gradient of w.
    x_BTP = jnp.where(real_BT1, x_BTP, jnp.zeros_like(x_BTP))
    history_BSP = jnp.concatenate([tail_BWP, x_BTP], axis=1)
    y_BTP = filtered(history_BSP, w_PW)
    rows_BW = lengths_B[:, None] + jnp.arange(width - 1, dtype=jnp.int32)
    new_tail_BWP = jnp.take_along_axis(history_BSP, rows_BW[..., None], axis=1)
    return jnp.where(real_BT1, y_BTP, jnp.zeros_like(y_BTP)), new_tail_BWP


def _describe(x):
    return f"{x.dtype}{list(x.shape)}"
