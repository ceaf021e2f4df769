"""The MXFP8 format: every code, the scale rule at its edges, both dtypes, a float64 form."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from k3jax.errors import InputError
from k3jax.quantization.mxfp8 import dequantize, quantize, round_trip, round_trip_numpy

quantized, dequantized, rounded = jax.jit(quantize), jax.jit(dequantize), jax.jit(round_trip)
CODES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
FINITE = CODES[~np.isnan(CODES.astype(np.float32))]  # 254 of them, -0 among them
ROWS = 64  # one shape for all tests of groups


def groups(*rows) -> np.ndarray:
    """float32 [ROWS, 32]: the given rows, each followed by zeros."""
    x = np.zeros((ROWS, 32), np.float32)
    for i, row in enumerate(rows):
        x[i, : len(row)] = row
    return x


def same(got, want):
    """The same numbers with the same signs, those of zeros too."""
    got, want = (np.asarray(a).astype(np.float32) for a in (got, want))
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(np.signbit(got), np.signbit(want))


def test_every_code_at_every_scale():
    """256 codes x 256 scale bytes against ml_dtypes, NaN and the ends of float32 included."""
    codes = np.broadcast_to(CODES.reshape(8, 1, 32), (8, 256, 32)).reshape(8, -1)
    scales = np.broadcast_to(np.arange(256, dtype=np.uint8), (8, 256))
    power = np.repeat(scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float64), 32, axis=1)
    want = codes.astype(np.float64) * power
    want = np.where(np.abs(want) < 2.0**-126, np.copysign(0.0, want), want)
    with np.errstate(over="ignore"):
        want = want.astype(np.float32)
    got = np.asarray(dequantized(jnp.asarray(codes), jnp.asarray(scales)))
    assert (np.isnan(got) == np.isnan(want)).all()
    same(np.nan_to_num(got, nan=1.0, posinf=np.inf), np.nan_to_num(want, nan=1.0, posinf=np.inf))


@pytest.mark.parametrize("exponent", [-42, -1, 0, 119])
def test_values_of_the_format_come_back(exponent):
    """A group with a 448 (or a 256, from which on the scale is the same) keeps all its codes."""
    x = np.full((ROWS, 32), 448.0, np.float32)
    x[np.arange(254) // 31, 1 + np.arange(254) % 31] = FINITE.astype(np.float32)
    x *= np.float32(2.0**exponent)
    codes, scales = map(np.asarray, quantized(jnp.asarray(x)))
    assert (scales == exponent + 127).all()
    got = codes[np.arange(254) // 31, 1 + np.arange(254) % 31]
    np.testing.assert_array_equal(got.view(np.uint8), FINITE.view(np.uint8))
    same(dequantized(codes, scales), x)
    same(rounded(jnp.asarray(x)), x)


def test_edges_of_the_scale():
    """amax / 448 a power of two: that power. One step of float32 more: the next; one less: not."""
    above, below = np.float32(448 * (1 + 2.0**-23)), np.float32(448 * (1 - 2.0**-24))
    powers = [-42, -41, -8, 0, 1, 119]
    rows = [[a * 2.0**p] for p in powers for a in (below, 448.0, above, 225.0, 224.0)]
    _, scales = quantized(jnp.asarray(groups(*rows)))
    want = [q for p in powers for q in (p, p, p + 1, p, max(p - 1, -42))]
    np.testing.assert_array_equal(np.asarray(scales)[: len(rows), 0], np.array(want) + 127)


def test_least_scale():
    """Zeros, subnormal numbers and all below 1e-10 have 2**-42, steps of 2**-51, signs of zeros."""
    rows = [[0.0, -0.0], [1e-10], [1e-12, -2e-16, 2.0**-52, -(2.0**-51), 3 * 2.0**-52], [1e-40]]
    x = groups(*rows)
    _, scales = quantized(jnp.asarray(x))
    assert (np.asarray(scales) == 127 - 42).all()
    want = x.copy()
    want[1, 0] = 448 * 2.0**-42  # 1e-10 is 439.8 steps; codes there are 416 and 448
    want[2, :5] = [1e-12, -0.0, 0.0, -(2.0**-51), 2.0**-50]  # ties to the even count
    want[2, 0] = 4.5 * 2.0**-42  # 1e-12 is 4.398; steps of .5
    want[3] = 0.0
    same(rounded(jnp.asarray(x)), want)


def test_ends_of_float32_and_what_is_no_number():
    largest = np.float32(1.9375 * 2.0**127)
    below = np.nextafter(largest, np.float32(0))
    x = groups([below], [largest], [np.nan, 1.0], [-np.inf, 1.0], [1.0])
    codes, scales = map(np.asarray, quantized(jnp.asarray(x)))
    assert scales[:5, 0].tolist() == [247, 247, 255, 255, 127 - 8]
    assert codes[:2, 0].astype(np.float32).tolist() == [240.0, 256.0]  # finite as they are stored
    got = np.asarray(rounded(jnp.asarray(x)))
    assert got[0, 0] == 240 * 2.0**120
    assert got[1, 0] == np.inf  # 256 * 2**120
    assert np.isnan(got[2:4]).all()  # the whole group, and it alone
    assert np.isnan(np.asarray(dequantized(codes, scales))[2:4]).all()
    same(got[4:], x[4:])


def drawn() -> np.ndarray:
    """Groups over 30 powers of two, values within a group over 30 more: subnormal codes too."""
    rng = np.random.default_rng(0)
    scale = 2.0 ** rng.uniform(-30, 30, (ROWS, 1)) * 2.0 ** rng.uniform(-30, 0, (ROWS, 32))
    return (rng.standard_normal((ROWS, 32)) * scale).astype(np.float32)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_against_the_rule_in_float64(dtype):
    x = jnp.asarray(drawn(), dtype)
    got = rounded(x)
    assert got.dtype == dtype
    same(got, round_trip_numpy(np.asarray(x)))
    codes, scales = quantized(x)
    same(dequantized(codes, scales), got)  # exact in either dtype
    wide = np.asarray(x).astype(np.float64)
    amax = np.maximum(np.abs(wide).max(axis=1), 1e-10)
    exponent = np.ceil(np.log2(amax / 448))
    np.testing.assert_array_equal(np.asarray(scales)[:, 0], exponent + 127)
    q = wide / 2.0 ** exponent[:, None]
    np.testing.assert_array_equal(  # ml_dtypes rounds too, to the nearest, ties to even
        np.asarray(codes).view(np.uint8), q.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    )
    largest = np.abs(np.asarray(codes).astype(np.float32)).max(axis=1)
    assert largest[exponent > -42].min() >= 224
    assert largest.max() == 448
    same(rounded(got), got)


def test_bfloat16_and_float32_agree():
    x = jnp.asarray(drawn(), jnp.bfloat16)
    same(rounded(x), rounded(x.astype(jnp.float32)))


def test_gradient_is_that_of_the_identity():
    x = jnp.asarray(drawn())
    c = jnp.arange(32, dtype=jnp.float32)
    got = jax.jit(jax.grad(lambda x: (round_trip(x) * c).sum()))(x)
    np.testing.assert_array_equal(got, np.broadcast_to(c, x.shape))


def test_width():
    with pytest.raises(InputError, match=r"\(2, 48\): the last axis is not a multiple of 32"):
        round_trip(jnp.ones((2, 48)))
