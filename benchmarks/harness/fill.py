"""Arrays that are made where they are used: every element is a hash of its place.

`jax.random` holds four bytes an element before the cast, 63 GB for the packed experts of one layer
of K3. A hash of iota is one kernel that writes the result and needs no more memory than that.
"""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax


def bits(shape: tuple[int, ...], seed) -> jax.Array:
    """uint32 of ``shape`` without a pattern that would matter; can be traced.

    Axes are mixed in one by one, so that arrays of more than 2**32 elements have no equal rows.
    """
    seed = jnp.asarray(seed, jnp.uint32) * jnp.uint32(0x9E3779B9) + jnp.uint32(1)
    x = jnp.broadcast_to(seed, shape)
    for axis in range(len(shape)):
        x = x ^ lax.broadcasted_iota(jnp.uint32, shape, axis)
        x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
        x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
        x = x ^ (x >> 16)
    return x


@partial(jax.jit, static_argnums=0)
def codes(shape: tuple[int, ...], seed) -> jax.Array:
    """uint8, all values alike."""
    return bits(shape, seed).astype(jnp.uint8)


@partial(jax.jit, static_argnums=(0, 2, 3))
def scales(shape: tuple[int, ...], seed, low: int, high: int) -> jax.Array:
    """uint8 in low..high, all alike."""
    return (low + bits(shape, seed) % jnp.uint32(high - low + 1)).astype(jnp.uint8)


def uniform(
    shape: tuple[int, ...], seed: int, dtype, spread: float, mean: float = 0.0
) -> jax.Array:
    """Numbers of this standard deviation and mean, all alike between the ends."""
    reach = jnp.float32(math.sqrt(3) * spread)
    return _uniform(shape, seed, jnp.dtype(dtype), reach, jnp.float32(mean))


@partial(jax.jit, static_argnums=(0, 2))
def _uniform(shape, seed, dtype, reach, mean):
    unit = (bits(shape, seed) >> 8).astype(jnp.float32) * jnp.float32(2.0**-23) - 1
    return (mean + reach * unit).astype(dtype)
