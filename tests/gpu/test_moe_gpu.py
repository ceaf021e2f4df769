"""The routed experts on a Hopper GPU: `JAX_PLATFORMS=cuda,cpu python -m pytest tests/gpu`."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from moe_contract import ExpertsContract, Implementation, check, inputs, runner, weights

from k3jax.ops import target

pytestmark = pytest.mark.skipif(
    not target.is_hopper(jax.devices()[0].device_kind),
    reason="needs a Hopper GPU and JAX_PLATFORMS=cuda,cpu",
)


KERNEL = Implementation(
    "mosaic_gpu", jnp.bfloat16, sizes=(6, 2, 512, 512), limit=1e-2, same_bits=0.99, gradient=2e-2
)


@pytest.fixture
def implementation():
    # The gradient is the portable form's.
    return KERNEL


class TestExperts(ExpertsContract):
    pass


@pytest.mark.parametrize("n", [64, 600])
def test_two_teams(n):
    """Many experts with few rows each."""
    kernel = dataclasses.replace(KERNEL, sizes=(64, 2, 512, 512))
    arguments = *inputs(kernel, n), *weights(kernel.sizes)
    check(kernel, runner(kernel)(*arguments), *arguments)
