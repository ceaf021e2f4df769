"""Every communication of the model: inside a manual `shard_map`, over tuples of mesh axis names.

A tuple may be empty, which communicates nothing, so that one code path serves a single device and a
pod. Axes of a tuple count in order, the first one slowest, as in a `PartitionSpec`. What a step
communicates is read off its jaxpr (`sharding.report`), never declared beside the code.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
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


def ragged_all_to_all(
    rows: jax.Array,
    buffer: jax.Array,
    input_offsets_P: jax.Array,
    send_sizes_P: jax.Array,
    output_offsets_P: jax.Array,
    recv_sizes_P: jax.Array,
    axes: Axes,
) -> jax.Array:
    """Slices of ``rows``, one a device, written into the devices' ``buffer``; see ``jax.lax``.

    ``send_sizes_P[i]`` rows from ``input_offsets_P[i]`` on go to device i, which finds them from
    row ``output_offsets_P[i]`` of its buffer on. ``recv_sizes_P[i]`` rows come from device i.
    Offsets and sizes are int32, and slices in a buffer must not overlap.

    XLA:CPU has no such collective, so there all rows are gathered and each device picks its own,
    with the same result. The mesh under the `shard_map` says which it is, while tracing, so that
    the jaxpr holds one of the two and lowering for a described TPU holds the real one.

    On GPUs, XLA's one-shot form of it is known to crash above 32 ranks (openxla/xla#47283).
    """
    if not axes:
        return _place(rows, buffer, input_offsets_P, send_sizes_P, output_offsets_P)
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is None or device.device_kind != "cpu":
        return lax.ragged_all_to_all(
            rows,
            buffer,
            input_offsets_P,
            send_sizes_P,
            output_offsets_P,
            recv_sizes_P,
            axis_name=axes,
        )
    table_P3 = jnp.stack([input_offsets_P, send_sizes_P, output_offsets_P], axis=1)
    table_P3 = all_to_all(table_P3, axes, 0, 0)  # row i: what device i does to this one
    from_device_P = jnp.arange(size(axes), dtype=jnp.int32) * rows.shape[0]
    return _place(
        all_gather(rows, axes, 0),
        buffer,
        from_device_P + table_P3[:, 0],
        table_P3[:, 1],
        table_P3[:, 2],
    )


def _place(rows, buffer, begin_S, size_S, target_S) -> jax.Array:
    """``buffer`` with each slice of ``rows`` written from row ``target_S`` on."""
    row_M1 = jnp.arange(buffer.shape[0], dtype=jnp.int32)[:, None]
    inside_MS = (row_M1 >= target_S) & (row_M1 < target_S + size_S)
    source_M = jnp.where(inside_MS, begin_S + row_M1 - target_S, 0).sum(1)
    inside_M = inside_MS.any(1).reshape(-1, *(1,) * (rows.ndim - 1))
    return jnp.where(inside_M, rows[source_M], buffer)
