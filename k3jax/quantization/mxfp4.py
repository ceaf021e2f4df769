"""MXFP4: four-bit floats in groups of 32 along the input axis, one power-of-two scale a group.

A byte of ``codes`` holds two columns of a weight [out, in]: the low nibble is the even column, the
high nibble the odd one. Bit 3 of a code is the sign, the low bits count 0, .5, 1, 1.5, 2, 3, 4, 6.
A byte of ``scales`` is an E8M0 exponent: the group's weights are ``code * 2**(byte - 127)``.

Values at the two ends of the scale, the same in every function here and on every backend:

* a product below 2**-126, the smallest normal float32, is a zero of the same sign. Only codes
  .5, 1, 1.5 under byte 0 and .5 under byte 1 are concerned. CPUs and TPUs would flush these in
  the next multiplication anyway while GPUs would not; byte 0 with 2, 3, 4, 6 stays exact.
* a product of 2**128 or more (bytes 253 and 254) is infinite, as in float32.
* byte 255 is NaN for every code, and :func:`check_scales` refuses it.

Unpacking is exact in float32 and in bfloat16: two significant bits and an exponent of eight.

Source: OCP Microscaling Formats (MX) v1.0; the ``mxfp4-pack-quantized`` format of
compressed-tensors for the nibble order and the choice of scales.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from k3jax.errors import CheckpointError, InputError
from k3jax.quantization.e8m0 import GROUP, NAN, SMALLEST_NORMAL, scaled

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = np.array([*_MAGNITUDES, *(-m for m in _MAGNITUDES)], np.float32)
# One row a byte: a gather of pairs costs 0.4 ns a weight on a CPU core, half of what building the
# float's bits with shifts and selects takes.
_PAIRS = np.stack([_VALUES[np.arange(256) & 15], _VALUES[np.arange(256) >> 4]], axis=-1)
_LARGEST_BYTE = 252  # 6 * 2**125 is the largest finite product; one byte further 4 overflows


@dataclass(frozen=True)
class MXFP4:
    """A packed weight [..., out, in]; a pytree with two leaves.

    Attributes:
      codes: uint8 [..., out, in / 2].
      scales: uint8 [..., out, in / 32].
    """

    codes: jax.Array
    scales: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight, not of the bytes."""
        return (*self.codes.shape[:-1], 2 * self.codes.shape[-1])

    @property
    def ndim(self) -> int:
        return len(self.codes.shape)

    def unpack(self, dtype: DTypeLike = jnp.float32) -> jax.Array:
        """The weight [..., out, in] in ``dtype`` (float32 or bfloat16), exactly; see the module."""
        values = jnp.asarray(_PAIRS)[self.codes.astype(jnp.int32)]
        return self._scaled(values, GROUP).astype(dtype).reshape(self.shape)

    def halves(self, dtype: DTypeLike = jnp.float32) -> tuple[jax.Array, jax.Array]:
        """The even and the odd columns, two [..., out, in / 2], as exact as `unpack`.

        A contraction needs no interleaved weight: x @ W.T is the sum of the even columns of x times
        the one and the odd ones times the other. On a TPU, interleaving pads pairs to 128 lanes
        (5.6 GB for one expert of K3).
        """
        code = self.codes.astype(jnp.uint32)
        halves = (_float_bits(code & 15), _float_bits(code >> 4))
        shape = self.codes.shape
        even, odd = (self._scaled(h, GROUP // 2).astype(dtype).reshape(shape) for h in halves)
        return even, odd

    def _scaled(self, values: jax.Array, size: int) -> jax.Array:
        """float32 values times their scales, [..., out, groups, size]."""
        return scaled(values.reshape(*self.scales.shape, size), self.scales)

    def columns(self, part: int, parts: int) -> MXFP4:
        """Part ``part`` of ``parts`` equal cuts of the input axis, for a sharded contraction.

        Raises:
          InputError: a cut would pass through a group of 32. Of K3's 3,072 columns (96 groups) 64
            parts do, of its 3,584 (112 groups) 32 and 64 parts do.
        """
        groups = self.scales.shape[-1]
        if parts < 1 or groups % parts or not 0 <= part < parts:
            raise InputError(
                f"part {part} of {parts}: {self.shape[-1]} columns are {groups} groups of {GROUP}, "
                f"which {parts} parts do not divide"
            )
        size = groups // parts
        begin, end = part * size, (part + 1) * size
        bytes_per_group = GROUP // 2
        return MXFP4(
            self.codes[..., begin * bytes_per_group : end * bytes_per_group],
            self.scales[..., begin:end],
        )


def _float_bits(code: jax.Array) -> jax.Array:
    """float32 of uint32 codes 0..15, from its bits: a table is a slow gather on a TPU."""
    magnitude = code & 7
    normal = (((magnitude >> 1) + 126) << 23) | ((magnitude & 1) << 22)
    half = jnp.where(magnitude == 1, jnp.uint32(126 << 23), jnp.uint32(0))
    bits = jnp.where(magnitude >= 2, normal, half) | ((code >> 3) << 31)
    return lax.bitcast_convert_type(bits, jnp.float32)


jax.tree_util.register_dataclass(MXFP4, data_fields=["codes", "scales"], meta_fields=[])


def _check_width(shape: tuple[int, ...]) -> None:
    if not shape or shape[-1] % GROUP:
        raise InputError(f"a weight of shape {shape}: the last axis is not a multiple of {GROUP}")


def pack(w: jax.Array) -> MXFP4:
    """Quantises w [..., out, in] (float32 or bfloat16); can be traced.

    The scale of a group whose largest magnitude is ``m * 2**e``, 1 <= m < 2, is ``2**(E - 2)`` with
    E = e, or e + 1 if m >= 1.75; up to 6.99 * 2**(E - 2) is clipped to 6. Weights go to the nearest
    code, ties to the even one; a negative zero keeps code 8. ``pack(w.unpack())`` gives back every
    group that holds a 4 or a 6.

    Outside the usual range: a group of zeros has byte 0; numbers below 2**-126 count as zeros; the
    byte stops at 252, so a finite weight stays finite; a group with a NaN or an infinity has byte
    255, so it unpacks to NaN and is not hidden.

    Raises:
      InputError: the last axis is not a multiple of 32.

    Source: compressed-tensors' rule for MX scales.
    """
    _check_width(w.shape)
    bits = lax.bitcast_convert_type(w.astype(jnp.float32), jnp.uint32)
    bits = bits.reshape(*w.shape[:-1], w.shape[-1] // GROUP, GROUP)
    # Comparing bits, not floats: the order is the same and no backend's flushing matters.
    magnitude = bits & 0x7FFFFFFF
    magnitude = jnp.where(magnitude < (1 << 23), 0, magnitude)
    largest = magnitude.max(axis=-1)
    exponent = (largest + (1 << 21)) >> 23  # a quarter more carries from m = 1.75 on
    byte = jnp.clip(exponent.astype(jnp.int32) - 2, 0, _LARGEST_BYTE).astype(jnp.uint32)
    finite = largest < (255 << 23)

    inverse = lax.bitcast_convert_type((254 - byte) << 23, jnp.float32)
    x = lax.bitcast_convert_type(magnitude, jnp.float32) * inverse[..., None]
    # The middles between neighbours; >= where the upper code is the even one.
    above = [x > 0.25, x >= 0.75, x > 1.25, x >= 1.75, x > 2.5, x >= 3.5, x > 5.0]
    code = sum(a.astype(jnp.uint8) for a in above) | (bits >> 28).astype(jnp.uint8) & 8
    codes = code.reshape(*w.shape[:-1], w.shape[-1] // 2, 2)
    codes = codes[..., 0] | codes[..., 1] << 4
    return MXFP4(codes, jnp.where(finite, byte, NAN).astype(jnp.uint8))


@jax.custom_jvp
def fake_quantize(w: jax.Array) -> jax.Array:
    """``pack(w).unpack(w.dtype)`` whose gradient is that of the identity (straight-through).

    For quantisation-aware training: w [..., out, in] float32 or bfloat16, the same out.
    """
    return pack(w).unpack(w.dtype)


@fake_quantize.defjvp
def _fake_quantize_jvp(primals, tangents):
    return fake_quantize(*primals), tangents[0]


def _product_table() -> np.ndarray:
    """float32 [256, 16]: every scale byte with every code, computed in float64."""
    table = np.ldexp(_VALUES.astype(np.float64)[None], np.arange(256)[:, None] - 127)
    table = np.where(np.abs(table) < SMALLEST_NORMAL, np.copysign(0.0, table), table)
    table[NAN] = np.nan
    with np.errstate(over="ignore"):
        return table.astype(np.float32)


def unpack_numpy(codes: np.ndarray, scales: np.ndarray, dtype: DTypeLike = np.float32):
    """The table form of :meth:`MXFP4.unpack` in NumPy: codes, scales uint8 -> [..., out, in]."""
    nibbles = np.stack([codes & 15, codes >> 4], axis=-1).reshape(*scales.shape, GROUP)
    values = _product_table()[scales[..., None], nibbles]
    return values.reshape(*codes.shape[:-1], 2 * codes.shape[-1]).astype(dtype)


def check_scales(name: str, scales: np.ndarray) -> None:
    """Refuses the scale byte 255, which is NaN.

    Raises:
      CheckpointError: with one problem, naming the tensor, the count and the first positions.
    """
    where = np.argwhere(np.asarray(scales) == NAN)
    if len(where):
        shown = ", ".join(str(tuple(int(i) for i in p)) for p in where[:4])
        more = f" and {len(where) - 4} more" if len(where) > 4 else ""
        raise CheckpointError(name, [f"{name}: scale byte 255 (NaN) at {shown}{more}"])


def root_mean_square(codes: np.ndarray, scales: np.ndarray) -> float:
    """The root mean square of a packed weight, without unpacking it (NumPy, one pass of the bytes).

    A scale read with another bias or as a plain number shows here: trained experts are near 1e-2.
    """
    squares = (_PAIRS.astype(np.float64) ** 2).sum(axis=-1)[codes]
    squares = squares.reshape(*scales.shape, GROUP // 2).sum(axis=-1)
    powers = np.ldexp(1.0, 2 * (scales.astype(np.int64) - 127))
    return float(np.sqrt((squares * powers).mean() / GROUP))
