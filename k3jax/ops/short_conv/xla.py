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
