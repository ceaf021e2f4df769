"""The vision tower at K3's size compiles for TPUs ahead of time, without one."""

from __future__ import annotations

import os

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import SingleDeviceSharding

from k3jax.config import Config
from k3jax.layers.vision import VisionTower
from k3jax.vision.cost import parameters
from k3jax.vision.encoder import bucket

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("libtpu")]

# bytes of temporaries on v5p; measured 2.5e9
PATCHES, TEMPORARIES = 65_536, 3e9


@pytest.fixture(scope="module")
def device():
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    pytest.importorskip("libtpu", reason="pip install libtpu to compile for TPUs")
    from jax.experimental import topologies

    return topologies.get_topology_desc("v5p:2x2x1", platform="tpu").devices[0]


@pytest.mark.parametrize("patches", [bucket(5476), PATCHES])
def test_compiles_for_v5p(device, patches):
    config = Config.preset("kimi-k3").vision
    assert config is not None
    graphdef, state = nnx.split(VisionTower.abstract(config, implementation="xla"))
    place = SingleDeviceSharding(device)

    def there(leaf):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)

    def run(state, patches_NP, grid_3):
        return nnx.merge(graphdef, state)(patches_NP, grid_3)

    pixels = there(jax.ShapeDtypeStruct((patches, config.patch_width), jnp.uint8))
    grid = there(jax.ShapeDtypeStruct((3,), jnp.int32))
    compiled = jax.jit(run).lower(jax.tree.map(there, state), pixels, grid).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    weights = 2 * sum(parameters(config))
    assert weights <= memory.argument_size_in_bytes <= 1.2 * weights + pixels.size
    assert memory.temp_size_in_bytes < TEMPORARIES
