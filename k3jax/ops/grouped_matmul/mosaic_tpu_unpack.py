"""MXFP4 blocks in VMEM to pairs of bfloat16 in 32-bit words, for the Mosaic TPU kernels.

* Unpacking is integer arithmetic on words, two bfloat16 at a time (`_floats`). A byte has an even
  and an odd column, a word the bytes of four rows.
* A TPU7x converts codes itself (`_float4_pairs`). That puts a row of even and one of odd columns in
  the halves of a word, and a store and strided loads part them.
* Scales of a row are one byte a group. A lane gather spreads them over the 16 bytes of a group, and
  they are added to exponents (a TPU7x multiplies). A block with a byte below 2 or above 252,
  where a product can leave the normal numbers, takes `_extreme_floats`, which gives the values of
  `k3jax.quantization.mxfp4`.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from k3jax.ops import target
from k3jax.ops.mosaic_tpu import LANES, SUBLANES
from k3jax.quantization.mxfp4 import GROUP, MXFP4

ALTERNATE, NEIGHBOURS = ((0, 2), (1, 3)), ((0, 1), (2, 3))  # rows that share a word
FLOAT4 = ("TPU7x",)  # kinds that convert float4_e2m1fn; Mosaic refuses it for v5p and v6e


def _both(half: int):
    """The same 16 bits in both halves of a 32-bit word."""
    return jnp.uint32(half << 16 | half)


def _floats(codes, exponents):
    """Two bfloat16 a word, of codes in bits 0..3 of its halves; other bits are not read.

    A code with magnitude bits m is ``2**(m // 2 - 1)`` times 1 or 1.5, but .5 at m = 1 and 0 at 0.
    ``exponents`` are ``(byte << 7) - 0xC0`` of the scale bytes: with 1 added to m from 2 on, bit 7
    is the unit of the exponent. No half carries into the other for bytes 2..252.
    """
    m = codes & _both(7)
    from_one = ((m + _both(7)) >> 3) & _both(1)
    from_two = ((m + _both(6)) >> 3) & _both(1)
    bits = ((m + from_two) << 6) + exponents
    return (bits & ((from_one << 16) - from_one)) | ((codes << 12) & _both(0x8000))


def _extreme_floats(codes, scale_bytes):
    """`_floats` for any scale bytes, one in each half of a word."""
    plain = _floats(codes, _both((127 << 7) - 0xC0))
    out = jnp.zeros_like(plain)
    for shift in (0, 16):
        value = lax.bitcast_convert_type((plain >> shift) << 16, jnp.float32)
        byte = (scale_bytes >> shift) & jnp.uint32(0xFFFF)
        # 2**-127 is not a normal float32: two products, as in `MXFP4`.
        exponent = jnp.where(byte == 0, jnp.uint32(1), byte) << 23
        rest = jnp.where(byte == 0, 0.5, jnp.where(byte == 255, jnp.nan, 1.0))
        value = value * lax.bitcast_convert_type(exponent, jnp.float32) * rest
        value = jnp.where(jnp.abs(value) < 2.0**-126, value * 0.0, value)
        out = out | (lax.bitcast_convert_type(value, jnp.uint32) >> 16) << shift
    return out


def _spread(bytes_RL, width: int):
    """[R, width]: each group's entry, of up to LANES, in the lanes of its bytes."""
    group_RL = lax.broadcasted_iota(jnp.int32, bytes_RL.shape, 1) // (GROUP // 2)
    per_tile = 2 * LANES // GROUP
    parts = [
        jnp.take_along_axis(bytes_RL, group_RL + i * per_tile, axis=1, mode="promise_in_bounds")
        for i in range(width // LANES)
    ]
    return jnp.concatenate(parts, axis=1)


def _code_pairs(codes_ref, at, float4_ref):
    """(a, b, odd) -> words with codes of the even or odd columns of rows a and b of each four."""
    del float4_ref
    words = pltpu.bitcast(codes_ref[at], jnp.uint32)

    def pair(a, b, odd):
        # Bytes a and b of a word to the low bits of its halves.
        low = words >> 8 * a
        if b == a + 1:
            low = low & jnp.uint32(0xFFFF)
            low = low | low << 8
        return (low & _both(0xFF)) >> 4 * odd

    return pair


def _float4_pairs(codes_ref, at, float4_ref):
    """`_code_pairs` as bfloat16 values, by the chip's own conversion.

    It gives a row of even and one of odd columns in turn, which are the halves of one word. Rows a
    and b come together by a store and loads with a stride.
    """
    float4 = pltpu.bitcast(codes_ref[at], jnp.float4_e2m1fn)
    words = pltpu.bitcast(float4.astype(jnp.bfloat16), jnp.uint32)
    columns = range(float4_ref.shape[0])
    for c in columns:
        float4_ref[c] = words[:, c * LANES : (c + 1) * LANES]

    def row(r):
        every = pl.ds(r, SUBLANES, stride=4)
        return jnp.concatenate([float4_ref.at[c][every] for c in columns], axis=1)

    def pair(a, b, odd):
        low, high = row(a), row(b)
        if odd:
            return low >> 16 | high & jnp.uint32(0xFFFF0000)
        return low & jnp.uint32(0xFFFF) | high << 16

    return pair


def _product_floats(values, powers):
    """bfloat16 values times bfloat16 powers of two, two a word."""
    both = (pltpu.bitcast(x, jnp.bfloat16) for x in (values, powers))
    return pltpu.bitcast(jnp.multiply(*both), jnp.uint32)


def unpack(codes_ref, scales_ref, lanes_ref, float4_ref, pairs, store):
    """Unpacks a block [O, width / 2], whose scales are [groups, O].

    Args:
      lanes_ref: for scales as words, a row of weights each.
      float4_ref: for `_float4_pairs`; None to unpack by integer arithmetic.
      pairs: which two rows of each four share a word.
      store: called with (step, 0 or 1 of ``pairs``, 0 for even and 1 for odd columns, words) for
        every four rows of SUBLANES words.
    """
    rows, width = codes_ref.shape
    scale_GO = scales_ref[...].astype(jnp.int32)
    extreme = jnp.max(jnp.where((scale_GO < 2) | (scale_GO > 252), 1, 0)) > 0
    if scale_GO.shape[0] < LANES:
        fill = jnp.zeros((LANES - scale_GO.shape[0], rows), jnp.int32)
        scale_GO = jnp.concatenate([scale_GO, fill], axis=0)
    lanes_ref[...] = lax.bitcast_convert_type(scale_GO.T, jnp.uint32)

    def run(source, floats, exponents):
        def step(i, _):
            first = pl.multiple_of(i * 4 * SUBLANES, 4 * SUBLANES)
            pair = source(codes_ref, pl.ds(first, 4 * SUBLANES), float4_ref)
            scale = [lanes_ref[pl.ds(first + r, SUBLANES, stride=4)] for r in range(4)]
            for which, (a, b) in enumerate(pairs):
                spread = _spread(exponents(scale[a] | scale[b] << 16), width)
                for odd in (0, 1):
                    store(i, which, odd, floats(pair(a, b, odd), spread))

        lax.fori_loop(0, rows // (4 * SUBLANES), step, None)

    @pl.when(jnp.logical_not(extreme))
    def _():
        if float4_ref is None:
            run(_code_pairs, _floats, lambda scale: (scale << 7) - _both(0xC0))
        else:
            run(_float4_pairs, _product_floats, lambda scale: scale << 7)

    @pl.when(extreme)
    def _():
        run(_code_pairs, _extreme_floats, lambda scale: scale)


def scratch(w: MXFP4, size: int):
    """What `unpack` needs for a block of ``size`` rows."""
    shapes: list[tuple[int, ...]] = [(size, LANES)]
    if target.device_kind() in FLOAT4:
        shapes.append((w.codes.shape[2] // LANES, 4 * SUBLANES, LANES))
    return [pltpu.VMEM(shape, jnp.uint32) for shape in shapes]
