"""`kda_decode` at the head size of the kernels, and the choice of implementations of both ops."""

import logging

import jax
import jax.numpy as jnp
import kda_cases
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from kda_contract import DecodeContract
from kda_kernels import (
    EPS,
    IMPLEMENTATIONS,
    D,
    Implementation,
    decode_inputs,
    interpreted,
    raw,
    wide,
)

from k3jax.errors import InputError
from k3jax.ops import kda as kda_op
from k3jax.ops.kda import mosaic_tpu_chunked, mosaic_tpu_decode


@pytest.fixture(params=IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS.keys())
def implementation(request):
    return request.param


class TestDecode(DecodeContract):
    pass


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
