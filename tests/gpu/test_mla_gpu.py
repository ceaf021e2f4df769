"""Latent attention on a Hopper GPU: `JAX_PLATFORMS=cuda,cpu python -m pytest tests/gpu`."""

import jax
import jax.numpy as jnp
import pytest
from dsa_kernels import Latent
from mla_contract import LatentContract

from k3jax.ops import target

pytestmark = pytest.mark.skipif(
    not target.is_hopper(jax.devices()[0].device_kind),
    reason="needs a Hopper GPU and JAX_PLATFORMS=cuda,cpu",
)


@pytest.fixture(params=[96, 48, 12])
def implementation(request):
    """Limits are those of the portable form in bfloat16."""
    sizes = {"heads": request.param, "latent": 512, "rope": 64}
    return Latent("mosaic_gpu", jnp.bfloat16, limit=1e-2, cosine=0.9999, blocking=1e-2, **sizes)


class TestLatent(LatentContract):
    pass
