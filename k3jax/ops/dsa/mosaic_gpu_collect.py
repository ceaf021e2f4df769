"""Index scores on a Hopper GPU that never leave the chip: only those above a threshold are kept.

A block has a few queries and every n-th tile of 128 index keys. One warpgroup fetches, two take 64
keys each: scores of a tile are one warpgroup product [64 keys, 32 heads x queries] in registers,
where ReLU, head weights and the sum over heads follow, heads in one order for every key. A score at
or above its query's threshold goes to the next free place of the query's segment, one a warpgroup.
While one warpgroup sums, the other one multiplies (they take turns).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from k3jax.ops.dsa import mosaic_gpu_lanes as lanes
from k3jax.ops.dsa.mosaic_gpu_lanes import HEADS
from k3jax.ops.mosaic_gpu import COLUMNS, LANE, Interpret, mode, smem
from k3jax.ops.rows import Rows, Scaled

DIM = 128
TILE = 128  # keys
HALF = 64  # of a warpgroup
WARPGROUPS = 2  # that score; one more fetches
BUFFER_BYTES = 120 * 1024  # for tiles in flight
MOST = 4096  # topk
_f32, _i32 = jnp.float32, jnp.int32


class Segments(NamedTuple):
    """What a scan over keys leaves. n segments a query, of a warpgroup of a block each.

    Attributes:
      rank_BTnc: float32 `xla.ranked` scores in any order, ``count`` of them; then anything.
      at_BTnc: int32 key positions.
      count_BTn: int32 keys that belonged there; those past c were dropped.
    """

    rank_BTnc: Array
    at_BTnc: Array
    count_BTn: Array


def _kernel(
    q_g, w_g, floor_g, tie_g, limit_g, keys_g, factor_g, pages_g, layer_g, rank_g, at_g, count_g,
    q_s, w_s, keys_s, factor_s, floors_s, ties_s, limits_s, count_s, arrived, ready, free, turn,
    *, queries, splits, stages, capacity, length, page, everything, interpret,
):  # fmt: skip
    split, group = lax.axis_index("split"), lax.axis_index("group")
    batch, warpgroup = lax.axis_index("batch"), lax.axis_index("warpgroup")
    first, columns, layer = group * queries, queries * HEADS, layer_g[0]
    limits = [
        jnp.where(floor_g[batch, first + x] < jnp.inf, limit_g[batch, first + x], -1)
        for x in range(queries)
    ]
    last = functools.reduce(jnp.maximum, limits)
    last = jnp.int32(length - 1) if everything else jnp.minimum(last, length - 1)
    tiles = lax.div(last + TILE, TILE)
    turns = lax.div(tiles + (splits - 1), splits)

    def tile(n):
        """A block's n-th tile. Blocks change places each time, so that what repeats in a text at
        equal distances does not end up in one block."""
        return n * splits + lax.rem(split + n * 37, splits)

    @pl.when(warpgroup == WARPGROUPS)
    def _():
        plgpu.set_max_registers(40, action="decrease")

        @pl.when(turns > 0)
        def _():
            here = pl.ds(first * HEADS, columns)
            plgpu.copy_gmem_to_smem(q_g.at[batch, here], q_s, arrived)
            plgpu.copy_gmem_to_smem(w_g.at[batch, here], w_s, arrived)

        def fetch(n, _):
            stage = lax.rem(n, stages)

            @pl.when(n >= stages)
            def _():
                plgpu.barrier_wait(free.at[stage])

            for begin in range(0, TILE, min(page, TILE)):
                row = tile(n) * TILE + begin
                entry = pages_g[batch, lax.div(jnp.minimum(row, length - 1), page)]
                rows, there = (
                    pl.ds(lax.rem(row, page), min(page, TILE)),
                    pl.ds(begin, min(page, TILE)),
                )
                for source, target in ((keys_g, keys_s), (factor_g, factor_s)):
                    if target is not None:
                        plgpu.copy_gmem_to_smem(
                            source.at[layer, entry, rows], target.at[stage, there], ready.at[stage]
                        )

        lax.fori_loop(0, turns, fetch, None)

    @pl.when(warpgroup < WARPGROUPS)
    def _():
        plgpu.set_max_registers(232, action="increase")
        segment = split * WARPGROUPS + warpgroup
        where = (batch, first, segment, warpgroup)
        for x in range(queries):
            count_s[warpgroup, x] = jnp.int32(0)
            floors_s[warpgroup, x] = floor_g[batch, first + x]
            ties_s[warpgroup, x] = tie_g[batch, first + x]
            limits_s[warpgroup, x] = limits[x]
        plgpu.commit_smem()

        @pl.when(turns > 0)
        def _():
            plgpu.barrier_wait(arrived)

        weights_N = plgpu.load(w_s, layout=COLUMNS)

        def score(n, _):
            stage, half = lax.rem(n, stages), pl.ds(warpgroup * HALF, HALF)
            plgpu.barrier_wait(ready.at[stage])

            @pl.when((warpgroup == 1) | (n > 0))
            def _():
                plgpu.barrier_wait(turn.at[warpgroup])

            def pass_on():
                @pl.when((warpgroup == 0) | (n + 1 < turns))
                def _():
                    plgpu.barrier_arrive(turn.at[1 - warpgroup])

            dots_MN = _dots(keys_s.at[stage, half], q_s, then=pass_on, interpret=interpret)
            factor = None if factor_s is None else factor_s.at[stage, half]
            start = tile(n) * TILE + warpgroup * HALF
            lanes.keep(
                *(dots_MN, weights_N, factor, limits_s, floors_s, ties_s, rank_g, at_g, count_s),
                *(*where, start),
                queries=queries,
                capacity=capacity,
                length=length,
                everything=everything,
                interpret=interpret,
            )

            @pl.when(n + stages < turns)
            def _():
                plgpu.barrier_arrive(free.at[stage])

        lax.fori_loop(0, turns, score, None)
        if not everything:
            plgpu.commit_smem()
            for x in range(queries):
                count_g[batch, first + x, segment] = count_s[warpgroup, x]


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


def refusal(q_BTHK, rows: Rows | Scaled, w_BTH, topk: int) -> str | None:
    """Why the kernel cannot take these inputs; None if it can."""
    del w_BTH
    heads, dim = q_BTHK.shape[2:]
    if (heads, dim) != (HEADS, DIM):
        return f"{heads} heads of {dim}, not {HEADS} of {DIM}"
    codes = rows.codes if isinstance(rows, Scaled) else rows
    if codes.dtype not in (jnp.bfloat16, jnp.float8_e4m3fn) or q_BTHK.dtype != codes.dtype:
        return f"queries are {q_BTHK.dtype} and keys {codes.dtype}, not bfloat16 or float8_e4m3fn"
    page = codes.page
    if codes.table_BM is not None and (page % TILE and (TILE % page or page < 16)):
        return f"pages of {page} rows, neither a multiple of {TILE} nor 16, 32 or 64"
    if topk > MOST:
        return f"topk is {topk}, over {MOST}"
    return None


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
    everything: bool = False,
    interpret: Interpret = False,
) -> Segments | Array:
    """Keys whose rank is above a floor, or equal to it up to a position.

    Args:
      q_BTHK, rows, w_BTH: as a kernel of `k3jax.ops.dsa.SELECT` gets them; T a multiple of
        ``queries``.
      limit_BT: int32 last key that competes, -1 for none.
      floor_BT: float32.
      tie_BT: int32 last key that is kept among those whose rank is the floor.
      queries: of a block, 1, 2, 4 or 8.
      splits: blocks that share the keys.
      capacity: places of a segment.
      everything: give the rank of every key instead, [B, T, S], -inf past the limit.
    """
    codes, factors = (rows.codes, rows.factors) if isinstance(rows, Scaled) else (rows, None)
    batch, length = limit_BT.shape
    keys, page = codes.shape[1], codes.page
    stack = lambda x: x if x.ndim == 4 else x[None]  # noqa: E731
    layer = jnp.zeros((1,), _i32) if codes.layer is None else codes.layer.reshape(1)
    sources = [stack(codes.stack)]
    if factors is not None:
        sources.append(stack(factors.stack)[..., 0])
    columns, size = queries * HEADS, jnp.dtype(codes.dtype).itemsize
    stages = max(2, min(8, BUFFER_BYTES // (TILE * (DIM * size + 4))))
    parts = max(1, TILE // page)
    segments = splits * WARPGROUPS
    shapes = Segments(
        jax.ShapeDtypeStruct((batch, length, segments, capacity), _f32),
        jax.ShapeDtypeStruct((batch, length, segments, capacity), _i32),
        jax.ShapeDtypeStruct((batch, length, segments), _i32),
    )
    if everything:
        shapes = jax.ShapeDtypeStruct((batch, length, keys), _f32)
    options = {
        "queries": queries, "splits": splits, "stages": stages, "capacity": capacity,
        "length": keys, "page": page, "everything": everything, "interpret": interpret,
    }  # fmt: skip

    def body(q_g, w_g, floor_g, tie_g, limit_g, *refs):
        keys_g, *refs = refs
        factor_g = None
        if factors is not None:
            factor_g, *refs = refs
        pages_g, layer_g, *refs = refs
        if everything:
            rank_g, at_g, count_g, *refs = refs[0], refs[0], refs[0], *refs[1:]
        else:
            rank_g, at_g, count_g, *refs = refs
        q_s, w_s, keys_s, *refs = refs
        factor_s = None
        if factors is not None:
            factor_s, *refs = refs
        _kernel(
            q_g, w_g, floor_g, tie_g, limit_g, keys_g, factor_g, pages_g, layer_g, rank_g, at_g, count_g,
            q_s, w_s, keys_s, factor_s, *refs, **options,
        )  # fmt: skip

    scratch = [
        smem((columns, DIM), codes.dtype),
        plgpu.SMEM((columns,), _f32),
        smem((stages, TILE, DIM), codes.dtype),
        *([] if factors is None else [plgpu.SMEM((stages, TILE), _f32)]),
        plgpu.SMEM((WARPGROUPS, queries), _f32),
        *[plgpu.SMEM((WARPGROUPS, queries), _i32)] * 3,
        plgpu.Barrier(num_arrivals=2),
        plgpu.Barrier(num_arrivals=parts * (1 if factors is None else 2), num_barriers=stages),
        plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages),
        plgpu.Barrier(num_arrivals=1, num_barriers=WARPGROUPS),
    ]
    return plgpu.kernel(
        body,
        out_type=shapes,
        scratch_types=scratch,
        grid=(splits, length // queries, batch),
        grid_names=("split", "group", "batch"),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=LANE, approx_math=True, unsafe_no_auto_barriers=True
        ),
        interpret=mode(interpret),
    )(
        q_BTHK.reshape(batch, length * HEADS, DIM),
        w_BTH.reshape(batch, length * HEADS),
        floor_BT,
        tie_BT,
        limit_BT,
        *sources,
        codes.pages(),
        layer,
    )
