"""Meshes from layouts, on host devices and on devices that only say where they are."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from sharding import Layout, LayoutError, abstract_mesh, initialize, make_mesh

CPU = Layout.load("cpu-8")


def test_mesh_of_all_devices():
    mesh = make_mesh(CPU)
    assert dict(mesh.shape) == {"data": 2, "model": 4}
    assert mesh.axis_names == ("data", "model")
    assert mesh.axis_types == (AxisType.Explicit,) * 2
    assert set(mesh.devices.flat) == set(jax.devices())
    abstract = abstract_mesh(CPU)
    assert dict(abstract.shape) == dict(mesh.shape)
    assert abstract.axis_names == mesh.axis_names
    assert abstract.axis_types == mesh.axis_types


def test_first_devices_of_one_process():
    mesh = make_mesh(Layout.load("single"))
    assert mesh.devices.shape == (1, 1)
    assert mesh.devices.item() == jax.devices()[0]
    four = dataclasses.replace(CPU, mesh={"data": 1, "model": 4})
    assert set(make_mesh(four).devices.flat) == set(jax.devices()[:4])
    assert set(make_mesh(four, jax.devices()[4:]).devices.flat) == set(jax.devices()[4:])


def test_too_few_devices():
    with pytest.raises(LayoutError, match="needs 64 devices, there are 8"):
        make_mesh(Layout.load("v5p-64-ep64"))


@dataclasses.dataclass(frozen=True)
class Place:
    """Enough of a device for a mesh."""

    id: int
    process_index: int = 0
    slice_index: int = 0
    platform: str = "gpu"
    device_kind: str = "place"


def test_every_process_takes_part():
    hosts = [Place(i, process_index=i // 4) for i in range(16)]
    with pytest.raises(LayoutError, match="needs 8 devices, 4 processes have 16"):
        make_mesh(CPU, hosts)
    assert make_mesh(CPU, hosts[:8]).devices.shape == (2, 4)


def test_first_axis_spans_slices():
    layout = Layout.load("v5p-2x64-ep64")
    devices = [Place(i, i // 4, slice_index=(i // 4) % 2) for i in range(128)]
    grid = make_mesh(layout, devices).devices
    assert grid.shape == (2, 8, 8)
    slices = np.vectorize(lambda d: d.slice_index)(grid)
    assert (slices == np.arange(2)[:, None, None]).all()
    with pytest.raises(LayoutError, match="needs 2 slices, the devices are on 1"):
        make_mesh(layout, [Place(i) for i in range(128)])


def test_slices_inside_a_longer_first_axis():
    layout = dataclasses.replace(CPU, mesh={"data": 4, "model": 2}, slices=2)
    grid = make_mesh(layout, [Place(i, slice_index=i % 2) for i in range(8)]).devices
    assert [d.slice_index for d in grid[:, 0]] == [0, 0, 1, 1]


def test_initialize_only_if_needed(monkeypatch):
    calls, running = [], [False]
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: running[0])
    monkeypatch.setattr(jax.distributed, "initialize", lambda *a: calls.append(a))
    initialize(num_processes=1)
    assert calls == []
    initialize("host:1234", 2, 0)
    initialize()
    assert calls == [("host:1234", 2, 0), (None, None, None)]
    running[0] = True
    initialize("host:1234", 2, 0)
    assert len(calls) == 2
