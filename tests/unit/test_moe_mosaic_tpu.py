"""The Mosaic TPU kernels of the routed experts, interpreted, under the contract."""

from functools import partial

import jax.numpy as jnp
import pytest
from moe_contract import ExpertsContract, Implementation

from k3jax.ops.grouped_matmul import mosaic_tpu


@pytest.fixture
def implementation():
    # The whole gradient is the portable form's; measured as there.
    return KERNEL


KERNEL = Implementation(
    "mosaic_tpu",
    jnp.bfloat16,
    sizes=(6, 2, 256, 256),
    device="TPU v5p",
    entry=partial(mosaic_tpu.experts, interpret=True),
    limit=1e-2,
    same_bits=0.9,
    gradient=2e-2,
)


class TestExperts(ExpertsContract):
    pass
