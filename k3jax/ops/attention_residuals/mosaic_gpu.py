"""A depth read as one Pallas kernel for Hopper GPUs (Mosaic GPU): every source is read once.

A block takes a token at a time. Rows of a token, 14 KiB each at K3's width, arrive in a ring in
shared memory; four warpgroups own a quarter of the columns each and move a row's values to
registers, where they stay until the mix: 9 rows are 63 registers a thread. The squares and the
products with norm times query of all sources are summed over the block together, so a token costs
two meetings of its threads: one for all scores and one for the norm of the mix. After the first one
its rows are in registers, and the copies of later tokens take their places in the ring.

Rows past ``count`` are neither copied nor computed with. Where a block has more tokens than one,
copies never stop: at 9 sources a ring of 15 rows holds 6 of the next token while one is computed.

The pieces below `_kernel` are written thread by thread, each with a plain form for interpret mode.
"""

# `inline_mgpu` takes the context away from what it wraps; its types do not say so.
# pyright: reportCallIssue=false, reportArgumentType=false
from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from k3jax.ops.mosaic_gpu import LANE, LOG2E, Interpret, mode
from k3jax.ops.mosaic_gpu_lanes import REF, SCALAR, Lane

BLOCKS = 132  # of an H200 or H100
WARPGROUPS = 4
THREADS = 128  # of a warpgroup
WARPS = 16
MOST = 16  # sources: pairs of lanes of a warp
VALUES = 9 * 7168  # of a token, which stay in registers
SHARED = 232448  # bytes
ROOM = 4096  # bytes of shared memory beside the ring
PITCH = 20  # float32 of a sum: one a warp, and a distance that keeps vectors in separate banks
_f32, _i32, _bf16 = jnp.float32, jnp.int32, jnp.bfloat16


def refusal(bank_NBTD, partial_BTD) -> str | None:
    """Why the kernel cannot take these inputs; None if it can."""
    N, *_, D = bank_NBTD.shape
    if partial_BTD.dtype != _bf16:
        return f"rows are {partial_BTD.dtype}, not bfloat16"
    if D % 1024:
        return f"rows of {D}, no multiple of 1024"
    if not 0 < N < MOST:
        return f"a bank of {N} rows, not 1 to {MOST - 1}"
    if (N + 1) * D > VALUES:
        return f"{N + 1} sources of {D} are over {VALUES} values, more than registers hold"
    return None


def slots_of(D: int) -> int:
    """Rows of the ring; a group of barriers has 32 at most."""
    return min((SHARED - ROOM) // (2 * D), 32)


def _kernel(
    bank_g, partial_g, norm_g, query_g, out_norm_g, count_g, out_g, ring_s, sums_s, squares_s,
    ready, meeting, *, eps, out_eps, weight_after_cast, interpret,
):  # fmt: skip
    block, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
    (N, T, D), slots = bank_g.shape, ring_s.shape[0]
    part = D // WARPGROUPS
    own = pl.ds(warpgroup * part, part)
    layout = plgpu.Layout.WG_STRIDED((part,), vec_size=2)
    sources = jnp.clip(count_g[0], 0, N) + 1  # of a token: the running sum, then the bank
    tokens = (T - 1 - block) // BLOCKS + 1 if T > BLOCKS else _i32(1)

    def fetch(first, number, most):
        refs = (bank_g, partial_g, ring_s, ready)
        _fetch(*refs, block, sources, tokens, first, number, most=most, interpret=interpret)

    def vector(ref, dtype):
        return plgpu.load(ref.at[own], layout=layout, optimized=False).astype(dtype)

    def meet(which):
        _meet(meeting.at[which], interpret=interpret)

    _begin(ready, interpret=interpret)
    fetch(_i32(0), _i32(slots), slots)
    key = vector(norm_g, _f32) * vector(query_g, _f32)

    def one(token, place):
        rows, sums = [], []
        for source in range(N + 1):

            def arrived(place):
                slot, turn = place
                _wait(ready, slot, turn, interpret=interpret)
                row = plgpu.load(ring_s.at[slot, own], layout=layout, optimized=False)
                pair = _pair(row, key, layout, interpret=interpret)
                last = slot == slots - 1
                return row, pair, (jnp.where(last, 0, slot + 1), jnp.where(last, 1 - turn, turn))

            def absent(place):
                pair = plgpu.layout_cast(jnp.zeros((2 * THREADS,), _f32), _private(2))
                return plgpu.layout_cast(jnp.zeros((part,), _bf16), layout), pair, place

            row, pair, place = (
                arrived(place)
                if source == 0
                else lax.cond(source < sources, arrived, absent, place)
            )
            rows.append(row)
            sums.append(pair)
        _reduce(sums, sums_s, warpgroup, interpret=interpret)
        meet(0)
        fetch(slots + token * sources, sources, N + 1)
        weights = _weights(sums_s, sources, N + 1, D, eps, interpret=interpret)
        mixed = _add(None, rows[0], weights[0], layout, interpret=interpret)
        for source in range(1, N + 1):

            def add(mixed, source=source):
                return _add(mixed, rows[source], weights[source], layout, interpret=interpret)

            mixed = lax.cond(source < sources, add, lambda x: x, mixed)
        mixed = mixed.astype(_bf16)
        # Now, from a cache: while the rows are in registers there is no room for it.
        out_norm = vector(out_norm_g, _bf16 if weight_after_cast else out_norm_g.dtype)
        _square(mixed, squares_s, warpgroup, layout, interpret=interpret)
        meet(1)
        scale = _scale(squares_s, D, out_eps, interpret=interpret)
        out_g[block + token * BLOCKS, own] = _normed(
            mixed, scale, out_norm, layout, weight_after_cast, interpret=interpret
        )
        return place

    lax.fori_loop(0, tokens, one, (_i32(0), _i32(0)))


def _private(numbers: int):
    """Numbers of each thread's own: number i of thread t stands at 128 i + t."""
    return plgpu.Layout.WG_STRIDED((numbers * THREADS,), vec_size=1)


def _meet(barrier, *, interpret):
    """All threads of the block meet; what they wrote to shared memory is seen by all."""
    if interpret:
        plgpu.barrier_arrive(barrier)
        plgpu.barrier_wait(barrier)
        return

    @plgpu.inline_mgpu()
    def wait(_):
        _Sums().gpu.barrier()

    wait()


class _Sums(Lane):
    """Sums over the threads of a block."""

    def __init__(self):
        super().__init__()
        self.lane = self.arith.andi(self.thread, self.int(31))
        self.warp = self.arith.shrui(self.utils.thread_idx(), self.int(5))

    def barrier(self, ref, slot):
        """The address of a barrier, 8 bytes."""
        base = self.utils.memref_ptr(ref)
        return self.utils.getelementptr(base, [self.times(slot, 2)], self.i32)

    def halves(self, register):
        """The two float32 of a register of two bfloat16."""
        bits = self.utils.bitcast(register, self.i32)
        low = self.arith.shli(bits, self.int(16))
        high = self.arith.andi(bits, self.int(-(1 << 16)))
        return self.arith.bitcast(self.f32, low), self.arith.bitcast(self.f32, high)

    def pair(self, a, b):
        return self.vector.from_elements(self.ir.VectorType.get((2,), self.f32), [a, b])

    def rounded(self, values):
        """Two float32 as a register of two bfloat16."""
        kind = self.ir.VectorType.get((2,), self.ir.BF16Type.get())
        return self.arith.truncf(kind, self.pair(*values))

    def single(self, x):
        return self.vector.from_elements(self.ir.VectorType.get((1,), self.f32), [x])

    def fast(self, text, x):
        """An instruction of one float32 operand."""
        text = f"{text} $0, $1;"
        return self.llvm.inline_asm(self.f32, [x], text, "=f,f", has_side_effects=False)

    def from_lane(self, x, lane: int):
        from jaxlib.mlir.dialects import nvvm

        every, clamp = self.int(-1), self.int(31)
        bits = self.arith.bitcast(self.i32, x)
        bits = nvvm.shfl_sync(every, bits, self.int(lane), clamp, nvvm.ShflKind.idx)
        return self.arith.bitcast(self.f32, bits)

    def total(self, values):
        """Their sum, as a tree."""
        values = list(values)
        while len(values) > 1:
            pairs = zip(values[::2], values[1::2], strict=False)
            rest = values[len(values) & ~1 :]
            values = [self.arith.addf(a, b) for a, b in pairs] + rest
        return values[0]

    def four(self, ref, offset):
        """Vectors of four float32 of a reference, that hold WARPS of them from an offset."""
        kind = self.ir.VectorType.get((4,), self.f32)
        base = self.utils.getelementptr(self.utils.memref_ptr(ref), [offset], self.f32)
        found = []
        for n in range(0, WARPS, 4):
            at = self.utils.getelementptr(base, [self.int(n)], self.f32)
            found.extend(self.elements(self.llvm.load(kind, at, alignment=16)))
        return found

    def splat(self, x):
        from jax.experimental.mosaic import gpu as mgpu

        return mgpu.FragmentedArray.splat(x, ())

    def array(self, registers, layout):
        from jax.experimental.mosaic import gpu as mgpu

        registers = np.array(registers, dtype=object)
        return mgpu.FragmentedArray(_registers=registers, _layout=layout.to_mgpu(), _is_signed=None)


def _begin(ready, *, interpret):
    """Makes the barriers of the ring."""
    if interpret:
        return

    @plgpu.inline_mgpu(arg_types=(REF,))
    def begin(_, ready):
        from jaxlib.mlir.dialects import nvvm

        lane = _Sums()
        with lane.utils.when(lane.equal(lane.utils.thread_idx(), lane.int(0))):
            for slot in range(lane.shape(ready)[0]):
                nvvm.mbarrier_init(lane.barrier(ready, lane.int(slot)), lane.int(1))
            nvvm.fence_mbarrier_init()
        lane.gpu.barrier()

    begin(ready)


def _fetch(
    bank_g, partial_g, ring_s, ready, block, sources, tokens, first, number, *, most, interpret
):
    """Starts the copies of the block's rows first .. first + number - 1, as far as they exist.

    Row r is source r % sources of the block's token r / sources and goes to slot r % slots. A warp
    asks for a row: one thread that asked for all would keep its warp behind the others.

    Args:
      ready: barriers [slots] in interpret mode, else their shared memory.
      most: the greatest ``number``.
    """
    slots, D = ring_s.shape
    if interpret:

        def one(n, _):
            row = first + n
            token, source, slot = row // sources, lax.rem(row, sources), lax.rem(row, _i32(slots))
            at = block + token * BLOCKS
            copy = lambda ref: plgpu.copy_gmem_to_smem(ref, ring_s.at[slot], ready.at[slot])  # noqa: E731
            here = (token < tokens) & (lax.axis_index("warpgroup") == 0)
            pl.when(here & (source == 0))(lambda: copy(partial_g.at[at]))
            pl.when(here & (source > 0))(lambda: copy(bank_g.at[jnp.maximum(source - 1, 0), at]))
            return ()

        lax.fori_loop(0, number, one, ())
        return

    @plgpu.inline_mgpu(arg_types=(*[REF] * 4, *[SCALAR] * 5))
    def fetch(_, bank, partial, ring, ready, *scalars):
        from jaxlib.mlir.dialects import nvvm

        lane = _Sums()
        arith, ir, llvm = lane.arith, lane.ir, lane.llvm
        block, sources, tokens, first, number = map(lane.scalar, scalars)
        i64, i8 = (ir.IntegerType.get_signless(n) for n in (64, 8))
        T, size = lane.shape(partial)[0], 2 * D
        elected = lane.equal(lane.lane, lane.int(0))
        for begin in range(0, most, WARPS):
            n = lane.add(lane.warp, begin)
            row = lane.add(first, n)
            token, source = arith.divui(row, sources), arith.remui(row, sources)
            there = arith.andi(lane.less(n, number), lane.less(token, tokens))
            with lane.utils.when(arith.andi(there, elected)):
                slot = lane.over(row, slots)[1]
                at = lane.add(block, lane.times(token, BLOCKS))
                in_bank = lane.add(lane.times(lane.add(source, -1), T), at)
                own = lane.equal(source, lane.int(0))
                base = arith.select(own, *(lane.utils.memref_ptr(x) for x in (partial, bank)))
                offset = arith.extui(i64, arith.select(own, at, in_bank))
                offset = arith.muli(offset, lane.utils.c(size, i64))
                source_ptr = lane.utils.getelementptr(base, [offset], i8)
                target = lane.utils.getelementptr(
                    lane.utils.memref_ptr(ring), [lane.times(slot, size)], i8
                )
                barrier = lane.barrier(ready, slot)
                nvvm.mbarrier_arrive_expect_tx(barrier, lane.int(size))
                llvm.inline_asm(
                    ir.Type.parse("!llvm.void"),
                    [target, source_ptr, lane.int(size), barrier],
                    "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes "
                    "[$0], [$1], $2, [$3];",
                    "l,l,r,l",
                    has_side_effects=True,
                )

    refs = (bank_g, partial_g, ring_s, ready)
    fetch(*refs, block, sources, tokens, first, number)


def _wait(ready, slot, turn, *, interpret):
    """Until a slot's row is there; ``turn`` is 0 or 1, by how often the slot was used."""
    if interpret:
        plgpu.barrier_wait(ready.at[slot])
        return

    @plgpu.inline_mgpu(arg_types=(REF, SCALAR, SCALAR))
    def wait(_, ready, slot, turn):
        from jaxlib.mlir.dialects import nvvm

        lane = _Sums()
        barrier = lane.barrier(ready, lane.scalar(slot))
        nvvm.mbarrier_try_wait_parity(barrier, lane.scalar(turn), lane.int(10_000_000))

    wait(ready, slot, turn)


def _values(row) -> jax.Array:
    """[P] values as [P / 256, 128, 2], by thread in the middle; for interpret mode."""
    return row.astype(_f32).reshape(-1, THREADS, 2)


def _pair(row, key, layout, *, interpret):
    """Each thread's sums of squares and of products with the key, as `_private` (2)."""
    if interpret:
        v, k = _values(row), _values(key)
        return jnp.concatenate([jnp.sum(v * k, (0, 2)), jnp.sum(v * v, (0, 2))])

    @plgpu.inline_mgpu(
        arg_types=(layout, layout),
        return_type=plgpu.ShapeDtypeStruct((2 * THREADS,), _f32, layout=_private(2)),
    )
    def sums(_, row, key):
        lane = _Sums()
        dots, squares = [lane.float(0.0)] * 2, [lane.float(0.0)] * 2  # two chains each
        for v, k in zip(row.registers, key.registers, strict=True):
            for half, (x, y) in enumerate(zip(lane.halves(v), lane.elements(k), strict=True)):
                dots[half] = lane.fma(x, y, dots[half])
                squares[half] = lane.fma(x, x, squares[half])
        both = [lane.single(lane.arith.addf(*x)) for x in (dots, squares)]
        return lane.array(both, _private(2))

    return sums(row, key)


def _places(number: int, bit: int = 4) -> list[int]:
    """The lane at which each of some numbers ends when a warp sums them together.

    Each step halves the numbers a lane holds: lanes with the bit keep the second half.
    """
    if bit == 0 or number == 1:
        return [0] * number
    half = (number + 1) // 2
    low, high = _places(half, bit - 1), _places(half, bit - 1)
    return [*low, *(place + (1 << bit) for place in high[: number - half])]


def _reduce(sums, sums_s, warpgroup, *, interpret):
    """Sums over a warp of every thread's pairs, to ``sums_s[lane, warp]``: the first of source n
    at the lane ``_places(sources)[n]``, the second at the next."""
    places = _places(len(sums))
    if interpret:
        for place, pair in zip(places, sums, strict=True):
            warps = jnp.sum(pair.reshape(2, 4, 32), -1)
            for n in range(2):
                sums_s[place + n, pl.ds(warpgroup * 4, 4)] = warps[n]
        return

    @plgpu.inline_mgpu(arg_types=(*[_private(2)] * len(sums), REF))
    def reduce(_, *arguments):
        lane, (*pairs, sums_s) = _Sums(), arguments
        add, pick = lane.arith.addf, lane.arith.select
        units = [[lane.elements(r)[0] for r in pair.registers] for pair in pairs]
        for bit in (4, 3, 2, 1):
            upper, half = lane.bit(lane.lane, bit), (len(units) + 1) // 2
            other = lambda x, bit=bit: lane.utils.shfl_bfly(x, 1 << bit)  # noqa: E731
            kept = []
            for n in range(half):
                low, high = units[n], units[n + half] if n + half < len(units) else None
                if high is None:
                    kept.append([add(x, other(x)) for x in low])
                    continue
                kept.append(
                    [
                        add(pick(upper, b, a), other(pick(upper, a, b)))
                        for a, b in zip(low, high, strict=True)
                    ]
                )
            units = kept
        (a, b), upper = units[0], lane.bit(lane.lane, 0)
        total = add(pick(upper, b, a), lane.utils.shfl_bfly(pick(upper, a, b), 1))
        lane.store(total, sums_s, lane.lane, lane.warp)

    reduce(*sums, sums_s)


def _weights(sums_s, sources, most, D, eps, *, interpret):
    """Softmax over the sources that are there of the scores that the sums give."""
    places = _places(most)
    if interpret:
        totals = jnp.sum(sums_s[...][:, :WARPS], -1)
        scores = [totals[n] * lax.rsqrt(totals[n + 1] * (1 / D) + eps) for n in places]
        scores = jnp.stack([jnp.where(n < sources, s, -jnp.inf) for n, s in enumerate(scores)])
        return list(jax.nn.softmax(scores))

    @plgpu.inline_mgpu(
        arg_types=(REF, SCALAR),
        return_type=[plgpu.ShapeDtypeStruct((), _f32, layout=SCALAR) for _ in places],
    )
    def weights(_, sums_s, sources):
        lane = _Sums()
        arith, sources = lane.arith, lane.scalar(sources)
        total = lane.total(lane.four(sums_s, lane.times(lane.lane, PITCH)))
        other, odd = lane.utils.shfl_bfly(total, 1), lane.bit(lane.lane, 0)
        dot, square = arith.select(odd, other, total), arith.select(odd, total, other)
        square = lane.fma(square, lane.float(1 / D), lane.float(eps))
        score = arith.mulf(dot, lane.fast("rsqrt.approx.f32", square))
        low = lane.float(float("-inf"))
        there = [lane.less(lane.int(n), sources) for n in range(most)]
        top = None
        for is_there, place in zip(there, places, strict=True):
            one = arith.select(is_there, lane.from_lane(score, place), low)
            top = one if top is None else arith.maxnumf(top, one)
        score = arith.mulf(arith.subf(score, top), lane.float(LOG2E))
        share = lane.fast("ex2.approx.ftz.f32", score)
        zero = lane.float(0.0)
        shares = [
            arith.select(is_there, lane.from_lane(share, place), zero)
            for is_there, place in zip(there, places, strict=True)
        ]
        inverse = lane.fast("rcp.approx.ftz.f32", lane.total(shares))
        return [lane.splat(arith.mulf(x, inverse)) for x in shares]

    return weights(sums_s, sources)


def _add(mixed, row, weight, layout, *, interpret):
    """mixed + weight * row in float32; the product where ``mixed`` is None."""
    if interpret:
        product = weight * row.astype(_f32)
        return product if mixed is None else mixed + product
    before = [] if mixed is None else [mixed]

    @plgpu.inline_mgpu(
        arg_types=(layout, SCALAR, *[layout] * len(before)),
        return_type=plgpu.ShapeDtypeStruct(row.shape, _f32, layout=layout),
    )
    def add(_, row, weight, *before):
        lane, weight = _Sums(), weight.registers.item()
        registers = []
        for n, register in enumerate(row.registers):
            values = lane.halves(register)
            if before:
                sums = lane.elements(before[0].registers[n])
                values = [lane.fma(weight, x, s) for x, s in zip(values, sums, strict=True)]
            else:
                values = [lane.arith.mulf(weight, x) for x in values]
            registers.append(lane.pair(*values))
        return lane.array(registers, layout)

    return add(row, weight, *before)


def _square(mixed, squares_s, warpgroup, layout, *, interpret):
    """Each warp's sum of squares."""
    if interpret:
        v = _values(mixed)
        warps = jnp.sum(jnp.sum(v * v, (0, 2)).reshape(4, 32), -1)
        squares_s[pl.ds(warpgroup * 4, 4)] = warps
        return

    @plgpu.inline_mgpu(arg_types=(layout, REF))
    def square(_, mixed, squares_s):
        lane = _Sums()
        sums = [lane.float(0.0)] * 4
        values = [x for register in mixed.registers for x in lane.halves(register)]
        for n, x in enumerate(values):
            sums[n % 4] = lane.fma(x, x, sums[n % 4])
        total = lane.total(sums)
        for bit in range(5):
            total = lane.arith.addf(total, lane.utils.shfl_bfly(total, 1 << bit))
        lane.store(total, squares_s, lane.warp)

    square(mixed, squares_s)


def _scale(squares_s, D, eps, *, interpret):
    """1 / sqrt(mean square + eps)."""
    if interpret:
        return lax.rsqrt(jnp.sum(squares_s[...]) * (1 / D) + eps)

    @plgpu.inline_mgpu(
        arg_types=(REF,), return_type=plgpu.ShapeDtypeStruct((), _f32, layout=SCALAR)
    )
    def scale(_, squares_s):
        lane = _Sums()
        total = lane.total(lane.four(squares_s, lane.int(0)))
        square = lane.fma(total, lane.float(1 / D), lane.float(eps))
        return lane.splat(lane.fast("rsqrt.approx.f32", square))

    return scale(squares_s)


def _normed(mixed, scale, out_norm, layout, weight_after_cast, *, interpret):
    """The row times the scale and the weight, rounded as the op says."""
    if interpret:
        y = mixed.astype(_f32) * scale
        y = y.astype(_bf16).astype(_f32) if weight_after_cast else y
        return (y * out_norm.astype(_f32)).astype(_bf16)

    @plgpu.inline_mgpu(
        arg_types=(layout, SCALAR, layout),
        return_type=plgpu.ShapeDtypeStruct(mixed.shape, _bf16, layout=layout),
    )
    def normed(_, mixed, scale, weight):
        lane, scale, registers = _Sums(), scale.registers.item(), []
        multiply = lambda a, b: [lane.arith.mulf(*x) for x in zip(a, b, strict=True)]  # noqa: E731
        for row, factor in zip(mixed.registers, weight.registers, strict=True):
            y = multiply(lane.halves(row), [scale] * 2)
            y = lane.halves(lane.rounded(y)) if weight_after_cast else y
            both = lane.halves(factor) if out_norm.dtype == _bf16 else lane.elements(factor)
            registers.append(lane.rounded(multiply(y, both)))
        return lane.array(registers, layout)

    return normed(mixed, scale, out_norm)


def read(
    bank_NBTD, partial_BTD, norm_D, query_D, out_norm_D, count, *,
    eps: float, out_eps: float, weight_after_cast: bool, interpret: Interpret = False,
):  # fmt: skip
    """See `k3jax.ops.attention_residuals.read`; inputs as `refusal` wants them.

    Args:
      interpret: whether to run in interpret mode, on a CPU; with parameters, how.
    """
    N, *_, D = bank_NBTD.shape
    slots, T = slots_of(D), partial_BTD.size // D
    out_TD = plgpu.kernel(
        functools.partial(
            _kernel,
            eps=eps,
            out_eps=out_eps,
            weight_after_cast=weight_after_cast,
            interpret=interpret,
        ),
        out_type=jax.ShapeDtypeStruct((T, D), _bf16),
        scratch_types=[
            plgpu.SMEM((slots, D), _bf16),
            plgpu.SMEM((32, PITCH), _f32),
            plgpu.SMEM((WARPS,), _f32),
            plgpu.Barrier(num_arrivals=1, num_barriers=slots)
            if interpret
            else plgpu.SMEM((slots, 2), _i32),
            plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=2),
        ],
        grid=(min(T, BLOCKS),),
        grid_names=("block",),
        num_threads=WARPGROUPS,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=LANE, approx_math=True, unsafe_no_auto_barriers=True
        ),
        interpret=mode(interpret),
    )(
        bank_NBTD.reshape(N, T, D),
        partial_BTD.reshape(T, D),
        norm_D,
        query_D,
        out_norm_D,
        count.reshape(1),
    )
    return out_TD.reshape(partial_BTD.shape)
