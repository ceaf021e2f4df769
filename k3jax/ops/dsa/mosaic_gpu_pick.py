"""The best k of some thousand candidates a query, in ascending order of position.

A block of 1,024 threads holds the candidates of a query in registers, eight a thread, finds the k-th
best rank bit by bit, counts down ties by position, and sorts what is left in shared memory. No step
depends on how the ranks lie. Written thread by thread in MLIR; interpret mode runs a plain sort.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from k3jax.ops.dsa.mosaic_gpu_collect import Segments
from k3jax.ops.dsa.mosaic_gpu_lanes import REF, SCALAR, Lane, ordered, unordered
from k3jax.ops.mosaic_gpu import LANE, Interpret

THREADS = 1024
MOST = 8 * THREADS  # candidates of a query
SAMPLE = 16 * THREADS  # most ranks of `floor`
_LEAST = -(2**31)
_NONE = _LEAST + 0x7FFFFF  # `ordered` of -inf
_i32 = jnp.int32


class Block(Lane):
    """What 1,024 threads do together. ``counters`` is zeroed shared memory; each is used once."""

    def __init__(self, counters):
        super().__init__()
        self.thread = self.utils.thread_idx()
        self.counters, self.used = counters, 0

    def wait(self):
        """All threads meet; what they wrote to shared memory is seen by all."""
        self.gpu.barrier()

    def begin(self):
        with self.utils.when(self.less(self.thread, self.shape(self.counters)[0])):
            self.store(self.int(0), self.counters, self.thread)
        self.wait()

    def total(self, values):
        """The sum of numbers of all threads, in all threads."""
        mine = functools.reduce(self.arith.addi, values)
        warp = self.asm("redux.sync.add.s32 $0, $1, 0xffffffff;", self.i32, mine)
        at, self.used = self.used, self.used + 1
        with self.utils.when(self.first_of_warp()):
            self.grow(self.counters, self.int(at), warp)
        self.wait()
        return self.load(self.counters, at)

    def first_of_warp(self):
        return self.equal(self.arith.andi(self.thread, self.int(31)), self.int(0))

    def number(self, condition):
        return self.arith.extui(self.i32, condition)

    def greatest(self, keys, wanted, bits: range):
        """The greatest number, of which only ``bits`` are set, that ``wanted`` keys are not below."""
        limit = self.int(_LEAST)
        for bit in bits:
            step = 1 << bit if bit < 31 else _LEAST
            trial = self.add(limit, step)
            count = self.total([self.number(self.not_less(key, trial)) for key in keys])
            limit = self.arith.select(self.not_less(count, wanted), trial, limit)
        return limit

    def next_places(self, conditions, at: int):
        """Places 0, 1, .. for the true conditions of all threads, in any order."""
        places = []
        for condition in conditions:
            ballot = self.asm(
                "{.reg .pred p; setp.ne.u32 p, $1, 0; vote.sync.ballot.b32 $0, p, 0xffffffff;}",
                *(self.i32, self.number(condition)),
            )
            below = self.asm("mov.u32 $0, %lanemask_lt;", self.i32)
            rank = self.asm("popc.b32 $0, $1;", self.i32, self.arith.andi(ballot, below))
            votes = self.asm("popc.b32 $0, $1;", self.i32, ballot)
            # The warp's first thread asks for all; the others get what it was given.
            mine = self.arith.select(self.first_of_warp(), votes, self.int(0))
            base = self.grow(self.counters, self.int(at), mine)
            base = self.asm("shfl.sync.idx.b32 $0, $1, 0, 0x1f, 0xffffffff;", self.i32, base)
            places.append(self.add(base, rank))
        return places

    def sort(self, keys_s, values_s, size: int):
        """Ascending keys, with their values: a bitonic network of a pair a thread."""
        arith = self.arith
        self.wait()
        run = 2
        while run <= size:
            stride = run // 2
            while stride:
                # 32 threads stay within the same 64 numbers while strides are at most 32.
                if stride >= 32:
                    self.wait()
                else:
                    self.asm("bar.warp.sync 0xffffffff;", None)
                for pair in range(0, size // 2, THREADS):
                    index = self.add(self.thread, pair)
                    inner = arith.andi(index, self.int(stride - 1))
                    low = self.add(self.times(arith.subi(index, inner), 2), inner)
                    high = self.add(low, stride)
                    inside = self.less(index, size // 2)
                    with self.utils.when(inside):
                        a, b = self.load(keys_s, low), self.load(keys_s, high)
                        x, y = self.load(values_s, low), self.load(values_s, high)
                        rising = self.equal(arith.andi(low, self.int(run)), self.int(0))
                        greater = arith.cmpi(arith.CmpIPredicate.sgt, a, b)
                        swap = self.equal(self.number(greater), self.number(rising))
                        with self.utils.when(swap):
                            for ref, first, second in ((keys_s, b, a), (values_s, y, x)):
                                self.store(first, ref, low)
                                self.store(second, ref, high)
                stride //= 2
            run *= 2
        self.wait()


def _flip(block, key):
    """Bits of a float32 <-> a number in the same order (`ordered`)."""
    arith = block.arith
    mask = arith.andi(arith.shrsi(key, block.int(31)), block.int(0x7FFFFFFF))
    return arith.xori(key, mask)


def _floor_kernel(rank_g, wanted_g, key_g, counters_s):
    @plgpu.inline_mgpu(arg_types=(REF, REF, REF, REF, SCALAR, SCALAR))
    def body(_, rank_g, wanted_g, key_g, counters_s, batch, query):
        block = Block(counters_s)
        where = (block.scalar(batch), block.scalar(query))
        block.begin()
        keys = []
        for begin in range(0, block.shape(rank_g)[-1], THREADS):
            rank = block.load(rank_g, *where, block.add(block.thread, begin))
            keys.append(_flip(block, block.arith.bitcast(block.i32, rank)))
        # Sign, exponent and 11 bits of the mantissa; the floor may be a little lower than asked for.
        limit = block.greatest(keys, block.load(wanted_g, *where), range(31, 11, -1))
        with block.utils.when(block.equal(block.thread, block.int(0))):
            block.store(limit, key_g, *where)

    body(rank_g, wanted_g, key_g, counters_s, lax.axis_index("batch"), lax.axis_index("query"))


def floor(rank_BTS: Array, wanted_BT: Array, *, interpret: Interpret = False) -> Array:
    """float32_BT that at least ``wanted`` of the ranks are not below, and few more; -inf where
    there are not so many. S a multiple of `THREADS`, at most `SAMPLE`."""
    batch, length, _ = rank_BTS.shape
    if interpret:
        falling = -jnp.sort(-rank_BTS, axis=-1)
        value = jnp.take_along_axis(falling, wanted_BT[..., None] - 1, -1)[..., 0]
        key_BT = ordered(value) & ~0xFFF
    else:
        key_BT = _kernel(
            *(_floor_kernel, batch, length), jax.ShapeDtypeStruct((batch, length), _i32), []
        )(rank_BTS, wanted_BT)
    return jnp.where(key_BT <= _NONE, -jnp.inf, unordered(key_BT))


def _pick_kernel(
    rank_g, at_g, count_g, need_g, floor_g, tie_g, best_g, kept_g,
    counters_s, base_s, keys_s, at_s, rank_s, topk,
):  # fmt: skip
    refs = (rank_g, at_g, count_g, need_g, floor_g, tie_g, best_g, kept_g)
    refs = (*refs, counters_s, base_s, keys_s, at_s, rank_s)

    @plgpu.inline_mgpu(arg_types=(*[REF] * len(refs), SCALAR, SCALAR))
    def body(_, *arguments):
        *refs, batch, query = arguments
        counters_s = refs[8]
        block = Block(counters_s)
        where = (block.scalar(batch), block.scalar(query))
        floor_g = refs[4]
        finite = block.arith.cmpf(
            block.arith.CmpFPredicate.OLT, block.load(floor_g, *where), block.float(jnp.inf)
        )
        with block.utils.when(finite):
            _pick(block, where, topk, *refs)

    body(*refs, lax.axis_index("batch"), lax.axis_index("query"))


_OVER, _BASE, _PLACE = 125, 126, 127  # counters; `Block.total` takes them from the front


def _pick(
    block, where, topk, rank_g, at_g, count_g, need_g, floor_g, tie_g, best_g, kept_g,
    counters_s, base_s, keys_s, at_s, rank_s,
):  # fmt: skip
    arith, thread = block.arith, block.thread
    *_, segments, capacity = block.shape(rank_g)
    size = block.shape(kept_g)[-1]
    block.begin()
    # Where each segment begins among all candidates: any order will do.
    with block.utils.when(block.less(thread, segments)):
        count = block.load(count_g, *where, thread)
        kept = arith.minsi(count, block.int(capacity))
        over = block.number(block.less(kept, count))
        block.store(block.grow(counters_s, block.int(_BASE), kept), base_s, thread)
        block.grow(counters_s, block.int(_OVER), over)
    block.wait()
    found = block.load(counters_s, _BASE)
    over = arith.ori(
        block.load(counters_s, _OVER), block.number(block.less(block.int(MOST), found))
    )
    found = arith.minsi(found, block.int(MOST))
    for begin in range(0, segments * capacity, 8 * THREADS):
        # Loads first, so that they are under way together; more would not fit in registers.
        loaded = []
        for part in range(begin, min(begin + 8 * THREADS, segments * capacity), THREADS):
            segment, place = block.over(block.add(thread, part), capacity)
            values = [block.load(ref, *where, segment, place) for ref in (rank_g, at_g)]
            loaded.append((segment, place, *values))
        for segment, place, rank, at in loaded:
            target = block.add(block.load(base_s, segment), place)
            inside = block.less(place, block.load(count_g, *where, segment))
            with block.utils.when(arith.andi(inside, block.less(target, MOST))):
                block.store(_flip(block, arith.bitcast(block.i32, rank)), keys_s, target)
                block.store(at, at_s, target)
    block.wait()
    keys, ats = [], []
    for begin in range(0, MOST, THREADS):
        place = block.add(thread, begin)
        there = block.less(place, found)
        keys.append(arith.select(there, block.load(keys_s, place), block.int(_LEAST)))
        ats.append(arith.select(there, block.load(at_s, place), block.int(-1)))
    wanted = arith.minsi(found, block.int(topk))
    least = block.greatest(keys, wanted, range(31, -1, -1))
    # With no candidate at all everything would be chosen: nothing is above the greatest number.
    least = arith.select(block.less(found, 1), block.int(2**31 - 1), least)
    above = block.total([block.number(block.less(least, key)) for key in keys])
    equals = [block.equal(key, least) for key in keys]
    ties = arith.subi(wanted, above)
    # The last tie that stays: bisection again, over positions upside down, from the top bit that
    # a position can have.
    late = [
        arith.select(e, arith.xori(at, block.int(-1)), block.int(_LEAST))
        for e, at in zip(equals, ats, strict=True)
    ]
    equal = block.total([block.number(e) for e in equals])
    block.store(block.int(2**31 - 1), base_s, 0)
    block.wait()
    with block.utils.when(block.less(ties, equal)):
        last = block.greatest(late, ties, range(31, -1, -1))
        block.store(arith.xori(last, block.int(-1)), base_s, 0)
    block.wait()
    last = block.load(base_s, 0)
    chosen = []
    for key, at, e in zip(keys, ats, equals, strict=True):
        early = block.not_less(last, at)
        chosen.append(arith.ori(block.less(least, key), arith.andi(e, early)))
    places = block.next_places(chosen, _PLACE)
    # What is sorted takes the candidates' place.
    for begin in range(0, size, THREADS):
        place = block.add(thread, begin)
        with block.utils.when(block.less(place, size)):
            block.store(block.int(2**31 - 1), keys_s, place)
    block.wait()
    for key, at, c, place in zip(keys, ats, chosen, places, strict=True):
        with block.utils.when(c):
            block.store(at, keys_s, place)
            block.store(key, rank_s, place)
    block.sort(keys_s, rank_s, size)
    for begin in range(0, size, THREADS):
        place = block.add(thread, begin)
        with block.utils.when(block.less(place, size)):
            at = block.load(keys_s, place)
            none = block.equal(at, block.int(2**31 - 1))
            rank = arith.bitcast(block.f32, _flip(block, block.load(rank_s, place)))
            minus = block.float(float("-inf"))
            block.store(arith.select(none, minus, rank), best_g, *where, place)
            block.store(arith.select(none, block.int(-1), at), kept_g, *where, place)
    _next_floor(block, where, topk, found, over, least, last, need_g, floor_g, tie_g)


def _next_floor(block, where, topk, found, over, least, last, need_g, floor_g, tie_g):
    """What the next round needs: inf if this one was enough; the k-th best of what there was room
    for, which no more than the true k-th best; or everything if too few lay above the floor."""
    arith = block.arith
    over = arith.cmpi(arith.CmpIPredicate.ne, over, block.int(0))
    many = block.not_less(found, block.int(topk))
    few = block.less(found, block.load(need_g, *where))
    value = arith.bitcast(block.f32, _flip(block, least))
    floor, tie = block.float(float("inf")), block.int(2**31 - 1)
    again = arith.andi(over, many)
    floor = arith.select(again, value, floor)
    tie = arith.select(again, last, tie)
    lost = arith.ori(arith.andi(over, arith.xori(many, block.true())), few)
    lost = arith.andi(lost, arith.xori(again, block.true()))
    floor = arith.select(lost, block.float(float("-inf")), floor)
    with block.utils.when(block.equal(block.thread, block.int(0))):
        block.store(floor, floor_g, *where)
        block.store(tie, tie_g, *where)


def pick(
    found: Segments, *, need_BT: Array, state, topk: int, interpret: Interpret = False
) -> tuple[Array, Array, Array, Array]:
    """The best ``topk`` candidates of each query whose floor is not inf, equal ranks by position.

    Args:
      need_BT: int32, how many there must be.
      state: (floor_BT, last tie_BT, rank_BTk, at_BTk), k a power of two.

    Returns:
      the state of the next round: where this one was enough the floor is inf, and ranks and
      positions are there, by position, then -inf and -1. Else floor and tie are those of the k-th
      best candidate there was room for, or -inf if too few were found.
    """
    if interpret:
        return _pick_interpreted(found, need_BT, state, topk)
    batch, length, segments, _ = found.rank_BTnc.shape
    size = state[-1].shape[-1]
    scratch = [plgpu.SMEM((n,), _i32) for n in (segments, max(MOST, size), MOST, size)]
    refs = [jax.new_ref(x) for x in state]
    body = functools.partial(_pick_kernel, topk=topk)
    _kernel(body, batch, length, (), scratch)(*found, need_BT, *refs)
    return tuple(ref[...] for ref in refs)


def _kernel(body, batch, length, outputs, scratch):
    return plgpu.kernel(
        body,
        out_type=outputs,
        scratch_types=[plgpu.SMEM((128,), _i32), *scratch],
        grid=(length, batch),
        grid_names=("query", "batch"),
        num_threads=THREADS // 128,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=LANE, unsafe_no_auto_barriers=True),
    )


def _pick_interpreted(found: Segments, need_BT, state, topk: int):
    """`pick` as a plain sort of arrays."""
    floor_BT, tie_BT, best_BTk, kept_BTk = state
    capacity = found.rank_BTnc.shape[-1]
    inside = jnp.arange(capacity) < found.count_BTn[..., None]
    flat = lambda x: x.reshape(*x.shape[:2], -1)  # noqa: E731
    big = jnp.int32(2**31 - 1)
    rank = flat(jnp.where(inside, found.rank_BTnc, -jnp.inf))
    at = flat(jnp.where(inside, found.at_BTnc, big))
    over_BT = (found.count_BTn > capacity).any(-1)
    found_BT = jnp.minimum(found.count_BTn, capacity).sum(-1)
    falling, at = lax.sort((-rank, at), num_keys=2)
    size = best_BTk.shape[-1]
    pad = [(0, 0), (0, 0), (0, max(0, size - at.shape[-1]))]
    place = jnp.arange(size) < topk
    rank = jnp.pad(-falling, pad, constant_values=-jnp.inf)[..., :size]
    at = jnp.pad(at, pad, constant_values=big)[..., :size]
    rank, at = jnp.where(place, rank, -jnp.inf), jnp.where(place, at, big)
    last = jnp.clip(jnp.minimum(found_BT, topk) - 1, 0)[..., None]
    least, tie = (jnp.take_along_axis(x, last, -1)[..., 0] for x in (rank, at))
    many = found_BT >= topk
    again = over_BT & many
    lost = ((over_BT & ~many) | (found_BT < need_BT)) & ~again
    floor = jnp.where(again, least, jnp.where(lost, -jnp.inf, jnp.inf))
    at, rank = lax.sort((at, rank), num_keys=1)
    at = jnp.where(at == big, -1, at)
    done = floor_BT == jnp.inf
    return (
        jnp.where(done, floor_BT, floor),
        jnp.where(done, tie_BT, jnp.where(again, tie, big)),
        jnp.where(done[..., None], best_BTk, rank),
        jnp.where(done[..., None], kept_BTk, at),
    )
