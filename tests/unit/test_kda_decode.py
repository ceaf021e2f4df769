"""`kda_decode` at the head size of the kernels, and the choice of implementations of both ops."""

import functools
import logging
from unittest import mock

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
    decode_inputs,
    raw,
    wide,
)

from k3jax.errors import InputError
from k3jax.ops import kda as kda_op
from k3jax.ops import target
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
    "gated_kda": lambda width, dtype, bound=-5.0, **how: kda_op.gated_kda(
        *(np.zeros((1, 2, 3, width), dtype) for _ in range(4)), np.zeros((1, 2, 3), dtype),
        np.zeros(3, np.float32), np.zeros((3, width), np.float32), lower_bound=bound, **how,
    ),
    "kda_decode": lambda width, dtype, bound=-5.0, **how: kda_op.kda_decode(
        tuple(np.zeros((1, 3 * width), dtype) for _ in range(3)), np.zeros((1, 3, width), dtype),
        np.zeros((1, 3), dtype), np.zeros((1, 3, width), dtype),
        tuple(np.zeros((3 * width, 4), np.float32) for _ in range(3)), np.zeros(3, np.float32),
        np.zeros((3, width), np.float32), np.zeros(width, np.float32),
        np.zeros((1, 3, width, width), np.float32), np.zeros((3, 1, 3, 3 * width), dtype),
        lower_bound=bound, eps=EPS, **how,
    ),
}  # fmt: skip


HOPPER, A100 = "NVIDIA H200", "NVIDIA A100-SXM4-80GB"
BF16, F32, F16 = jnp.bfloat16, np.float32, np.float16
CHOICES = [
    ("cpu", 128, F32, -5.0, "xla (no kernel for cpu)"),
    ("TPU v5", 128, F32, -5.0, "mosaic_tpu (for TPU v5)"),
    ("TPU7x", 16, F32, -5.0, "xla (mosaic_tpu: K is 16, no multiple of 128 lanes)"),
    ("TPU v6 lite", 128, F16, -5.0, "xla (mosaic_tpu: q is float16, not float32 or bfloat16)"),
    ("TPU v3", 128, F32, -5.0, "xla (no kernel for TPU v3)"),
    (HOPPER, 128, BF16, -5.0, f"mosaic_gpu (for {HOPPER})"),
    ("NVIDIA H100 80GB HBM3", 128, BF16, -1.0, "mosaic_gpu (for NVIDIA H100 80GB HBM3)"),
    (HOPPER, 64, BF16, -5.0, "xla (mosaic_gpu: K = 64, V = 64, not 128)"),
    (A100, 128, BF16, -5.0, f"xla (no kernel for {A100})"),
]
TOO_LOW = "decays of 16 rows below -5.0 overflow)"
CHOICES_OF = {
    "gated_kda": [
        (HOPPER, 128, F32, -5.0, "xla (mosaic_gpu: q is float32, not bfloat16)"),
        (HOPPER, 128, BF16, -6.0, f"xla (mosaic_gpu: lower bound -6.0: {TOO_LOW}"),
        (HOPPER, 128, BF16, None, f"xla (mosaic_gpu: lower bound None: {TOO_LOW}"),
    ],
    "kda_decode": [
        (HOPPER, 128, F32, -6.0, f"mosaic_gpu (for {HOPPER})"),
        (HOPPER, 128, F16, -5.0, "xla (mosaic_gpu: q is float16, not bfloat16 or float32)"),
        (HOPPER, 128, BF16, None, "xla (mosaic_gpu: the gate has no lower bound)"),
    ],
}


@pytest.mark.parametrize("op", OPS)
def test_dispatch(op, caplog):
    """auto takes the kernel of the device, or the portable form with the reason in the log."""
    with caplog.at_level(logging.DEBUG, logger="k3jax.ops.kda"):
        for device, width, dtype, bound, message in CHOICES + CHOICES_OF[op]:
            caplog.clear()
            with mock.patch.object(target, "device_kind", return_value=device):
                jax.eval_shape(functools.partial(OPS[op], width, dtype, bound))
            assert any(f"{op}: {message}" in m for m in caplog.messages), caplog.messages


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("device", "width", "dtype", "bound", "message"),
    [
        ("cpu", 128, F32, -5.0, "mosaic_tpu does not run on cpu"),
        (HOPPER, 128, F32, -5.0, "mosaic_tpu does not run on NVIDIA H200"),
        ("TPU v5", 64, F32, -5.0, "mosaic_tpu cannot run: K is 64"),
        ("TPU v5", 128, F16, -5.0, "mosaic_tpu cannot run: q is float16"),
        ("cpu", 128, BF16, -5.0, "mosaic_gpu does not run on cpu"),
        ("TPU v5", 128, BF16, -5.0, "mosaic_gpu does not run on TPU v5"),
        (A100, 128, BF16, -5.0, "mosaic_gpu does not run on NVIDIA A100"),
        (HOPPER, 64, BF16, -5.0, "mosaic_gpu cannot run: K = 64, V = 64, not 128"),
        (HOPPER, 128, F16, -5.0, "mosaic_gpu cannot run: q is float16, not bfloat16"),
        (HOPPER, 128, BF16, None, "mosaic_gpu cannot run: .*lower bound"),
    ],
)
def test_a_named_kernel_refuses(op, device, width, dtype, bound, message):
    name = message.split()[0]
    running = mock.patch.object(target, "device_kind", return_value=device)
    with running, pytest.raises(InputError, match=f"{op}: {message}"):
        OPS[op](width, dtype, bound, implementation=name)


def test_the_prefill_kernel_of_gpus_refuses():
    """What its products of 16-bit numbers cannot hold, and the decode kernel takes."""
    with mock.patch.object(target, "device_kind", return_value=HOPPER):
        for dtype, bound, message in ((F32, -5.0, "q is float32"), (BF16, -6.0, "bound -6.0")):
            with pytest.raises(InputError, match=f"gated_kda: mosaic_gpu cannot run: .*{message}"):
                OPS["gated_kda"](128, dtype, bound, implementation="mosaic_gpu")


def inputs_of(op):
    """Small inputs with K = 4 and V = 6; a step has K = V = 4, as its tails are of one width."""
    f32 = lambda *shape: np.zeros(shape, np.float32)  # noqa: E731
    gates = {"A_log_H": f32(3), "dt_bias_HK": f32(3, 4), "lower_bound": -5.0}
    if op == "gated_kda":
        tokens = {x: f32(2, 5, 3, 4) for x in ("q_BTHK", "k_BTHK", "z_BTHK")}
        return {**tokens, "v_BTHV": f32(2, 5, 3, 6), "b_BTH": f32(2, 5, 3), **gates}
    return {
        "qkv_3BP": (f32(2, 12),) * 3, "z_BHK": f32(2, 3, 4), "b_BH": f32(2, 3),
        "gate_BHV": f32(2, 3, 4), "conv_3PW": (f32(12, 4),) * 3, "norm_V": f32(4),
        "state_BHVK": f32(2, 3, 4, 4), "tails_3BWP": f32(3, 2, 3, 12), "eps": EPS, **gates,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("op", "name", "shape", "dtype", "message"),
    [
        ("gated_kda", "k_BTHK", (2, 0, 3, 4), F32, r"k is float32\[2, 0, 3, 4\].*T = 0"),
        ("gated_kda", "k_BTHK", (2, 5, 3), F32, r"k is float32\[2, 5, 3\], expected floating"),
        ("gated_kda", "q_BTHK", (2, 5, 3, 4), np.int32, r"q is int32"),
        ("gated_kda", "q_BTHK", (2, 6, 3, 4), F32, r"q is .*expected float32\[2, 5, 3, 4\]"),
        ("gated_kda", "z_BTHK", (2, 5, 3, 6), F32, r"z is .*expected float32\[2, 5, 3, 4\]"),
        ("gated_kda", "v_BTHV", (2, 5, 2, 6), F32, r"v is .*expected float32\[2, 5, 3, 6\]"),
        ("gated_kda", "b_BTH", (2, 5, 3, 1), F32, r"b is .*expected float32\[2, 5, 3\]"),
        ("gated_kda", "A_log_H", (3,), F16, r"A_log is float16\[3\]"),
        ("gated_kda", "dt_bias_HK", (12,), F32, r"dt_bias is float32\[12\]"),
        ("gated_kda", "state_BHVK", (2, 3, 4, 6), F32, r"state is .*expected.*\[2, 3, 6, 4\]"),
        ("gated_kda", "state_BHVK", (2, 3, 6, 4), F16, r"state is float16"),
        ("gated_kda", "lengths_B", (3,), np.int32, r"lengths is int32\[3\], expected int32\[2\]"),
        ("gated_kda", "lengths_B", (2,), F32, r"lengths is float32\[2\], expected int32\[2\]"),
        ("kda_decode", "z_BHK", (2, 12), F32, r"z is float32\[2, 12\], expected floating"),
        ("kda_decode", "b_BH", (2, 4), F32, r"b is .*expected float32\[2, 3\]"),
        ("kda_decode", "gate_BHV", (1, 3, 4), F32, r"gate is .*expected float32\[2, 3, 4\]"),
        ("kda_decode", "norm_V", (3, 4), F32, r"norm is .*expected float32\[4\]"),
        ("kda_decode", "A_log_H", (3,), F16, r"A_log is float16\[3\]"),
        ("kda_decode", "dt_bias_HK", (12,), F32, r"dt_bias is float32\[12\]"),
        ("kda_decode", "state_BHVK", (3, 2, 4, 4), F32, r"state is .*expected.*\[2, 3, 4, 4\]"),
        ("kda_decode", "state_BHVK", (2, 3, 4, 4), F16, r"state is float16"),
        ("kda_decode", "tails_3BWP", (3, 2, 4, 12), F32, r"tails is .*expected.*\[3, 2, 3, 12\]"),
        ("kda_decode", "tails_3BWP", (3, 2, 3, 12), F16, r"tails is float16.*expected float32"),
        ("kda_decode", "valid_B", (2,), np.int32, r"valid is int32\[2\], expected bool\[2\]"),
        ("kda_decode", "slot", (), np.int32, r"state is .*expected float32\[2, 2, 3, 4, 4\]"),
    ],
)  # fmt: skip
def test_refuses_by_name(op, name, shape, dtype, message):
    changed = {**inputs_of(op), name: np.zeros(shape, dtype)}
    with pytest.raises(InputError, match=f"{op}: {message}"):
        getattr(kda_op, op)(**changed)


@pytest.mark.parametrize("op", OPS)
def test_inputs_that_fit(op):
    """Those that the refusals above change."""
    jax.eval_shape(functools.partial(getattr(kda_op, op), **inputs_of(op)))


@pytest.mark.parametrize("what", ["qkv_3BP", "conv_3PW"])
@pytest.mark.parametrize(("part", "name"), [(0, "q"), (1, "k"), (2, "v")])
def test_refuses_a_part_by_name(what, part, name):
    good = inputs_of("kda_decode")
    parts = [*good[what]]
    parts[part] = parts[part][:1]
    message = f"{name} is" if what == "qkv_3BP" else f"conv of {name} is"
    with pytest.raises(InputError, match=f"kda_decode: {message}"):
        kda_op.kda_decode(**{**good, what: tuple(parts)})


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("bound", [0.0, 5.0, float("nan")])
def test_refuses_a_bound_that_is_not_negative(op, bound):
    """On a GPU too, before its kernel is asked."""
    running = mock.patch.object(target, "device_kind", return_value=HOPPER)
    with running, pytest.raises(InputError, match=f"{op}: lower_bound is {bound}, expected a neg"):
        OPS[op](128, BF16, bound)
