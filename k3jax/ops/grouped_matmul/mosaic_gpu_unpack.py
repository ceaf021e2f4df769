"""MXFP4 in shared memory to bfloat16 in registers, as the left operand of a warpgroup product.

A product may add up its columns in any order, and give its rows in any order, so both follow from
how bytes are quickest to read (`spread` says which column stands where). Of 128 columns of a row,
four threads have a group of 32 each, one load of 16 bytes under one scale; and eight threads that
read together have rows that differ in the third bit, so that swizzled rows do not collide.

Two codes that are 16 bits apart become two bfloat16 by one multiplication (n << 6 | n << 12), one
mask, and one product with the scale: as bfloat16, the bits of a code are the number times 2**-126.

Each piece has a plain form for interpret mode, which knows no `plgpu.inline_mgpu`.
"""

# `inline_mgpu` takes the context away from what it wraps; its types do not say so.
# pyright: reportCallIssue=false, reportArgumentType=false
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from k3jax.ops.mosaic_gpu import WGMMA, swizzled
from k3jax.ops.mosaic_gpu_lanes import REF, SCALAR, Lane
from k3jax.quantization.mxfp4 import MXFP4

SPAN = 128  # columns, or rows, whose order changes together
TILE = 64  # rows of one warpgroup product
THREADS = 128
# Numbers of each thread's own.
FACTORS = plgpu.Layout.WG_STRIDED((9 * THREADS,), vec_size=1)
WORDS = plgpu.Layout.WG_STRIDED((8 * THREADS,), vec_size=1)
LARGEST = 128  # scale bytes 2 to here take one product; 2**(byte - 1) must be a bfloat16
_i32, _bf16 = jnp.int32, jnp.bfloat16


def spread(x: jax.Array) -> jax.Array:
    """Columns in the order of the kernel: of each 128, (q, v, b, i) becomes (v, i, q, b)."""
    *lead, width = x.shape
    x = x.reshape(*lead, width // SPAN, 4, 4, 2, 4)
    n = len(lead)
    return x.transpose(*range(n + 1), n + 2, n + 4, n + 1, n + 3).reshape(*lead, width)


def gather(x: jax.Array) -> jax.Array:
    """The inverse of `spread`."""
    *lead, width = x.shape
    x = x.reshape(*lead, width // SPAN, 4, 4, 4, 2)
    n = len(lead)
    return x.transpose(*range(n + 1), n + 3, n + 1, n + 4, n + 2).reshape(*lead, width)


def _rows(half):
    """The row of a span, of each row of a warpgroup's product; for interpret mode."""
    place = jnp.arange(TILE, dtype=_i32) + TILE * half
    v, i, q, b = place >> 5, (place >> 3) & 3, (place >> 1) & 3, place & 1
    return 32 * q + 8 * v + 4 * b + i


def _first_row(lane, half):
    """This thread's first row of the span; its other one is the next."""
    arith = lane.arith
    bit = lambda x, n: arith.andi(arith.shrui(x, lane.int(n)), lane.int(1))  # noqa: E731
    thread = lane.thread
    q = arith.andi(arith.shrui(thread, lane.int(3)), lane.int(3))
    return lane.add(
        lane.times(q, 32),
        lane.times(bit(thread, 2), 4),
        lane.times(bit(thread, 6), 8),
        lane.times(bit(thread, 5), 2),
        lane.times(half, 16),
    )


def _shared_load(lane, ref, offset, words: int):
    """``words`` int32 from a byte offset, aligned to them all."""
    vector = lane.ir.VectorType.get((words,), lane.i32)
    i8 = lane.ir.IntegerType.get_signless(8)
    at = lane.utils.getelementptr(lane.utils.memref_ptr(ref), [offset], i8)
    return lane.elements(lane.llvm.load(vector, at, alignment=4 * words))


def factors(scales_w, stage, half, *, groups: int, interpret):
    """What a thread multiplies the codes of one stage of 256 columns by.

    Args:
      scales_w: uint8 [2 parts, groups, 128] in shared memory: bytes of 128 rows, side by side.
      stage: its number.
      groups: of a row.
      half: which 64 rows of the 128 in the order of `spread`.

    Returns:
      `FACTORS` int32: 2**(byte - 1) as a pair of bfloat16, by (part, row, span), and whether any
      byte of the warp is outside 2..`LARGEST`; in interpret mode uint8 [2, 64, 2 spans, 4 groups].
    """
    if interpret:
        return scales_w[...].reshape(2, SPAN, groups // 8, 2, 4)[:, _rows(half), stage]

    @plgpu.inline_mgpu(
        arg_types=(REF, SCALAR, SCALAR),
        return_type=plgpu.ShapeDtypeStruct((9 * THREADS,), _i32, layout=FACTORS),
    )
    def read(_, scales, stage, half):
        lane = Lane()
        arith = lane.arith
        row = _first_row(lane, lane.scalar(half))
        shift = lane.times(arith.andi(lane.thread, lane.int(3)), 8)
        base = lane.add(lane.times(row, groups), lane.times(lane.scalar(stage), 8))
        found, highest = [], lane.int(0)
        for part in range(2):
            for second in range(2):
                offset = lane.add(base, groups * (SPAN * part + second))
                for word in _shared_load(lane, scales, offset, 2):
                    byte = arith.andi(arith.shrui(word, shift), lane.int(255))
                    highest = arith.maxui(highest, lane.add(byte, -2))
                    found.append(lane.add(lane.times(byte, 0x00800080), 0x3F003F00))
        unusual = lane.asm(
            f"{{ .reg .pred p, q; setp.gt.u32 p, $1, {LARGEST - 2};"
            " vote.sync.any.pred q, p, 0xffffffff; selp.b32 $0, 1, 0, q; }",
            lane.i32,
            highest,
        )
        return _private(lane, [*found, unusual], FACTORS)

    return read(scales_w, stage, half)


def words(codes_w, span: int, half, *, interpret):
    """The codes of a thread's two rows in 128 columns.

    Args:
      codes_w: uint8 [128 rows, 128 bytes] in shared memory.
      span: which 128 of the 256 columns.
      half: see `factors`.

    Returns:
      `WORDS` int32, by (row, word); in interpret mode uint8 [64, 64].
    """
    if interpret:
        columns = slice(span * SPAN // 2, (span + 1) * SPAN // 2)
        return codes_w[...][_rows(half), columns]

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(swizzled(jnp.uint8)), SCALAR),
        return_type=plgpu.ShapeDtypeStruct((8 * THREADS,), _i32, layout=WORDS),
    )
    def read(_, codes, half):
        lane = Lane()
        arith = lane.arith
        first = _first_row(lane, lane.scalar(half))
        piece = lane.add(arith.andi(lane.thread, lane.int(3)), 4 * span)
        out = []
        for second in range(2):
            row = lane.add(first, second)
            # Piece p of row r stands at piece p xor (r % 8) of its 128 bytes.
            at = arith.xori(piece, arith.andi(row, lane.int(7)))
            offset = lane.add(lane.times(row, 128), lane.times(at, 16))
            out += _shared_load(lane, codes, offset, 4)
        return _private(lane, out, WORDS)

    return read(codes_w, half)


def unpack(words, factors, part: int, span: int, chunk: int, *, interpret):
    """64 rows of a part and 64 columns, bfloat16 [64, 64], `WGMMA`; rows and columns `spread`.

    Args:
      words, factors: of the functions of these names.
      chunk: which 64 of the 128 columns, after `spread`.
    """
    if interpret:
        halves = MXFP4(words, factors[part, :, span]).halves(_bf16)
        w = spread(jnp.stack(halves, axis=-1).reshape(TILE, SPAN))
        return w[:, chunk * TILE : (chunk + 1) * TILE]

    @plgpu.inline_mgpu(
        arg_types=(WORDS, FACTORS),
        return_type=plgpu.ShapeDtypeStruct((TILE, TILE), _bf16, layout=WGMMA),
    )
    def convert(_, words, factors):
        from jax.experimental.mosaic import gpu as mgpu

        lane = Lane()
        register = lambda array, n: lane.elements(array.registers[n])[0]  # noqa: E731
        mine = [register(factors, part * 4 + second * 2 + span) for second in range(2)]
        codes = [
            [register(words, second * 4 + chunk * 2 + v) for v in range(2)] for second in range(2)
        ]

        def values(factors):
            return [
                v
                for f, pair in zip(factors, codes, strict=True)
                for w in pair
                for v in _eight(lane, w, f)
            ]

        branch = lane.scf.IfOp(
            lane.equal(register(factors, 8), lane.int(0)), [lane.i32] * 16, has_else=True
        )
        with lane.ir.InsertionPoint(branch.then_block):
            lane.scf.yield_(values(mine))
        with lane.ir.InsertionPoint(branch.else_block):
            limited, rest = zip(*(_split(lane, f) for f in mine), strict=True)
            lane.scf.yield_([_mend(lane, v, rest[n // 8]) for n, v in enumerate(values(limited))])
        pair = lane.ir.VectorType.get((2,), lane.ir.BF16Type.get())
        registers = np.empty(mgpu.WGMMA_LAYOUT.registers_shape((TILE, TILE)), dtype=object)
        for n, value in enumerate(branch.results):
            second, column = divmod(n, TILE // 8)
            registers[0, column, 0, 0, second, 0, 0, 0, 0] = lane.llvm.bitcast(pair, value)
        return mgpu.FragmentedArray(
            _registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None
        )

    return convert(words, factors)


def _private(lane, values, layout):
    from jax.experimental.mosaic import gpu as mgpu

    vector = lane.ir.VectorType.get((1,), lane.i32)
    registers = np.array([lane.vector.broadcast(vector, v) for v in values], dtype=object)
    return mgpu.FragmentedArray(_registers=registers, _layout=layout.to_mgpu(), _is_signed=True)


def _eight(lane, word, factor):
    """The codes i and i + 4 of a word, as pairs of bfloat16 times a factor each."""
    arith = lane.arith
    out = []
    for i in range(4):
        source = word if i < 2 else arith.shrui(word, lane.int(8))
        mask, spread_by = (0x000F000F, 0x1040) if i % 2 == 0 else (0x00F000F0, 0x0104)
        bits = lane.times(arith.andi(source, lane.int(mask)), spread_by)
        bits = arith.andi(bits, lane.int(0x81C081C0 - 2**32))
        out.append(
            lane.llvm.inline_asm(lane.i32, [bits, factor], "mul.bf16x2 $0, $1, $2;", "=r,r,r")
        )
    return out


def _split(lane, factor):
    """Any scale as a factor of bytes up to `LARGEST`, and float32 2**(byte - 128) above it, else 1;
    NaN for byte 255."""
    arith = lane.arith
    byte = lane.add(arith.andi(arith.shrui(factor, lane.int(7)), lane.int(511)), -126)
    low = arith.minui(byte, lane.int(LARGEST))
    over = arith.subi(byte, low)
    power = lane.llvm.bitcast(lane.f32, arith.shli(lane.add(over, 127), lane.int(23)))
    rest = arith.select(lane.equal(byte, lane.int(255)), lane.float(float("nan")), power)
    return lane.add(lane.times(low, 0x00800080), 0x3F003F00), rest


def _mend(lane, value, rest):
    """Both halves times the rest of their scale, with subnormal numbers as zeros."""
    arith, llvm = lane.arith, lane.llvm
    halves = [arith.shli(value, lane.int(16)), arith.andi(value, lane.int(-65536))]
    low, high = (
        llvm.bitcast(
            lane.i32,
            llvm.inline_asm(
                lane.f32, [llvm.bitcast(lane.f32, h), rest], "mul.ftz.f32 $0, $1, $2;", "=f,f,f"
            ),
        )
        for h in halves
    )
    return arith.ori(arith.shrui(low, lane.int(16)), arith.andi(high, lane.int(-65536)))


def store_rows(from_w, out_g, first, count, column, *, interpret):
    """Writes the first ``count`` rows of a warpgroup's [N, 64] bfloat16 to rows ``first`` and on of
    ``out_g`` [A, O], columns ``column .. column + 63``."""
    size = from_w.shape[0]
    if interpret:
        for n in range(size):

            @jax.named_call
            def one(n=n):
                from jax.experimental import pallas as pl

                @pl.when(n < count)
                def _():
                    out_g[first + n, pl.ds(column, TILE)] = from_w[n]

            one()
        return

    @plgpu.inline_mgpu(
        arg_types=(
            plgpu.RefType(swizzled(_bf16)), REF, SCALAR, SCALAR, SCALAR
        )
    )  # fmt: skip
    def store(_, source, out, first, count, column):
        lane = Lane()
        arith, ir, llvm, utils = lane.arith, lane.ir, lane.llvm, lane.utils
        i8, i64 = ir.IntegerType.get_signless(8), ir.IntegerType.get_signless(64)
        (stride, _), _ = out.type.get_strides_and_offset()
        first, count, column = map(lane.scalar, (first, count, column))
        piece = arith.andi(lane.thread, lane.int(7))
        row0 = arith.shrui(lane.thread, lane.int(3))
        vector = ir.VectorType.get((4,), lane.i32)
        base = utils.memref_ptr(out)
        inner = lane.add(lane.times(column, 2), lane.times(piece, 16))
        utils.warpgroup_barrier()
        for step in range(-(-size // 16)):
            row = lane.add(row0, 16 * step)
            with utils.when(lane.less(row, count)):
                at = arith.xori(piece, arith.andi(row, lane.int(7)))
                offset = lane.add(lane.times(row, 128), lane.times(at, 16))
                data = llvm.load(
                    vector,
                    utils.getelementptr(utils.memref_ptr(source), [offset], i8),
                    alignment=16,
                )
                flat = arith.muli(arith.extsi(i64, lane.add(first, row)), utils.c(2 * stride, i64))
                flat = arith.addi(flat, arith.extsi(i64, inner))
                llvm.store(data, utils.getelementptr(base, [flat], i8), alignment=16)
        utils.warpgroup_barrier()

    store(from_w, out_g, first, count, column)
