"""The plan against the TPU compiler, on the first layers of K3.1 at full width."""

import importlib.util
import os

import pytest

from k3jax import plan
from k3jax.config import Config
from sharding import Layout
from sharding.compile import ENVIRONMENT

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs the extra aot (libtpu, Linux)"
)


@pytest.mark.slow
def test_the_plan_agrees_with_the_compiler():
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    config = Config.preset("kimi-k3.1-pro").truncated(4)  # three KDA, one dense, one global layer
    made = plan.plan("first layers", config, Layout.load("v5p-64-ep64"), compile=True)
    compiled = made.compiled
    assert compiled is not None
    assert made.agreement == pytest.approx(1, abs=plan.AGREEMENT)
    assert plan.unlisted_collectives(made) == []
    assert compiled.temporary_bytes < 1e9  # neither experts nor caches are copied
    assert compiled.alias_bytes == pytest.approx(made.memory["latents"] * 7 / 6, rel=0.05)
    one_layer_of_keys = 8 * 131072 * 128 * 2
    gathers = [c for c in compiled.collectives if c.kind == "all-gather"]
    assert max(c.bytes for c in gathers) < one_layer_of_keys / 100
    assert made.fits
    assert "by the compiler" in made.verdict()
