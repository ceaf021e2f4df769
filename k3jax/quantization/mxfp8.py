"""MXFP8: values of float8_e4m3fn in groups of 32 along the last axis, a power of two a group.

What the routed experts of Kimi K3 read when it is served with 8-bit activations: their input z and
the activation between their products. The rule of the serving engines for a group:

    scale = 2**e,  e = ceil(log2(max(amax, 1e-10) / 448)),  code = round_to_nearest_even(x / scale)

so the largest code of a group is 224 to 448, and nothing is ever clamped. The least exponent
is -42 (amax up to 1.75 * 2**-34), which also is that of a group of zeros.

All of it is integer arithmetic on the bits of float32, so every backend gives the same codes. Every
value has four significant bits: it is exact in bfloat16, which makes `round_trip` the whole of what
a product needs. At the ends: a group with a NaN or an infinity is NaN as a whole (scale byte 255),
as in `mxfp4.pack`; a magnitude of 1.9375 * 2**127 or more becomes infinite, since its code's value
is 2**128; and a zero keeps its sign.

Why the products are bfloat16's on Hopper. The tensor cores there know no block scales. A product of
depth 32 would have to be scaled in registers by (scale of the weight) * (scale of the activation)
before it may be added to the next: N / 2 float32 multiply-adds a thread for each 64 x N x 32
product. At N = 96 these are 96 clocks of a multiprocessor's float32 units beside 24 of its tensor
cores, where the same product of bfloat16 is 48 clocks in all. Values go through bfloat16 exactly:
that is the faster form, and it has the same result.

Source: the MXFP8 rule of the public serving engines; OCP Microscaling Formats (MX) v1.0.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from k3jax.errors import InputError
from k3jax.quantization import fp8
from k3jax.quantization.e8m0 import GROUP, NAN, scaled

LEAST_EXPONENT = -42  # ceil(log2(1e-10 / 448))
_LEAST_AMAX = 1e-10
_ABOVE_448 = 0x600000  # the fraction bits of 448 = 1.75 * 2**8


class _Rounded(NamedTuple):
    """Codes as numbers: ``count * 2**(place - 3) * 2**exponent``, place from -6 on.

    Arrays have the shape of x, those of groups one that broadcasts to it.
    """

    sign: jax.Array  # uint32, bit 31
    count: jax.Array  # uint32: 8..16, or 0..8 where place is -6
    place: jax.Array  # int32: the power of two of the code, -6 for subnormal ones
    exponent: jax.Array  # int32 of the scale
    finite: jax.Array  # bool, of the group


def magnitudes(x: jax.Array) -> jax.Array:
    """The bits of float32 x without their signs: int32 in the order of magnitudes, NaN last."""
    return lax.bitcast_convert_type(x, jnp.int32) & 0x7FFFFFFF


def _groups(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(x float32 [..., groups, 32], the largest magnitude of each group [..., groups, 1])."""
    if not x.shape or x.shape[-1] % GROUP:
        raise InputError(f"MXFP8 of shape {x.shape}: the last axis is not a multiple of {GROUP}")
    if x.dtype not in (jnp.float32, jnp.bfloat16):
        raise InputError(f"MXFP8 of {x.dtype}, not float32 or bfloat16")
    x = x.astype(jnp.float32).reshape(*x.shape[:-1], x.shape[-1] // GROUP, GROUP)
    return x, magnitudes(x).max(axis=-1, keepdims=True)


def _round(x: jax.Array, largest: jax.Array) -> _Rounded:
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    magnitude = bits & 0x7FFFFFFF
    # amax / 448 = m / 1.75 * 2**(power - 8): past m = 1.75 the logarithm is rounded up once more.
    power = (largest >> 23) - 127
    exponent = power - 8 + ((largest & 0x7FFFFF) > _ABOVE_448).astype(jnp.int32)
    exponent = jnp.maximum(exponent, LEAST_EXPONENT)

    # x is mantissa * 2**(power - 23), a code counts steps of 2**(place - 3): the rest is dropped.
    # No subnormal x comes near half a step of the least scale, so its mantissa does not matter.
    power = (magnitude >> 23).astype(jnp.int32) - 127
    mantissa = (magnitude & 0x7FFFFF) | 0x800000
    place = jnp.maximum(power - exponent, -6)
    drop = jnp.minimum(place - (power - exponent) + 20, 25).astype(jnp.uint32)
    half = (jnp.uint32(1) << (drop - 1)) - 1 + ((mantissa >> drop) & 1)  # ties to the even count
    count = (mantissa + half) >> drop
    return _Rounded((bits >> 31) << 31, count, place, exponent, largest < (255 << 23))


def quantize(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x [..., K] (float32 or bfloat16) as (codes [..., K] float8_e4m3fn, scales [..., K / 32]).

    Scales are uint8, E8M0: ``2**(byte - 127)``. See the module for the rule and its ends.

    Raises:
      InputError: K is not a multiple of 32.
    """
    r = _round(*_groups(x))
    code = ((r.place + 6).astype(jnp.uint32) << 3) + r.count  # a count of 16 carries by itself
    code = jnp.where(r.finite, code | r.sign >> 24, 0x7F).astype(jnp.uint8)
    scales = jnp.where(r.finite, r.exponent + 127, NAN).astype(jnp.uint8)[..., 0]
    return lax.bitcast_convert_type(code.reshape(x.shape), fp8.DTYPE), scales


def dequantize(codes: jax.Array, scales: jax.Array, dtype: DTypeLike = jnp.float32) -> jax.Array:
    """Values [..., K] in ``dtype`` (float32 or bfloat16), exactly.

    For any scale byte: a product below 2**-126 is zero, one of 2**128 or more is infinite, and 255
    is NaN, as with :class:`k3jax.quantization.mxfp4.MXFP4`.

    Raises:
      InputError: shapes that do not fit.
    """
    if codes.shape != (*scales.shape[:-1], scales.shape[-1] * GROUP):
        raise InputError(f"MXFP8: codes {codes.shape} and scales {scales.shape} do not fit")
    values = codes.astype(jnp.float32).reshape(*scales.shape, GROUP)
    return scaled(values, scales).reshape(codes.shape).astype(dtype)


@jax.custom_jvp
def round_trip(x: jax.Array) -> jax.Array:
    """``dequantize(*quantize(x), x.dtype)``: x [..., K], float32 or bfloat16, the same out.

    Its gradient is that of the identity (straight-through).

    Raises:
      InputError: K is not a multiple of 32.
    """
    return round_within(*_groups(x)).reshape(x.shape).astype(x.dtype)


def round_within(x: jax.Array, largest: jax.Array) -> jax.Array:
    """`round_trip` of float32 x, where ``largest`` is the greatest of the `magnitudes` of the group
    of each entry. A kernel has its groups in another order."""
    r = _round(x, largest)
    step = lax.bitcast_convert_type((r.place - 3 + r.exponent + 127) << 23, jnp.float32)
    value = jnp.where(r.finite, r.count.astype(jnp.int32).astype(jnp.float32) * step, jnp.nan)
    value = lax.bitcast_convert_type(value, jnp.uint32) | r.sign
    return lax.bitcast_convert_type(value, jnp.float32)


@round_trip.defjvp
def _round_trip_jvp(primals, tangents):
    return round_trip(*primals), tangents[0]


def round_trip_numpy(x: np.ndarray) -> np.ndarray:
    """The rule as it is written, in float64 NumPy, for finite x [..., K]; float64 out."""
    x = np.asarray(x).astype(np.float64)
    groups = x.reshape(*x.shape[:-1], -1, GROUP)
    largest = np.maximum(np.abs(groups).max(axis=-1, keepdims=True), _LEAST_AMAX)
    fraction, power = np.frexp(largest / fp8.LARGEST)  # fraction in [0.5, 1)
    scale = np.ldexp(1.0, power - (fraction == 0.5))  # 2**ceil(log2(largest / 448))
    q = groups / scale
    place = np.maximum(np.frexp(q)[1] - 1, -6)  # floor(log2 |q|)
    step = np.ldexp(1.0, place - 3)
    return (np.round(q / step) * step * scale).reshape(x.shape)  # np.round: ties to even
