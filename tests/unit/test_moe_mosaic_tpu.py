"""The Mosaic TPU kernels of the routed experts, interpreted, under the contract."""

import dataclasses
from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
from moe_contract import (
    UNBOUNDED,
    ExpertsContract,
    Implementation,
    inputs,
    runner,
    weights,
)

from k3jax.ops.grouped_matmul import mosaic_tpu

INTEGERS = Implementation(
    "mosaic_tpu",
    jnp.bfloat16,
    sizes=(6, 2, 256, 256),
    device="TPU v5p",
    entry=partial(mosaic_tpu.experts, interpret=True),
    limit=1e-2,
    same_bits=0.9,
    gradient=2e-2,
)
FLOAT4 = dataclasses.replace(INTEGERS, device="TPU7x")


class TestExperts(ExpertsContract):
    @pytest.fixture
    def implementation(self):
        return INTEGERS


class TestFloat4:
    """The chip's own conversion of codes, where it has one: what depends on it."""

    def test_every_pair_of_scale_and_code_is_exact(self):
        contract = ExpertsContract()
        for odd in (0, 1):
            contract.test_every_pair_of_scale_and_code_is_exact_in_w2(FLOAT4, odd)
            for half in ("gate", "up"):
                contract.test_pairs_are_exact_in_w13(FLOAT4, half, odd)

    def test_bits_are_those_of_integers(self):
        arguments = *inputs(FLOAT4, 24), *weights(FLOAT4.sizes)
        forms = (runner(form, **UNBOUNDED) for form in (FLOAT4, INTEGERS))
        got, want = (np.asarray(run(*arguments)) for run in forms)
        np.testing.assert_array_equal(got, want)
