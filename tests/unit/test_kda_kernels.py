"""`gated_kda` at the head size of the kernels: every implementation, 500+ cases.

Kernels for TPUs run in interpret mode, which computes every dot exactly: what a matrix unit makes
of them is in `test_passes_of_the_matrix_unit`.
"""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import kda_cases
import pytest
from jax.experimental.pallas import tpu as pltpu
from kda_contract import HEADS, ROWS, SEEDS, SHORT, GatedContract, float64
from kda_kernels import BOUNDS, IMPLEMENTATIONS, D, interpreted, raw

from k3jax.ops.kda import mosaic_tpu_chunked


@pytest.fixture(params=IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS.keys())
def implementation(request):
    return request.param


def test_at_least_500_cases():
    batches = SEEDS + len(SHORT) + len(BOUNDS)
    assert batches * ROWS * HEADS >= 500


class TestGated(GatedContract):
    pass


@pytest.mark.parametrize("name", ["mosaic_tpu", "mosaic_tpu-bfloat16"])
def test_packed_in_uninitialised_memory(name):
    """As on a TPU, a block of the output holds NaN until the kernel writes it: the first chunk of
    a sequence has to fetch its state, and chunks left over must not write another one.
    """
    interpret = pltpu.InterpretParams(uninitialized_memory="nan")
    patches = functools.partial(interpreted, interpret)
    GatedContract().test_packed(dataclasses.replace(IMPLEMENTATIONS[name], patches=patches))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_passes_of_the_matrix_unit(dtype):
    """What bfloat16 passes make of the dots: 6 of them for HIGHEST, 3 for HIGH, and 1 by default.

    With float32 inputs all dots have 6, measured 2.8e-7 for outputs and states. With bfloat16 ones
    the state is as exact as it has to be, 2.7e-6, and outputs lose 1.4e-5, far below a rounding.
    """
    parts = {jax.lax.Precision.HIGHEST: 3, jax.lax.Precision.HIGH: 2}

    def split(x, count):
        for _ in range(count):
            part = jax.lax.reduce_precision(x, 8, 7)  # bfloat16 within float32
            yield part
            x = x - part

    def dot(a, b, contract, precision=jax.lax.Precision.HIGHEST):
        a, b = ([*split(x, parts[precision])] for x in (a, b))
        pairs = [(i, j) for i in range(len(a)) for j in range(len(a)) if i + j < len(a)]
        return sum(exact(a[i], b[j], contract) for i, j in reversed(pairs))

    exact = mosaic_tpu_chunked._dot
    regimes = ["random", "slow_decay", "saturated", "half_saturated", "equal_keys", "near_keys"]
    inputs = raw(kda_cases.batch(6, len(regimes), 512, 1, D, D, regimes), dtype)
    inputs = [jnp.asarray(x) for x in inputs]
    # Outputs in float32, so that only the passes round: v alone decides their dtype.
    inputs[2] = inputs[2].astype(jnp.float32)
    expected = float64(inputs)
    with mock.patch.object(mosaic_tpu_chunked, "_dot", dot):
        run = functools.partial(mosaic_tpu_chunked.gated_kda, interpret=True)
        got = jax.jit(lambda *x: run(*x, None, -5.0))(*inputs)
    o, state = (kda_cases.errors_by_row(a, b).max() for a, b in zip(got, expected, strict=True))
    assert state <= 1e-5
    assert o <= (1e-5 if dtype == jnp.float32 else 5e-5)
