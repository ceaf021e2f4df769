"""Root-mean-square norm. Statistics are float32."""

import jax
import jax.numpy as jnp
from jax import lax


def rms_norm(x: jax.Array, weight: jax.Array, eps: float, *, weight_after_cast: bool = True):
    """RMSNorm over the last axis; same shape and dtype as ``x``.

    ``weight_after_cast`` is the order of Moonshot's code: round to the model dtype, then multiply
    by the weight in that dtype. False multiplies in float32 and rounds once, as GPU kernels do; the
    two differ by at most one unit in the last place.
    """
    y = x.astype(jnp.float32)
    y = y * lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + jnp.float32(eps))
    if weight_after_cast:
        return y.astype(x.dtype) * weight.astype(x.dtype)
    return (y * weight.astype(jnp.float32)).astype(x.dtype)
