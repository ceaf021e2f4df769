"""The Mosaic TPU kernels of the routed experts, interpreted, under the contract."""

import dataclasses
from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from moe_contract import (
    UNBOUNDED,
    ExpertsContract,
    Implementation,
    check,
    inputs,
    runner,
    weights,
)

from k3jax.ops.grouped_matmul import mosaic_tpu
from k3jax.quantization.mxfp4 import MXFP4

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


def test_pieces():
    """Three blocks of columns in both kernels; 16 of the tokens and 32 rows of tiles at a time."""
    form = dataclasses.replace(INTEGERS, sizes=(3, 2, 768, 768))
    arguments = *inputs(form, 24), *weights(form.sizes)
    with mock.patch.multiple(mosaic_tpu, TOKENS=16, ROWS=32):
        got = runner(form)(*arguments)
    check(form, got, *arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, None),
        ({"dtype": jnp.float32}, "z is float32"),
        ({"packed": False}, "not packed"),
        ({"L": 3456}, "L is 3456"),
        ({"F": 6144}, "F is 6144, over 4096"),
    ],
)
def test_refusals_name_the_value(change, message):
    sizes = {"L": 3584, "F": 3072, "dtype": jnp.bfloat16, "packed": True} | change
    L, F, array = sizes["L"], sizes["F"], jax.ShapeDtypeStruct

    def weight(*shape):
        parts = [array((*shape[:-1], shape[-1] // n), jnp.uint8) for n in (2, 32)]
        return MXFP4(*parts) if sizes["packed"] else array(shape, jnp.bfloat16)

    z, ids = array((64, L), sizes["dtype"]), array((64, 16), jnp.int32)
    refused = mosaic_tpu.refusal(z, ids, weight(14, 2 * F, L), weight(14, L, F), None)
    assert refused is None if message is None else message in refused
