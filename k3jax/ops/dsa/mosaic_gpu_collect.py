"""Index scores on a Hopper GPU that never leave the chip: only those above a floor are kept.

A block has a few queries and a share of the tiles of 128 index keys. One warpgroup fetches, two
take 64 keys each: scores of a tile are one warpgroup product [64 keys, 32 heads x queries] in
registers, where ReLU, head weights and the sum over heads follow, heads in one order for every key.
What is kept goes to the next free place of the query's segment, one a warpgroup. While one
warpgroup sums, the other one multiplies: they take turns.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from k3jax.ops.dsa.mosaic_gpu_keep import HEADS, keep
from k3jax.ops.mosaic_gpu import COLUMNS, LANE, Interpret, mode, smem
from k3jax.ops.rows import Rows, Scaled

DIM = 128
TILE = 128  # keys
HALF = 64  # of a warpgroup
WARPGROUPS = 2  # that score; one more fetches
BUFFER_BYTES = 120 * 1024  # for tiles in flight
STRIDE = 37  # places that blocks move on by; odd, and no divisor of what texts repeat by
MOST = 4096  # topk
_f32, _i32 = jnp.float32, jnp.int32


class Segments(NamedTuple):
    """What a scan over keys leaves. n segments a query, of a warpgroup of a block each.

    Attributes:
      rank_BTnc: float32 `xla.ranked` scores in any order, ``count`` of them; then anything.
      at_BTnc: int32 key positions.
      count_BTn: int32 keys that belonged there; those past c were dropped.
    """

    rank_BTnc: Any
    at_BTnc: Any
    count_BTn: Any


class Inputs(NamedTuple):
    """What a scan reads, as arrays or as references; see `collect`."""

    q: Any  # [B, T heads, K]
    w: Any  # [B, T heads]
    limit: Any  # [B, T]
    floor: Any
    tie: Any
    keys: Any  # [L, N, P, K]
    factors: Any  # [L, N, P] or None
    pages: Any  # [B, M]
    layer: Any  # [1]


class Scratch(NamedTuple):
    """Shared memory and barriers of a block."""

    q: Any
    w: Any
    keys: Any
    factors: Any
    floor: Any
    tie: Any
    limit: Any
    count: Any
    arrived: Any
    ready: Any
    free: Any
    turn: Any


class Options(NamedTuple):
    """Sizes of a scan.

    Attributes:
      queries: of a block.
      splits: blocks that share the keys.
      capacity: places of a segment.
      length: keys.
      page: rows of an entry of the stack.
      run: rows of one copy.
      stages: tiles in flight.
      everything: the rank of every key is kept, [B, T, S].
      specialised: warpgroups get registers by what they do.
    """

    queries: int
    splits: int
    capacity: int
    length: int
    page: int
    run: int
    stages: int
    everything: bool = False
    specialised: bool = True


def scan(
    split, group, batch, inputs: Inputs, found: Segments, scratch: Scratch, o: Options, interpret
):
    """A block's part, inside a kernel of three warpgroups."""
    warpgroup = lax.axis_index("warpgroup")
    first, columns, layer = group * o.queries, o.queries * HEADS, inputs.layer[0]
    # A query that has what it needs (its floor is NaN) sees no key.
    floors = [inputs.floor[batch, first + x] for x in range(o.queries)]
    limits = [
        jnp.where(floor == floor, inputs.limit[batch, first + x], -1)
        for x, floor in enumerate(floors)
    ]
    last = functools.reduce(jnp.maximum, limits)
    last = jnp.int32(o.length - 1) if o.everything else jnp.minimum(last, o.length - 1)
    turns = lax.div(lax.div(last + TILE, TILE) + (o.splits - 1), o.splits)

    def tile(n):
        """A block's n-th tile. Blocks change places each time, so that what repeats in a text at
        equal distances does not end up in one block."""
        return n * o.splits + lax.rem(split + n * STRIDE, o.splits)

    @pl.when(warpgroup == WARPGROUPS)
    def _():
        if o.specialised:
            plgpu.set_max_registers(40, action="decrease")

        @pl.when(turns > 0)
        def _():
            here = pl.ds(first * HEADS, columns)
            plgpu.copy_gmem_to_smem(inputs.q.at[batch, here], scratch.q, scratch.arrived)
            plgpu.copy_gmem_to_smem(inputs.w.at[batch, here], scratch.w, scratch.arrived)

        def fetch(n, _):
            stage = lax.rem(n, o.stages)

            @pl.when(n >= o.stages)
            def _():
                plgpu.barrier_wait(scratch.free.at[stage])

            for begin in range(0, TILE, o.run):
                row = tile(n) * TILE + begin
                entry = inputs.pages[batch, lax.div(jnp.minimum(row, o.length - 1), o.page)]
                rows, there = pl.ds(lax.rem(row, o.page), o.run), pl.ds(begin, o.run)
                for source, target in (
                    (inputs.keys, scratch.keys),
                    (inputs.factors, scratch.factors),
                ):
                    if target is not None:
                        plgpu.copy_gmem_to_smem(
                            source.at[layer, entry, rows],
                            target.at[stage, there],
                            scratch.ready.at[stage],
                        )

        lax.fori_loop(0, turns, fetch, None)

    @pl.when(warpgroup < WARPGROUPS)
    def _():
        if o.specialised:
            plgpu.set_max_registers(232, action="increase")
        segment = split * WARPGROUPS + warpgroup
        for x in range(o.queries):
            scratch.count[warpgroup, x] = jnp.int32(0)
            scratch.floor[warpgroup, x] = inputs.floor[batch, first + x]
            scratch.tie[warpgroup, x] = inputs.tie[batch, first + x]
            scratch.limit[warpgroup, x] = limits[x]
        plgpu.commit_smem()

        @pl.when(turns > 0)
        def _():
            plgpu.barrier_wait(scratch.arrived)

        weights_N = plgpu.load(scratch.w, layout=COLUMNS)

        def score(n, _):
            stage, half = lax.rem(n, o.stages), pl.ds(warpgroup * HALF, HALF)
            plgpu.barrier_wait(scratch.ready.at[stage])

            @pl.when((warpgroup == 1) | (n > 0))
            def _():
                plgpu.barrier_wait(scratch.turn.at[warpgroup])

            def pass_on():
                @pl.when((warpgroup == 0) | (n + 1 < turns))
                def _():
                    plgpu.barrier_arrive(scratch.turn.at[1 - warpgroup])

            keys = scratch.keys.at[stage, half]
            dots_MN = _dots(keys, scratch.q, then=pass_on, interpret=interpret)
            factors = None if scratch.factors is None else scratch.factors.at[stage, half]
            start = tile(n) * TILE + warpgroup * HALF
            keep(
                *(dots_MN, weights_N, factors, scratch.limit, scratch.floor, scratch.tie),
                *(found.rank_BTnc, found.at_BTnc, scratch.count),
                *(batch, first, segment, warpgroup, start),
                queries=o.queries,
                capacity=o.capacity,
                length=o.length,
                everything=o.everything,
                interpret=interpret,
            )

            @pl.when(n + o.stages < turns)
            def _():
                plgpu.barrier_arrive(scratch.free.at[stage])

        lax.fori_loop(0, turns, score, None)
        if not o.everything:
            plgpu.commit_smem()
            for x in range(o.queries):
                found.count_BTn[batch, first + x, segment] = scratch.count[warpgroup, x]


def _dots(keys, q, *, then, interpret):
    """Keys times queries, [64, N] in float32; ``then`` runs once the product is under way."""
    if interpret:
        then()
        a, b = (x[...].astype(_f32) for x in (keys, q))
        return lax.dot_general(a, b, (((1,), (1,)), ((), ())), precision=lax.Precision.HIGHEST)

    def scoped(accumulator):
        plgpu.wgmma(accumulator, keys, q.transpose((1, 0)))
        then()
        plgpu.wgmma_wait(0)
        return accumulator[...]

    return pl.run_scoped(scoped, plgpu.ACC((HALF, q.shape[0]), _f32))


def views(rows: Rows | Scaled) -> tuple[Rows, Rows | None]:
    """(keys or their codes, factors or None)."""
    return (rows.codes, rows.factors) if isinstance(rows, Scaled) else (rows, None)


def refusal(q_BTHK, rows: Rows | Scaled, w_BTH, topk: int) -> str | None:
    """Why the kernel cannot take these inputs; None if it can."""
    del w_BTH
    heads, dim = q_BTHK.shape[2:]
    if (heads, dim) != (HEADS, DIM):
        return f"{heads} heads of {dim}, not {HEADS} of {DIM}"
    codes, factors = views(rows)
    if codes.dtype not in (jnp.bfloat16, jnp.float8_e4m3fn) or q_BTHK.dtype != codes.dtype:
        return f"queries are {q_BTHK.dtype} and keys {codes.dtype}, not bfloat16 or float8_e4m3fn"
    page = codes.page
    rows_of_copy = 8 if factors is None else 32  # factors go to 128 bytes each time
    if codes.table_BM is not None and page % rows_of_copy:
        return f"pages of {page} rows, no multiple of {rows_of_copy}"
    if factors is not None and page % 4:
        return f"an entry of {page} factors, no multiple of 16 bytes"
    if topk > MOST:
        return f"topk is {topk}, over {MOST}"
    return None


def inputs_of(q_BTHK, rows: Rows | Scaled, w_BTH, limit_BT, floor, tie) -> Inputs:
    """The arrays that a scan reads; floor and tie may be references."""
    codes, factors = views(rows)
    batch, length = limit_BT.shape

    def stack(x):
        return x if x.ndim == 4 else x[None]

    return Inputs(
        q=q_BTHK.reshape(batch, length * HEADS, DIM),
        w=w_BTH.reshape(batch, length * HEADS),
        limit=limit_BT,
        floor=floor,
        tie=tie,
        keys=stack(codes.stack),
        factors=None if factors is None else stack(factors.stack)[..., 0],
        pages=codes.pages(),
        layer=jnp.zeros((1,), _i32) if codes.layer is None else codes.layer.reshape(1),
    )


def options_of(rows: Rows | Scaled, queries: int, splits: int, capacity: int, **others) -> Options:
    """With as many tiles in flight as there is room for."""
    codes, _ = views(rows)
    size = TILE * (DIM * jnp.dtype(codes.dtype).itemsize + 4)
    stages = max(2, min(8, BUFFER_BYTES // size))
    # A copy must not go on behind a page; behind the only one it reads zeros.
    run = TILE if codes.table_BM is None else math.gcd(codes.page, TILE)
    keys = codes.shape[1]
    return Options(queries, splits, capacity, keys, codes.page, run, stages, **others)


def scratch_of(rows: Rows | Scaled, o: Options) -> Scratch:
    """Types of the shared memory of a scan."""
    scaled, dtype = isinstance(rows, Scaled), rows.dtype
    columns, copies = o.queries * HEADS, TILE // o.run
    numbers = plgpu.SMEM((WARPGROUPS, o.queries), _i32)
    return Scratch(
        q=smem((columns, DIM), dtype),
        w=plgpu.SMEM((columns,), _f32),
        keys=smem((o.stages, TILE, DIM), dtype),
        factors=plgpu.SMEM((o.stages, TILE), _f32) if scaled else None,
        floor=plgpu.SMEM((WARPGROUPS, o.queries), _f32),
        tie=numbers,
        limit=numbers,
        count=numbers,
        arrived=plgpu.Barrier(num_arrivals=2),
        ready=plgpu.Barrier(num_arrivals=copies * (2 if scaled else 1), num_barriers=o.stages),
        free=plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=o.stages),
        turn=plgpu.Barrier(num_arrivals=1, num_barriers=WARPGROUPS),
    )


def segments_of(batch: int, length: int, o: Options) -> Segments:
    """Shapes of what a scan leaves."""
    shape = (batch, length, o.splits * WARPGROUPS)
    return Segments(
        jax.ShapeDtypeStruct((*shape, o.capacity), _f32),
        jax.ShapeDtypeStruct((*shape, o.capacity), _i32),
        jax.ShapeDtypeStruct(shape, _i32),
    )


def collect(
    q_BTHK: Array,
    rows: Rows | Scaled,
    w_BTH: Array,
    limit_BT: Array,
    floor_BT: Array,
    tie_BT: Array,
    *,
    queries: int,
    splits: int,
    capacity: int,
    interpret: Interpret = False,
) -> Segments:
    """Keys whose rank is above a floor, or equal to it up to a position.

    Args:
      q_BTHK, rows, w_BTH: as a kernel of `k3jax.ops.dsa.SELECT` gets them; T a multiple of
        ``queries``.
      limit_BT: int32 last key that competes, -1 for none.
      floor_BT: float32; nothing is kept where it is NaN.
      tie_BT: int32 last key that is kept among those whose rank is the floor.
      queries: of a block, 1, 2, 4 or 8.
      splits: blocks that share the keys.
      capacity: places of a segment.
    """
    options = options_of(rows, queries, splits, capacity)
    batch, length = limit_BT.shape
    return _call(segments_of(batch, length, options), options, interpret)(
        rows, inputs_of(q_BTHK, rows, w_BTH, limit_BT, floor_BT, tie_BT)
    )


def ranks(
    q_BTHK, rows: Rows | Scaled, w_BTH, limit_BT, *, queries, splits, interpret: Interpret = False
) -> Array:
    """float32 [B, T, S] ranks of all keys, -inf past the limit. For few keys."""
    options = options_of(rows, queries, splits, 1, everything=True)
    unused = (jnp.zeros(limit_BT.shape, _f32), jnp.zeros_like(limit_BT))
    shape = jax.ShapeDtypeStruct((*limit_BT.shape, options.length), _f32)
    return _call(shape, options, interpret)(rows, inputs_of(q_BTHK, rows, w_BTH, limit_BT, *unused))


def _call(outputs, options: Options, interpret: Interpret):
    def run(rows, inputs: Inputs):
        scratch = scratch_of(rows, options)
        sizes = [len(jax.tree.leaves(x)) for x in (inputs, outputs)]
        (batch, length) = inputs.limit.shape

        def body(*refs):
            read, found, own = refs[: sizes[0]], refs[sizes[0] : sum(sizes)], refs[sum(sizes) :]
            found = Segments(*(found if len(found) == 3 else found * 3))
            scan(
                *(lax.axis_index("split"), lax.axis_index("group"), lax.axis_index("batch")),
                *(unpacked(inputs, read), found, unpacked(scratch, own), options, interpret),
            )

        return plgpu.kernel(
            body,
            out_type=outputs,
            scratch_types=[x for x in scratch if x is not None],
            grid=(options.splits, length // options.queries, batch),
            grid_names=("split", "group", "batch"),
            num_threads=WARPGROUPS + 1,
            thread_name="warpgroup",
            compiler_params=plgpu.CompilerParams(
                lowering_semantics=LANE, approx_math=True, unsafe_no_auto_barriers=True
            ),
            interpret=mode(interpret),
        )(*[x for x in inputs if x is not None])

    return run


def unpacked(like, refs):
    """The tuple of references in the places where ``like`` has something."""
    left = iter(refs)
    return type(like)(*[None if x is None else next(left) for x in like])
