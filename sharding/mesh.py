"""Device meshes from a layout, on one host, many hosts or several slices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh

from sharding.errors import LayoutError
from sharding.layout import Layout


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
) -> None:
    """`jax.distributed.initialize`, unless it was called or there is one process.

    Call it before anything else of JAX. Under a launcher that JAX knows (a TPU pod, Slurm, Open
    MPI) it needs no arguments.
    """
    if num_processes != 1 and not jax.distributed.is_initialized():
        jax.distributed.initialize(coordinator_address, num_processes, process_id)


def make_mesh(layout: Layout, devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh of a layout with explicit axes.

    Neighbours on an inner mesh axis are neighbours on the interconnect where JAX knows it; the
    first axis goes across slices.

    Args:
      devices: of all processes (`jax.devices()` if None). One process may give more than are
        needed: the first ones are taken.
    Raises:
      LayoutError: too few devices, or too many of several processes, which all must take part; or
        another number of slices.
    """
    devices = list(jax.devices() if devices is None else devices)
    where, needed = f"layout {layout.name}", layout.num_devices
    if len(devices) < needed:
        raise LayoutError(where, [f"needs {needed} devices, there are {len(devices)}"])
    if len(devices) > needed:
        processes = {d.process_index for d in devices}
        if len(processes) > 1:
            raise LayoutError(
                where,
                [f"needs {needed} devices, {len(processes)} processes have {len(devices)}"],
            )
        devices = devices[:needed]
    names, sizes = tuple(layout.mesh), tuple(layout.mesh.values())
    explicit = (AxisType.Explicit,) * len(names)
    if layout.slices == 1:
        # As `jax.make_mesh`, which does not split the axes of a TPU torus.
        grid = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
        return Mesh(grid, names, axis_types=explicit)
    found = len({getattr(d, "slice_index", 0) for d in devices})
    if found != layout.slices:
        raise LayoutError(where, [f"needs {layout.slices} slices, the devices are on {found}"])
    grid = mesh_utils.create_hybrid_device_mesh(
        (sizes[0] // layout.slices, *sizes[1:]),
        (layout.slices,) + (1,) * (len(sizes) - 1),
        devices,
        allow_split_physical_axes=True,
    )
    return Mesh(grid, names, axis_types=explicit)


def abstract_mesh(layout: Layout) -> AbstractMesh:
    """The mesh without devices, for shapes and ahead-of-time compilation."""
    names, sizes = tuple(layout.mesh), tuple(layout.mesh.values())
    return AbstractMesh(sizes, names, axis_types=(AxisType.Explicit,) * len(names))
