"""The short convolution: values, the tail carried between calls, and padding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.errors import InputError
from k3jax.ops.short_conv import short_conv
from k3jax.ops.short_conv.reference import short_conv as reference

CONV_FP32 = 1e-6  # relative to float64, measured 1.4e-7
CONV_BF16 = 4e-3  # one rounding to bfloat16 (2^-8), measured 2.0e-3
BATCH, CHANNELS, WIDTH = 3, 5, 4

run = jax.jit(short_conv)


def draw(length, seed=0, dtype=np.float32, width=WIDTH):
    rng = np.random.default_rng(seed)
    x_BTP = rng.standard_normal((BATCH, length, CHANNELS)).astype(np.float32)
    w_PW = rng.standard_normal((CHANNELS, width)).astype(np.float32)
    tail_BWP = rng.standard_normal((BATCH, width - 1, CHANNELS)).astype(np.float32)
    return jnp.asarray(x_BTP, dtype), w_PW, jnp.asarray(tail_BWP, dtype)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
@pytest.mark.parametrize("width", [1, 2, 4])
def test_matches_a_float64_loop(dtype, width):
    x_BTP, w_PW, tail_BWP = draw(7, dtype=dtype, width=width)
    y_BTP, new_tail_BWP = run(x_BTP, w_PW, tail_BWP)
    expected_BTP, expected_tail_BWP = reference(x_BTP, w_PW, tail_BWP)
    assert y_BTP.dtype == dtype
    assert new_tail_BWP.dtype == dtype
    assert new_tail_BWP.shape == (BATCH, width - 1, CHANNELS)
    limit = CONV_FP32 if dtype == np.float32 else CONV_BF16
    error = np.abs(np.asarray(y_BTP, np.float64) - expected_BTP).max()
    assert error <= limit * np.abs(expected_BTP).max()
    np.testing.assert_array_equal(np.asarray(new_tail_BWP, np.float64), expected_tail_BWP)


def test_the_last_tap_meets_the_current_token():
    x_BTP = jnp.arange(1, 5, dtype=jnp.float32).reshape(1, 4, 1)
    y_BTP, _ = run(x_BTP, np.array([[0, 0, 0, 1]], np.float32))
    np.testing.assert_array_equal(y_BTP, jax.nn.silu(x_BTP))


@pytest.mark.parametrize("prompt", [1, 2, 3, 4, 6])
def test_short_prompts_then_single_steps(prompt):
    x_BTP, w_PW, _ = draw(10)
    whole_BTP, whole_tail_BWP = run(x_BTP, w_PW)
    y_BTP, tail_BWP = run(x_BTP[:, :prompt], w_PW)
    outputs = [y_BTP]
    for t in range(prompt, 10):
        assert tail_BWP.shape == (BATCH, WIDTH - 1, CHANNELS)
        y_BTP, tail_BWP = run(x_BTP[:, t : t + 1], w_PW, tail_BWP)
        outputs.append(y_BTP)
    np.testing.assert_allclose(np.concatenate(outputs, axis=1), whole_BTP, rtol=0, atol=CONV_FP32)
    np.testing.assert_array_equal(tail_BWP, whole_tail_BWP)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_right_padding_equals_the_row_alone(dtype):
    """All lengths 0..T; the padding holds NaN."""
    length = 6
    x_TP, w_PW, tail_WP = (a[0] if a.ndim == 3 else a for a in draw(length, dtype=dtype))
    lengths_B = jnp.arange(length + 1, dtype=jnp.int32)
    padding_BT1 = jnp.arange(length)[None, :, None] >= lengths_B[:, None, None]
    x_BTP = jnp.where(padding_BT1, jnp.asarray(np.nan, dtype), x_TP[None])
    tail_BWP = jnp.broadcast_to(tail_WP, (length + 1, *tail_WP.shape)).at[:, 0, 0].set(-0.0)
    y_BTP, new_tail_BWP = run(x_BTP, w_PW, tail_BWP, lengths_B)
    for row, real in enumerate(range(length + 1)):
        np.testing.assert_array_equal(y_BTP[row, real:], 0)
        if real == 0:
            assert np.asarray(new_tail_BWP[row]).tobytes() == np.asarray(tail_BWP[row]).tobytes()
            continue
        alone_BTP, alone_tail_BWP = run(x_BTP[row : row + 1, :real], w_PW, tail_BWP[row : row + 1])
        np.testing.assert_array_equal(new_tail_BWP[row], alone_tail_BWP[0])
        limit = CONV_FP32 if dtype == np.float32 else CONV_BF16
        np.testing.assert_allclose(
            np.asarray(y_BTP[row, :real], np.float32),
            np.asarray(alone_BTP[0], np.float32),
            rtol=limit,
            atol=limit,
        )


def test_padding_reaches_no_gradient():
    x_BTP, w_PW, tail_BWP = draw(6)
    lengths_B = jnp.array([0, 2, 6], jnp.int32)
    padding_BT1 = jnp.arange(6)[None, :, None] >= lengths_B[:, None, None]
    x_BTP = jnp.where(padding_BT1, jnp.nan, x_BTP)

    def loss(x_BTP, w_PW, tail_BWP):
        y_BTP, new_tail_BWP = short_conv(x_BTP, w_PW, tail_BWP, lengths_B)
        return jnp.sum(y_BTP**2) + jnp.sum(new_tail_BWP**2)

    grads = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(x_BTP, w_PW, tail_BWP)
    assert all(np.isfinite(g).all() for g in grads)
    np.testing.assert_array_equal(np.where(padding_BT1, grads[0], 0), 0)


def test_lengths_past_the_end_are_clipped():
    x_BTP, w_PW, tail_BWP = draw(6)
    for length, same in ((9, 6), (-1, 0)):
        got = run(x_BTP, w_PW, tail_BWP, jnp.full(BATCH, length, jnp.int32))
        expected = run(x_BTP, w_PW, tail_BWP, jnp.full(BATCH, same, jnp.int32))
        jax.tree.map(np.testing.assert_array_equal, got, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x_BTP": np.zeros((3, 0, 5), np.float32)}, r"x is float32\[3, 0, 5\].*T = 0"),
        ({"x_BTP": np.zeros((3, 6, 5), np.int32)}, r"x is int32\[3, 6, 5\]"),
        ({"w_PW": np.zeros((4, 4), np.float32)}, r"w is float32\[4, 4\]"),
        ({"w_PW": np.zeros((5, 4), np.float16)}, r"w is float16\[5, 4\]"),
        ({"tail_BWP": np.zeros((3, 4, 5), np.float32)}, r"tail is float32\[3, 4, 5\]"),
        ({"tail_BWP": np.zeros((3, 3, 5), np.float16)}, r"tail is float16\[3, 3, 5\]"),
        ({"lengths_B": np.zeros(2, np.int32)}, r"lengths is int32\[2\]"),
    ],
)
def test_refuses_by_name(change, message):
    x_BTP, w_PW, tail_BWP = draw(6)
    with pytest.raises(InputError, match=message):
        short_conv(**{"x_BTP": x_BTP, "w_PW": w_PW, "tail_BWP": tail_BWP, **change})
