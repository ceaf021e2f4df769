"""The short convolution in plain JAX."""

import jax
import jax.numpy as jnp


def filtered(history_BSP, w_PW):
    """Outputs of the tokens behind the first W-1 rows of history, in its dtype."""
    width = w_PW.shape[1]
    length = history_BSP.shape[1] - (width - 1)
    y_BTP = sum(
        history_BSP[:, tap : tap + length].astype(jnp.float32) * w_PW[:, tap]
        for tap in range(width)
    )
    return jax.nn.silu(y_BTP).astype(history_BSP.dtype)


def packed(x_1TP, w_PW, tail_NWP, start_N, length_N):
    """Sequences one after another in one row: (outputs, the tail behind each sequence).

    All rows are filtered as one sequence; the first W-1 of each, which would see the one before,
    are replaced by what they give behind their own tail.
    """
    length, before = x_1TP.shape[1], w_PW.shape[1] - 1
    end_N = start_N + length_N
    real_T1 = (jnp.arange(length, dtype=jnp.int32) < end_N[-1])[:, None]
    # A NaN left in a padding row would be harmless to the outputs and fatal to the gradient of w.
    x_TP = jnp.where(real_T1, x_1TP[0], jnp.zeros_like(x_1TP[0]))
    y_TP = filtered(jnp.pad(x_TP, ((before, 0), (0, 0)))[None], w_PW)[0]
    y_TP = jnp.where(real_T1, y_TP, jnp.zeros_like(y_TP))

    offset_W = jnp.arange(before, dtype=jnp.int32)
    row_NW = start_N[:, None] + offset_W
    row_NW = jnp.where(offset_W < length_N[:, None], row_NW, length)
    head_NWP = x_TP.at[row_NW].get(mode="fill", fill_value=0)
    y_NWP = filtered(jnp.concatenate([tail_NWP, head_NWP], axis=1), w_PW)
    y_TP = y_TP.at[row_NW].set(y_NWP, mode="drop")

    at_NW = length_N[:, None] + offset_W  # in tail followed by x
    of_tail_NWP = jnp.take_along_axis(tail_NWP, jnp.minimum(at_NW, before - 1)[..., None], axis=1)
    of_x_NWP = x_TP[jnp.maximum(start_N[:, None] + at_NW - before, 0)]
    return y_TP[None], jnp.where((at_NW < before)[..., None], of_tail_NWP, of_x_NWP)
