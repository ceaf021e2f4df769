"""Kimi Delta Attention: dispatch, refusals, the decay gate and the L2 norm."""

import logging

import jax
import jax.numpy as jnp
import kda_cases
import numpy as np
import pytest

from k3jax.errors import InputError
from k3jax.ops import kda as kda_op
from k3jax.ops.kda import reference

KDA_FP32 = 1e-5  # see test_kda.py
KDA_BF16 = 4e-3  # one rounding of the output (2^-8), measured 3.5e-3


def test_auto_and_absent_state(caplog):
    inputs = kda_cases.batch(13, 15, 2, 1, 8, 12)
    with caplog.at_level(logging.DEBUG, logger="k3jax.ops.kda"):
        for length, name in ((1, "recurrent"), (2, "chunked")):
            tokens = [x[:, :length] for x in inputs[:5]]
            got = kda_op.kda(*tokens)
            expected = kda_cases.float64([*tokens, np.zeros_like(inputs[5])])
            for a, b in zip(got, expected, strict=True):
                assert (kda_cases.errors_by_row(a, b) <= KDA_FP32).all()
            assert f"kda: {name} for {length} tokens" in caplog.messages


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k_BTHK": np.zeros((2, 0, 3, 4), np.float32)}, r"k is float32\[2, 0, 3, 4\].*T = 0"),
        ({"q_BTHK": np.zeros((2, 5, 3, 6), np.float32)}, r"q is float32\[2, 5, 3, 6\]"),
        ({"q_BTHK": np.zeros((2, 5, 3, 4), np.int32)}, r"q is int32"),
        ({"v_BTHV": np.zeros((2, 4, 3, 6), np.float32)}, r"v is float32\[2, 4, 3, 6\]"),
        ({"g_BTHK": np.zeros((2, 5, 3, 4), np.float16)}, r"g is float16"),
        ({"g_BTHK": np.zeros((2, 5, 3), np.float32)}, r"g is float32\[2, 5, 3\]"),
        ({"beta_BTH": np.zeros((2, 5, 3, 1), np.float32)}, r"beta is float32\[2, 5, 3, 1\]"),
        (
            {"state_BHVK": np.zeros((2, 3, 4, 6), np.float32)},
            r"state is .*expected.*\[2, 3, 6, 4\]",
        ),
        ({"state_BHVK": np.zeros((2, 3, 6, 4), np.float16)}, r"state is float16"),
        ({"valid_BT": np.zeros((2, 5), np.int32)}, r"valid is int32"),
        ({"implementation": "fast"}, r"'fast' is not one of auto, recurrent, chunked"),
    ],
)
def test_refuses_by_name(change, message):
    good = {
        "q_BTHK": np.zeros((2, 5, 3, 4), np.float32),
        "k_BTHK": np.zeros((2, 5, 3, 4), np.float32),
        "v_BTHV": np.zeros((2, 5, 3, 6), np.float32),
        "g_BTHK": np.zeros((2, 5, 3, 4), np.float32),
        "beta_BTH": np.zeros((2, 5, 3), np.float32),
    }
    with pytest.raises(InputError, match=message):
        kda_op.kda(**{**good, **change})


@pytest.mark.parametrize("bound", [-5.0, -5.9, -6.0, -20.0, None])
def test_decay(bound):
    rng = np.random.default_rng(11)
    z = rng.standard_normal((2, 9, 3, 8)).astype(np.float32) * 4
    z[0, 0], z[0, 1] = 1e4, -1e4
    A_log = np.log(rng.uniform(1, 16, 3)).astype(np.float32)
    dt_bias = rng.standard_normal((3, 8)).astype(np.float32)
    got = jax.jit(kda_op.decay, static_argnums=3)(z, A_log, dt_bias, bound)
    expected = reference.decay(*[x.astype(np.float64) for x in (z, A_log, dt_bias)], bound)
    assert got.dtype == jnp.float32
    assert (np.asarray(got) <= 0).all()
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    if bound is not None:
        assert np.asarray(got).min() == bound
    narrow = kda_op.decay(jnp.asarray(z, jnp.bfloat16), A_log, dt_bias, bound)
    assert narrow.dtype == jnp.float32


def test_decay_refuses():
    z, A_log, dt_bias = (np.zeros(s, np.float32) for s in ((1, 2, 3, 4), (3,), (3, 4)))
    with pytest.raises(InputError, match=r"lower_bound is 5"):
        kda_op.decay(z, A_log, dt_bias, 5.0)
    with pytest.raises(InputError, match=r"A_log is float32\[4\]"):
        kda_op.decay(z, np.zeros(4, np.float32), dt_bias, -5.0)
    with pytest.raises(InputError, match=r"dt_bias is float32\[12\]"):
        kda_op.decay(z, A_log, np.zeros(12, np.float32), -5.0)


def test_l2norm():
    x = np.random.default_rng(12).standard_normal((4, 5, 8)).astype(np.float32)
    x[0], x[1] = 0, 1e-4 * x[1]
    np.testing.assert_allclose(kda_op.l2norm(x), reference.l2norm(x.astype(np.float64)), rtol=1e-6)
    assert kda_op.l2norm(jnp.asarray(x, jnp.bfloat16)).dtype == jnp.float32


def test_bfloat16_inputs():
    inputs = kda_cases.batch(14, 15, 65, 2, 16, 24)
    narrow = [jnp.asarray(x, jnp.bfloat16) for x in inputs[:3]]
    o, state = jax.jit(kda_op.kda)(*narrow, *inputs[3:])
    assert o.dtype == jnp.bfloat16
    assert state.dtype == jnp.float32
    expected = kda_cases.float64([*narrow, *inputs[3:]])
    assert (kda_cases.errors_by_row(o, expected[0]) <= KDA_BF16).all()
    assert (kda_cases.errors_by_row(state, expected[1]) <= KDA_FP32).all()
