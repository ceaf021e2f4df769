"""The best k of some thousand candidates a query, in ascending order of position.

A block of 1,024 threads holds the candidates of a query in registers, eight a thread, finds the
k-th best rank bit by bit, counts down ties by position, and sorts what is left. No step depends on
how the ranks lie. Written thread by thread in MLIR; interpret mode runs a plain sort.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from k3jax.ops.dsa.mosaic_gpu_block import LEAST, TOTALS, Block
from k3jax.ops.dsa.mosaic_gpu_collect import Segments
from k3jax.ops.dsa.xla import ordered, unordered
from k3jax.ops.mosaic_gpu import LANE, Interpret
from k3jax.ops.mosaic_gpu_lanes import REF, SCALAR, Lane

THREADS = 1024
MOST = 8192  # candidates of a query
SAMPLE = 16384  # most ranks of `floor`
_GREATEST = 2**31 - 1
_NONE = LEAST + 0x7FFFFF  # `ordered` of -inf
_i32 = jnp.int32


def _floor_kernel(rank_g, wanted_g, position_g, floor_g, counters_s, sums_s, *, least):
    @plgpu.inline_mgpu(arg_types=(*[REF] * 6, SCALAR, SCALAR))
    def body(_, rank_g, wanted_g, position_g, floor_g, counters_s, sums_s, batch, query):
        block = Block(THREADS, counters_s, sums_s)
        where = (block.scalar(batch), block.scalar(query))
        places = block.mine(block.shape(rank_g)[-1])
        ranks = [block.load(rank_g, *where, place) for place, _ in places]
        keys = [block.flip(block.arith.bitcast(block.i32, rank)) for rank in ranks]
        # 8 bits of the mantissa are enough: the floor may be a little lower than asked for.
        there = [inside for _, inside in places]
        limit = block.greatest(keys, there, block.load(wanted_g, *where), low=15)
        value = block.arith.bitcast(block.f32, block.flip(limit))
        none = block.arith.ori(
            block.less(block.load(position_g, *where), least), block.less(limit, _NONE + 1)
        )
        value = block.arith.select(none, block.float(float("-inf")), value)
        with block.utils.when(block.equal(block.thread, block.int(0))):
            block.store(value, floor_g, *where)

    refs = (rank_g, wanted_g, position_g, floor_g, counters_s, sums_s)
    where = (lax.axis_index("batch"), lax.axis_index("query"))
    body(*refs, *where)  # pyright: ignore[reportCallIssue]  # it passes the first one itself


def floor(
    rank_BTS: Array,
    wanted_BT: Array,
    positions_BT: Array,
    least: int,
    *,
    interpret: Interpret = False,
) -> Array:
    """float32_BT that at least ``wanted`` of the ranks are not below, and few more.

    -inf where there are not so many, and for positions below ``least``. S a multiple of `THREADS`,
    at most `SAMPLE`.
    """
    batch, length, _ = rank_BTS.shape
    if interpret:
        falling = -jnp.sort(-rank_BTS, axis=-1)
        value_BT = jnp.take_along_axis(falling, wanted_BT[..., None] - 1, -1)[..., 0]
        key_BT = ordered(value_BT) & ~0x7FFF
        few_BT = (key_BT <= _NONE) | (positions_BT < least)
        return jnp.where(few_BT, -jnp.inf, unordered(key_BT))
    shape = jax.ShapeDtypeStruct((batch, length), jnp.float32)
    body = functools.partial(_floor_kernel, least=least)
    kernel = _kernel(body, batch, length, shape, scratch_of(1, 1)[:2])
    return kernel(rank_BTS, wanted_BT, positions_BT)


class Picked(NamedTuple):
    """What `best_of` reads and writes, as references.

    Attributes:
      position: [B, T], see `pick`.
      floor, tie, rank, at: the state.
    """

    position: Any
    floor: Any
    tie: Any
    rank: Any
    at: Any


class Scratch(NamedTuple):
    """Shared memory of `best_of`.

    Attributes:
      base, kept: [n] where a segment begins, and how many of it there is room for.
      keys, at: [MOST] candidates. Positions of those that are chosen take the place of the keys.
      rank: [k].
    """

    counters: Any
    sums: Any
    base: Any
    kept: Any
    keys: Any
    at: Any
    rank: Any


def results(topk: int) -> int:
    """Places for the best topk: a power of two, and one for each thread."""
    return max(THREADS, 1 << (topk - 1).bit_length())


def most_keys(topk: int) -> int:
    """Positions that fit into 32 bits beside a place, all ones left out."""
    return (1 << 32) // results(topk) - 1


def scratch_of(segments: int, size: int) -> Scratch:
    """Types of the shared memory for n segments and k results."""
    sizes = (3, (TOTALS, 32), segments, segments, max(MOST, size), MOST, size)
    return Scratch(*[plgpu.SMEM(n if isinstance(n, tuple) else (n,), _i32) for n in sizes])


def best_of(found: Segments, refs: Picked, scratch: Scratch, batch, query, topk: int, threads: int):
    """A query's round, by all ``threads`` of a block inside a kernel; see `pick`."""
    arguments = (*found, *refs, *scratch)

    @plgpu.inline_mgpu(arg_types=(*[REF] * len(arguments), SCALAR, SCALAR))
    def body(_, *arguments):
        *refs, batch, query = arguments
        found, picked, scratch = Segments(*refs[:3]), Picked(*refs[3:8]), Scratch(*refs[8:])
        lane = Lane()
        where = (lane.scalar(batch), lane.scalar(query))
        floor = lane.load(picked.floor, *where)
        unfinished = lane.arith.cmpf(lane.arith.CmpFPredicate.ORD, floor, floor)
        with lane.utils.when(unfinished):
            block = Block(threads, scratch.counters, scratch.sums)
            _best_of(block, where, topk, found, picked, scratch)

    body(*arguments, batch, query)


_OVER, _FOUND, _PLACE = range(3)  # counters


def _best_of(block, where, topk, found: Segments, refs: Picked, scratch: Scratch):
    arith = block.arith
    *_, segments, capacity = block.shape(found.rank_BTnc)
    size = block.shape(refs.at)[-1]
    # Where each segment begins among all candidates: any order will do.
    for segment, inside in block.mine(segments):
        with block.utils.when(inside):
            count = block.load(found.count_BTn, *where, segment)
            kept = arith.minsi(count, block.int(capacity))
            over = block.number(block.less(kept, count))
            begin = block.grow(scratch.counters, block.int(_FOUND), kept)
            block.store(begin, scratch.base, segment)
            block.store(kept, scratch.kept, segment)
            block.grow(scratch.counters, block.int(_OVER), over)
    block.wait()
    number = block.load(scratch.counters, _FOUND)
    over = arith.ori(
        block.load(scratch.counters, _OVER), block.number(block.less(block.int(MOST), number))
    )
    number = arith.minsi(number, block.int(MOST))
    slots = block.mine(segments * capacity)
    for begin in range(0, len(slots), 8):
        # Loads first, so that they are under way together; more would not fit in registers.
        loaded = []
        for slot, inside in slots[begin : begin + 8]:
            segment, place = block.over(arith.select(inside, slot, block.int(0)), capacity)
            values = [
                block.load(ref, *where, segment, place) for ref in (found.rank_BTnc, found.at_BTnc)
            ]
            loaded.append((segment, place, inside, *values))
        for segment, place, inside, rank, at in loaded:
            target = block.add(block.load(scratch.base, segment), place)
            real = block.less(place, block.load(scratch.kept, segment))
            room = arith.andi(inside, block.less(target, MOST))
            with block.utils.when(arith.andi(real, room)):
                key = block.flip(arith.bitcast(block.i32, rank))
                block.store(key, scratch.keys, target)
                block.store(at, scratch.at, target)
    block.wait()
    keys, ats, there = [], [], []
    for place, inside in block.mine(MOST):
        place = arith.select(inside, place, block.int(0))
        there.append(arith.andi(inside, block.less(place, number)))
        keys.append(block.load(scratch.keys, place))
        ats.append(block.load(scratch.at, place))
    wanted = arith.minsi(number, block.int(topk))
    least = block.greatest(keys, there, wanted)
    above = [arith.andi(t, block.less(least, key)) for key, t in zip(keys, there, strict=True)]
    equals = [arith.andi(t, block.equal(key, least)) for key, t in zip(keys, there, strict=True)]
    ties, equal = arith.subi(wanted, block.total(above)), block.total(equals)

    def last_tie():
        """The greatest complement of a position is the least position."""
        late = [arith.xori(at, block.int(-1)) for at in ats]
        return [arith.xori(block.greatest(late, equals, ties), block.int(-1))]

    (last,) = block.either(block.less(ties, equal), last_tie, [block.int(_GREATEST)])
    chosen = [
        arith.ori(a, arith.andi(e, block.not_less(last, at)))
        for a, e, at in zip(above, equals, ats, strict=True)
    ]
    places = block.next_places(chosen, _PLACE)
    # Position and place in one number, so that a sort moves one register a candidate.
    digits = (size - 1).bit_length()
    for place, inside in block.mine(size):
        with block.utils.when(inside):
            block.store(block.int(-1), scratch.keys, place)
    block.wait()
    for key, at, c, place in zip(keys, ats, chosen, places, strict=True):
        with block.utils.when(c):
            pair = arith.ori(arith.shli(at, block.int(digits)), place)
            block.store(pair, scratch.keys, place)
            block.store(key, scratch.rank, place)
    block.sort(scratch.keys, size)
    for place, inside in block.mine(size):
        with block.utils.when(inside):
            pair = block.load(scratch.keys, place)
            none = block.equal(pair, block.int(-1))
            source = arith.andi(pair, block.int(size - 1))
            rank = arith.bitcast(block.f32, block.flip(block.load(scratch.rank, source)))
            rank = arith.select(none, block.float(float("-inf")), rank)
            at = arith.select(none, block.int(-1), arith.shrui(pair, block.int(digits)))
            block.store(rank, refs.rank, *where, place)
            block.store(at, refs.at, *where, place)
    _next_floor(block, where, topk, number, over, least, last, refs)


def _next_floor(block, where, topk, found, over, least, last, refs: Picked):
    """What the next round needs: NaN if this one was enough; the k-th best of what there was room
    for, which is no more than the true k-th best; or everything if too few lay above the floor."""
    arith = block.arith
    over = arith.cmpi(arith.CmpIPredicate.ne, over, block.int(0))
    many = block.not_less(found, block.int(topk))
    keys = block.add(block.load(refs.position, *where), 1)
    few = block.less(found, arith.minsi(keys, block.int(topk)))
    value = arith.bitcast(block.f32, block.flip(least))
    floor, tie = block.float(float("nan")), block.int(_GREATEST)
    again = arith.andi(over, many)
    floor = arith.select(again, value, floor)
    tie = arith.select(again, last, tie)
    lost = arith.ori(arith.andi(over, arith.xori(many, block.true())), few)
    lost = arith.andi(lost, arith.xori(again, block.true()))
    floor = arith.select(lost, block.float(float("-inf")), floor)
    with block.utils.when(block.equal(block.thread, block.int(0))):
        block.store(floor, refs.floor, *where)
        block.store(tie, refs.tie, *where)


def pick(
    found: Segments, *, positions_BT: Array, state, topk: int, interpret: Interpret = False
) -> tuple[Array, Array, Array, Array]:
    """The best ``topk`` candidates of each query whose floor is not NaN, equal ranks by position.

    Args:
      positions_BT: int32; there must be topk candidates, or all keys up to the position.
      state: (floor_BT, last tie_BT), and after the first round also (rank_BTk, at_BTk), k of
        `results`.

    Returns:
      the state of the next round: where this one was enough the floor is NaN, and ranks and
      positions are there, by position, then -inf and -1. Else floor and tie are those of the k-th
      best candidate there was room for, or -inf if too few were found.
    """
    if interpret:
        return _pick_interpreted(found, positions_BT, state, topk)
    batch, length, segments, _ = found.rank_BTnc.shape
    scratch = scratch_of(segments, results(topk))

    def body(*refs):
        found, picked, scratch = Segments(*refs[:3]), Picked(*refs[3:8]), Scratch(*refs[8:])
        where = (lax.axis_index("batch"), lax.axis_index("query"))
        best_of(found, picked, scratch, *where, topk, THREADS)

    refs = [jax.new_ref(x) for x in state]
    # The first round writes every result, so nothing has to stand there before.
    shape = (batch, length, results(topk))
    outputs = (jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct(shape, _i32))
    outputs = outputs if len(refs) == 2 else ()
    made = _kernel(body, batch, length, outputs, scratch)(*found, positions_BT, *refs)
    return (*[ref[...] for ref in refs], *(made if outputs else ()))


def _kernel(body, batch, length, outputs, scratch):
    return plgpu.kernel(
        body,
        out_type=outputs,
        scratch_types=scratch,
        grid=(length, batch),
        grid_names=("query", "batch"),
        num_threads=THREADS // 128,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=LANE, unsafe_no_auto_barriers=True),
    )


def _pick_interpreted(found: Segments, positions_BT, state, topk: int):
    """`pick` as a plain sort of arrays."""
    need_BT = jnp.minimum(topk, positions_BT + 1)
    if len(state) == 2:
        shape = (*positions_BT.shape, results(topk))
        state = (*state, jnp.zeros(shape), jnp.zeros(shape, _i32))
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
    floor = jnp.where(again, least, jnp.where(lost, -jnp.inf, jnp.nan))
    at, rank = lax.sort((at, rank), num_keys=1)
    at = jnp.where(at == big, -1, at)
    done = jnp.isnan(floor_BT)
    return (
        jnp.where(done, floor_BT, floor),
        jnp.where(done, tie_BT, jnp.where(again, tie, big)),
        jnp.where(done[..., None], best_BTk, rank),
        jnp.where(done[..., None], kept_BTk, at),
    )
