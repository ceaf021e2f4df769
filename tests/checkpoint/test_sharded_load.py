"""Sharded loads on eight host devices: bytes read and held, and the same values."""

import jax
import numpy as np
import pytest
from checkpoint_files import GOLDEN, abstract, assert_equal
from jax.sharding import NamedSharding, PartitionSpec

from k3jax.checkpoint import fill, load, safetensors, tree
from k3jax.config import Config

DIRECTORY = GOLDEN / "k3_tiny"


def is_expert(path) -> bool:
    return str(path[-1]).split("_")[0] in ("w13", "w2")


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((8,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))


def rules(mesh, experts_only=True):
    """Experts over their own axis; else every last axis that eight divides."""

    def sharding(path, shape, axes):
        spec = [None] * len(shape)
        if is_expert(path):
            spec[len(shape) - 3] = "expert"
        elif not experts_only and shape[-1] % 8 == 0:
            spec[-1] = "expert"
        return NamedSharding(mesh, PartitionSpec(*spec))

    return sharding


@pytest.mark.parametrize("experts_only", [True, False])
@pytest.mark.parametrize("form", ["mxfp4", "dense"])
def test_same_values_and_no_replicated_expert(mesh, experts_only, form):
    config = Config.from_hf(DIRECTORY)
    leaves = abstract(config, form=form)
    whole = load(DIRECTORY, leaves, config)
    sharded = load(DIRECTORY, leaves, config, shardings=rules(mesh, experts_only))
    assert_equal(sharded, whole)
    for path, leaf in tree.flatten(sharded).items():
        held = sum(shard.data.nbytes for shard in leaf.addressable_shards)
        split = is_expert(path) or (not experts_only and leaf.shape[-1] % 8 == 0)
        assert held == leaf.nbytes * (1 if split else 8), path


def test_only_the_bytes_of_the_shards_are_read(mesh, monkeypatch):
    config = Config.from_hf(DIRECTORY)
    total = []
    read = safetensors.Reader.read_into

    def count(self, buffer, offset):
        total.append(len(buffer))
        read(self, buffer, offset)

    monkeypatch.setattr(safetensors.Reader, "read_into", count)
    load(DIRECTORY, abstract(config), config)
    whole = sum(total)
    total.clear()
    load(DIRECTORY, abstract(config), config, shardings=rules(mesh, experts_only=False))
    assert sum(total) == whole
    # One process of eight, which holds the first device only.
    total.clear()
    one = jax.devices()[:1]
    monkeypatch.setattr(
        NamedSharding, "addressable_devices_indices_map",
        lambda self, shape: {d: self.devices_indices_map(shape)[d] for d in one},
    )  # fmt: skip
    monkeypatch.setattr(
        jax, "make_array_from_single_device_arrays", lambda shape, sharding, parts: parts[0]
    )
    parts = tree.flatten(load(DIRECTORY, abstract(config), config, shardings=rules(mesh)))
    packed = sum(part.nbytes for path, part in parts.items() if is_expert(path))
    experts = sum(
        int(np.prod(leaf.shape))
        for p, leaf in tree.flatten(abstract(config)).items()
        if is_expert(p)
    )
    assert packed * 8 == experts > 0
    assert sum(total) == whole - experts * 7 // 8


def test_no_array_larger_than_its_shard_is_ever_on_a_device(mesh, monkeypatch):
    config = Config.from_hf(DIRECTORY)
    put, sizes = jax.device_put, []

    def watch(value, device=None):
        sizes.append(value.nbytes)
        return put(value, device)

    monkeypatch.setattr(jax, "device_put", watch)
    sharded = load(DIRECTORY, abstract(config), config, shardings=rules(mesh, experts_only=False))
    largest = max(
        shard.data.nbytes for leaf in tree.flatten(sharded).values()
        for shard in leaf.addressable_shards
    )  # fmt: skip
    assert max(sizes) == largest


def test_uneven_sharding_is_left_to_jax(mesh):
    """A region need not divide: 13 rows over 8 devices is refused by JAX, not half loaded."""
    config = Config.from_hf(DIRECTORY)

    def bad(path, shape, axes):
        wrong = path == ("head", 0, "attention", "A_log")
        return NamedSharding(mesh, PartitionSpec("expert") if wrong else PartitionSpec())

    with pytest.raises(ValueError, match="divi"):
        load(DIRECTORY, abstract(config), config, shardings=bad)


def test_buffers_are_taken_over_without_a_copy():
    buffer = fill.allocate((1 << 20,), np.dtype(np.float32))
    buffer[:] = 1
    array = jax.device_put(buffer, None)
    assert array.unsafe_buffer_pointer() == buffer.ctypes.data
    assert buffer.ctypes.data % fill.ALIGNMENT == 0
