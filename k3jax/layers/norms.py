"""The norms of layers. Statistics are float32."""

import jax
import jax.numpy as jnp
from jax import lax

from k3jax.ops.rms_norm import rms_norm

__all__ = ["layer_norm", "rms_norm"]


def layer_norm(x: jax.Array, weight: jax.Array, bias: jax.Array, eps: float):
    """LayerNorm over the last axis in float32, cast once to the dtype of ``x``."""
    y = x.astype(jnp.float32)
    y = y - jnp.mean(y, axis=-1, keepdims=True)
    y = y * lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + jnp.float32(eps))
    return (y * weight.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)
