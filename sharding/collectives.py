"""Every communication of the model: inside a manual `shard_map`, over tuples of mesh axis names.

A tuple may be empty, which communicates nothing, so that one code path serves a single device and a
pod. Axes of a tuple count in order, the first one slowest, as in a `PartitionSpec`. What a step
communicates is read off its jaxpr (`sharding.report`), never declared beside the code.
"""

from __future__ import annotations

import jax
from jax import lax

Axes = tuple[str, ...]


def size(axes: Axes) -> int:
    """Devices along ``axes``; 1 for none. Static."""
    total = 1
    for axis in axes:
        total *= lax.axis_size(axis)
    return total


def index(axes: Axes):
    """This device's place along ``axes``, 0 .. size - 1; the Python int 0 for none."""
    return lax.axis_index(axes) if axes else 0


def all_gather(x: jax.Array, axes: Axes, dimension: int) -> jax.Array:
    """Every shard of ``dimension``, joined in the order of the devices."""
    return lax.all_gather(x, axes, axis=dimension, tiled=True) if axes else x


def reduce_scatter(x: jax.Array, axes: Axes, dimension: int) -> jax.Array:
    """The sum over devices, of which each keeps its own part of ``dimension``."""
    if not axes:
        return x
    return lax.psum_scatter(x, axes, scatter_dimension=dimension, tiled=True)


def all_reduce(x: jax.Array, axes: Axes) -> jax.Array:
    """The sum over devices, on all of them."""
    return lax.psum(x, axes) if axes else x


def all_max(x: jax.Array, axes: Axes) -> jax.Array:
    """The maximum over devices, on all of them."""
    return lax.pmax(x, axes) if axes else x


def all_to_all(x: jax.Array, axes: Axes, split: int, join: int) -> jax.Array:
    """Part i of dimension ``split`` goes to device i; what arrives is joined along ``join``."""
    return lax.all_to_all(x, axes, split, join, tiled=True) if axes else x
