"""`gated_kda` and `kda_decode` at the head size of the kernels: every implementation, 500+ cases.

Kernels for TPUs run in interpret mode, which computes every dot exactly: what a matrix unit makes
of them is in `test_passes_of_the_matrix_unit`.
"""

import functools
import logging
from unittest import mock

import jax
import jax.numpy as jnp
import kda_cases
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from kda_contract import (
    BOUNDS,
    EPS,
    HEADS,
    ROWS,
    SEEDS,
    SHORT,
    D,
    DecodeContract,
    GatedContract,
    Implementation,
    decode_inputs,
    float64,
    raw,
    wide,
)

from k3jax.errors import InputError
from k3jax.ops import kda as kda_op
from k3jax.ops.kda import decode, gated, mosaic_tpu_chunked, mosaic_tpu_decode


def interpreted(interpret=True):
    prefill = functools.partial(mosaic_tpu_chunked.gated_kda, interpret=interpret)
    step = functools.partial(mosaic_tpu_decode.kda_decode, interpret=interpret)
    return [
        (gated.IMPLEMENTATIONS, gated.with_xla_gradient(prefill)),
        (decode.IMPLEMENTATIONS, step),
    ]


# Measured: xla 9.8e-7 output and 2.0e-6 state, mosaic_tpu 7.6e-7 and 2.1e-6, all with equal keys at
# T = 4,096; a step 8.6e-7. Outputs in bfloat16 are rounded once (2^-8): 3.7e-3. In bfloat16 a last
# bit of the convolution that rounds the other way moves a step by up to 6.2e-4.
TPU = {"device": "TPU v5", "patches": interpreted}
IMPLEMENTATIONS = {
    "xla": Implementation("xla"),
    "mosaic_tpu": Implementation("mosaic_tpu", **TPU),
    "mosaic_tpu-bfloat16": Implementation(
        "mosaic_tpu", jnp.bfloat16, output=4e-3, step=4e-3, **TPU
    ),
}


@pytest.fixture(params=IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS.keys())
def implementation(request):
    return request.param


def test_at_least_500_cases():
    batches = SEEDS + len(SHORT) + len(BOUNDS)
    assert batches * ROWS * HEADS >= 500


class TestGated(GatedContract):
    pass


class TestDecode(DecodeContract):
    pass


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


def test_memory_of_a_tpu():
    """In the simulation of a TPU's memories, where what was never written is NaN: both kernels."""
    interpret = pltpu.InterpretParams(
        out_of_bounds_reads="uninitialized", uninitialized_memory="nan", detect_races=True
    )
    inputs = [jnp.asarray(x) for x in raw(kda_cases.batch(7, 2, 81, 2, D, D), jnp.bfloat16)]
    lengths = jnp.int32([81, 3])
    tokens = decode_inputs(np.random.default_rng(8), jnp.bfloat16, 4, 2, 2)
    tokens = jax.tree.map(jnp.asarray, tokens)
    arguments = (*tokens, jnp.arange(4) != 3, jnp.int32(1), -5.0, EPS)
    results = []
    for mode in (True, interpret):
        got = mosaic_tpu_chunked.gated_kda(*inputs, lengths, -5.0, interpret=mode)
        results.append([*got, *mosaic_tpu_decode.kda_decode(*arguments, interpret=mode)])
    for plain, simulated in zip(*results, strict=True):
        assert np.isfinite(wide(plain)).all()
        np.testing.assert_allclose(wide(simulated), wide(plain), rtol=2**-7, atol=1e-5)


OPS = {
    "gated_kda": lambda width, dtype, **how: kda_op.gated_kda(
        *(np.zeros((1, 2, 3, width), dtype) for _ in range(4)), np.zeros((1, 2, 3), dtype),
        np.zeros(3, np.float32), np.zeros((3, width), np.float32), lower_bound=-5.0, **how,
    ),
    "kda_decode": lambda width, dtype, **how: kda_op.kda_decode(
        tuple(np.zeros((1, 3 * width), dtype) for _ in range(3)), np.zeros((1, 3, width), dtype),
        np.zeros((1, 3), dtype), np.zeros((1, 3, width), dtype),
        tuple(np.zeros((3 * width, 4), np.float32) for _ in range(3)), np.zeros(3, np.float32),
        np.zeros((3, width), np.float32), np.zeros(width, np.float32),
        np.zeros((1, 3, width, width), np.float32), np.zeros((3, 1, 3, 3 * width), dtype),
        lower_bound=-5.0, eps=EPS, **how,
    ),
}  # fmt: skip


@pytest.mark.parametrize("op", OPS)
def test_dispatch(op, caplog):
    """auto takes the kernel of the device, or the portable form with the reason in the log."""
    cases = [
        ("cpu", 128, np.float32, "xla (no kernel for cpu)"),
        ("TPU v5", 128, np.float32, "mosaic_tpu (for TPU v5)"),
        ("TPU7x", 16, np.float32, "xla (mosaic_tpu: K is 16, no multiple of 128 lanes)"),
        ("TPU v6 lite", 128, np.float16, "xla (mosaic_tpu: q is float16, not float32 or bfloat16)"),
        ("TPU v3", 128, np.float32, "xla (no kernel for TPU v3)"),
    ]
    with caplog.at_level(logging.DEBUG, logger="k3jax.ops.kda"):
        for device, width, dtype, message in cases:
            implementation = Implementation("mosaic_tpu", device=device, patches=interpreted)
            caplog.clear()
            with implementation.running():
                OPS[op](width, dtype)
            assert any(f"{op}: {message}" in m for m in caplog.messages), caplog.messages


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("device", "width", "dtype", "message"),
    [
        ("cpu", 128, np.float32, "mosaic_tpu does not run on cpu"),
        ("NVIDIA H200", 128, np.float32, "mosaic_tpu does not run on NVIDIA H200"),
        ("TPU v5", 64, np.float32, "mosaic_tpu cannot run: K is 64"),
        ("TPU v5", 128, np.float16, "mosaic_tpu cannot run: q is float16"),
    ],
)
def test_a_named_kernel_refuses(op, device, width, dtype, message):
    running = Implementation("mosaic_tpu", device=device, patches=interpreted).running()
    with running, pytest.raises(InputError, match=f"{op}: {message}"):
        OPS[op](width, dtype, implementation="mosaic_tpu")
