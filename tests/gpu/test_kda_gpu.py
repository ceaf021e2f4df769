"""KDA kernels on a Hopper GPU: `JAX_PLATFORMS=cuda,cpu python -m pytest tests/gpu`."""

import functools

import jax
import jax.numpy as jnp
import kda_cases
import numpy as np
import pytest
from kda_contract import (
    D,
    DecodeContract,
    GatedContract,
    Implementation,
    float64,
    padded,
    raw,
    runner,
    wide,
)

from k3jax.ops import kda as kda_op
from k3jax.ops import target
from k3jax.ops.kda import mosaic_gpu_chunked

pytestmark = pytest.mark.skipif(
    not target.is_hopper(jax.devices()[0].device_kind),
    reason="needs a Hopper GPU and JAX_PLATFORMS=cuda,cpu",
)
MOSAIC_GPU = Implementation("mosaic_gpu", jnp.bfloat16, (), output=2e-2, state=2e-2, step=4e-3)
L2 = 5e-3  # of outputs and states, relative; FlashKDA has 5.7e-3 and 5.0e-3


@pytest.fixture
def implementation():
    return MOSAIC_GPU


class TestGated(GatedContract):
    pass


class TestDecode(DecodeContract):
    pass


def l2(got, expected):
    return np.linalg.norm(wide(got) - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize("regime", ["random", "saturated", "slow_decay", "near_keys"])
def test_relative_l2(regime):
    inputs = raw(kda_cases.batch(30, 2, 512, 4, D, D, [regime]), jnp.bfloat16)
    got = runner(MOSAIC_GPU)(inputs)
    errors = [l2(a, b) for a, b in zip(got, float64(inputs), strict=True)]
    print(regime, errors)
    assert max(errors) <= L2


@pytest.mark.parametrize("stretches", [1, 2, 5])
def test_stretches(stretches):
    """A sequence cut for the second kernel gives what it gives whole, to its precision."""
    inputs = raw(kda_cases.batch(31, 1, 1000, 3, D, D, ["slow_decay"]), jnp.bfloat16)
    lengths = np.int32([990])
    run = functools.partial(mosaic_gpu_chunked.gated_kda, stretches=stretches)
    poisoned = padded(inputs, lengths, np.nan)
    o, state = jax.jit(lambda *x: run(*x, lengths, -5.0))(*poisoned)
    expected = float64(inputs, lengths)
    assert not np.asarray(o)[:, 990:].any()
    assert max(l2(a, b) for a, b in zip((o, state), expected, strict=True)) <= L2


def test_packed_sequences_are_those_run_alone():
    """Bit for bit, wherever a sequence stands and whatever the others hold."""
    lengths = [15, 85, 200, 0, 900, 1, 3]
    inputs = raw(kda_cases.batch(32, 1, sum(lengths), 2, D, D, ["random"]), jnp.bfloat16)
    states = np.random.default_rng(0).standard_normal((len(lengths), 2, D, D), np.float32)
    call = jax.jit(
        functools.partial(kda_op.gated_kda, lower_bound=-5.0, implementation="mosaic_gpu")
    )
    packed = functools.partial(call, packed_lengths_N=jnp.asarray(lengths, jnp.int32))
    o, new_states = packed(*inputs[:-1], states)
    end = np.cumsum(lengths)
    for n, length in enumerate(lengths):
        if not length:
            assert np.asarray(new_states)[n].tobytes() == states[n].tobytes()
            continue
        rows = slice(end[n] - length, end[n])
        alone_o, alone_state = call(
            *(x[:, rows] for x in inputs[:5]), *inputs[5:7], states[n : n + 1]
        )
        assert np.asarray(o)[0, rows].tobytes() == np.asarray(alone_o)[0].tobytes()
        assert np.asarray(new_states)[n].tobytes() == np.asarray(alone_state)[0].tobytes()


def test_passes(monkeypatch):
    """Long inputs take several passes: the same bits."""
    inputs = raw(kda_cases.batch(33, 2, 520, 2, D, D, ["random", "slow_decay"]), jnp.bfloat16)
    run = lambda: jax.jit(lambda *x: mosaic_gpu_chunked.gated_kda(*x, None, -5.0))(*inputs)  # noqa: E731
    whole = run()
    monkeypatch.setattr(mosaic_gpu_chunked, "PASS", 2 * 2 * 4)
    for a, b in zip(run(), whole, strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
