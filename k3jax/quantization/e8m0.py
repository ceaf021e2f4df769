"""E8M0, the scales of the MX formats: a byte b is ``2**(b - 127)`` for a group of 32; 255 is NaN.

Source: OCP Microscaling Formats (MX) v1.0.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

GROUP = 32
NAN = 255
SMALLEST_NORMAL = 2.0**-126


def scaled(values: jax.Array, scales: jax.Array) -> jax.Array:
    """float32 values [..., groups, size] times the scales of uint8 [..., groups].

    Exact, except that a product below 2**-126 is a zero of the same sign, as a CPU or a TPU would
    make it sooner or later, and that one of 2**128 or more is infinite.
    """
    # 2**-127 is not a normal float32, so byte 0 is 2**-126 and a half. Two products keep it.
    power = lax.bitcast_convert_type(jnp.maximum(scales, 1).astype(jnp.uint32) << 23, jnp.float32)
    rest = jnp.where(scales == 0, 0.5, jnp.where(scales == NAN, jnp.nan, 1.0))
    values = (values * power[..., None]) * rest.astype(jnp.float32)[..., None]
    return jnp.where(jnp.abs(values) < SMALLEST_NORMAL, values * 0.0, values)
