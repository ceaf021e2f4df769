"""Depth reads on a Hopper GPU: `JAX_PLATFORMS=cuda,cpu python -m pytest tests/gpu`."""

import jax
import jax.numpy as jnp
import pytest
from attention_residuals_contract import GradientContract, Read, ReadContract, check, drawn

from k3jax.ops import target

pytestmark = pytest.mark.skipif(
    not target.is_hopper(jax.devices()[0].device_kind),
    reason="needs a Hopper GPU and JAX_PLATFORMS=cuda,cpu",
)

SHAPES = [(8, 7168), (3, 1024)]


class TestRead(ReadContract, GradientContract):
    @pytest.fixture(params=SHAPES, ids=str)
    def implementation(self, request):
        return Read("mosaic_gpu", jnp.bfloat16, request.param)


@pytest.mark.parametrize("count", [8, 3, 0])
def test_blocks_with_several_tokens(count):
    """More tokens than blocks, and a last round that not all of them have."""
    read = Read("mosaic_gpu", jnp.bfloat16, (8, 7168))
    check(read, drawn(read, 300, seed=count), count)
