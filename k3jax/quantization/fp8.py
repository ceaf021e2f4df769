"""Eight-bit floats (float8_e4m3fn) with one float32 factor a row: index keys and index queries.

Row x of width K is ``codes * factor``, factor = max |x| / 448, so that the largest value gets the
largest code. A product of two codes has at most 8 significant bits and is exact in bfloat16 inputs
with a float32 sum.

Source: the formula of the serving engines' index-key cache (DeepSeek-V3.2), whose 1e-4 as the least
maximum is not taken over: small rows keep their precision.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

DTYPE = jnp.float8_e4m3fn
LARGEST = 448.0
_SMALLEST = 2.0**-126  # the least factor, the smallest normal float32


def quantize(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x [..., K] (float32 or bfloat16) as (codes [..., K] float8_e4m3fn, factors [...] float32).

    To the nearest code, ties to the even one. A row of zeros has codes 0 and the least factor,
    2**-126. A row with a NaN or an infinity has a NaN code, so that its scores are NaN.
    """
    x = x.astype(jnp.float32)
    largest = jnp.abs(x).max(-1)
    # A product, because XLA makes one of a division by a constant, on some backends. Written so
    # that a NaN gives the least factor.
    factor = jnp.where(largest > LARGEST * _SMALLEST, largest * jnp.float32(1 / LARGEST), _SMALLEST)
    return (x / factor[..., None]).astype(DTYPE), factor
