"""What the scan of the selection kernels keeps, decided thread by thread.

`keep` has two bodies: one in MLIR, and one on arrays for interpret mode on a CPU.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from k3jax.ops.dsa import xla
from k3jax.ops.mosaic_gpu import COLUMNS, WGMMA
from k3jax.ops.mosaic_gpu_lanes import REF, SCALAR, Lane

HEADS = 32
LOWEST = float(jnp.finfo(jnp.float32).min)  # rank of NaN; see `xla.ranked`
ABOVE = float(np.nextafter(np.float32(LOWEST), np.float32(0)))
_f32, _i32 = jnp.float32, jnp.int32


def keep(
    dots_MN, weights_N, factor_s, limits_s, floors_s, ties_s, rank_g, at_g, count_s, batch, first,
    segment, warpgroup, start, *, queries, capacity, length, everything, interpret,
):  # fmt: skip
    """Heads are summed, and what is above its query's floor goes to the segment, or what equals it
    and does not lie behind the last tie.

    Args:
      dots_MN: [64 keys, 32 queries], float32, WGMMA.
      weights_N: of heads, COLUMNS.
      factor_s: float32 [64] of the keys, or None.
      limits_s, floors_s, ties_s: last position (int32), floor (float32) and last tie (int32), of
        each warpgroup [2, queries].
      start: position of the first key.
      everything: every rank goes to ``rank_g[batch, query, position]`` instead, -inf past the
        last position.
    """
    if interpret:
        return _keep_interpreted(
            dots_MN, weights_N, factor_s, limits_s, floors_s, ties_s, rank_g, at_g, count_s, batch,
            first, segment, warpgroup, start, queries=queries, capacity=capacity, length=length,
            everything=everything,
        )  # fmt: skip
    refs = [limits_s, floors_s, ties_s, rank_g, at_g, count_s]
    if factor_s is not None:
        refs.append(factor_s)
    scalars = [batch, first, segment, warpgroup, start]

    @plgpu.inline_mgpu(arg_types=(WGMMA, COLUMNS, *[REF] * len(refs), *[SCALAR] * 5))
    def body(_, dots, weights, *arguments):
        lane = Lane()
        arith = lane.arith
        limits_s, floors_s, ties_s, rank_g, at_g, count_s, *factor = arguments[: len(refs)]
        batch, first, segment, warpgroup, start = map(lane.scalar, arguments[len(refs) :])
        pairs = dots.registers.reshape(-1, 2)  # [column / 8, row half], two columns each
        weights = weights.registers.reshape(-1)
        zero = lane.float(0.0)
        per_query = HEADS // 8

        def total(query, half):
            terms = []
            for tile in range(query * per_query, (query + 1) * per_query):
                for dot, weight in zip(
                    lane.elements(pairs[tile, half]), lane.elements(weights[tile]), strict=True
                ):
                    # maximumf keeps NaN, which must not become the score of a ReLU's zero.
                    terms.append((arith.maximumf(dot, zero), weight))
            value = arith.mulf(*terms[0])
            for relu, weight in terms[1:]:
                value = lane.fma(relu, weight, value)
            return value

        sums = [[total(query, half) for half in range(2)] for query in range(queries)]
        # Four threads hold a row's columns. Each step halves the queries that a thread sums.
        mine = lane.int(0)  # the first of this thread's queries
        for n in (1, 0):
            upper, half = lane.bit(lane.thread, n), len(sums) // 2
            if half == 0:
                sums = [
                    [arith.addf(x, lane.utils.shfl_bfly(x, 1 << n)) for x in row] for row in sums
                ]
                continue
            pick = lambda a, b: arith.select(upper, a, b)  # noqa: B023, E731
            sums = [
                [
                    arith.addf(pick(b, a), lane.utils.shfl_bfly(pick(a, b), 1 << n))
                    for a, b in zip(low, high, strict=True)
                ]
                for low, high in zip(sums[:half], sums[half:], strict=True)
            ]
            mine = arith.select(upper, lane.add(mine, half), mine)
        # Fewer than four queries: threads with the same sums, of which the first one keeps them.
        copies = max(1, 4 // queries)
        owner = lane.over(lane.thread, copies)[1] if copies > 1 else lane.int(0)
        owner = arith.cmpi(arith.CmpIPredicate.eq, owner, lane.int(0))
        warp, inner = lane.over(lane.thread, 32)
        row = lane.add(lane.times(warp, 16), lane.over(inner, 4)[0])
        found, any_found = [], None
        for half in range(2):
            place = lane.add(row, 8 * half)
            position = lane.add(start, place)
            for x, values in enumerate(sums):
                query = lane.add(mine, x)
                score = values[half]
                if factor:
                    score = arith.mulf(score, lane.load(factor[0], place))
                nan = arith.cmpf(arith.CmpFPredicate.UNO, score, score)
                score = arith.maxnumf(arith.addf(score, zero), lane.float(ABOVE))
                rank = arith.select(nan, lane.float(LOWEST), score)
                limit = lane.load(limits_s, warpgroup, query)
                early = arith.cmpi(arith.CmpIPredicate.sle, position, limit)
                if everything:
                    rank = arith.select(early, rank, lane.float(float("-inf")))
                    chosen = arith.andi(owner, lane.less(position, length))
                else:
                    floor = lane.load(floors_s, warpgroup, query)
                    above = arith.cmpf(arith.CmpFPredicate.OGT, rank, floor)
                    equal = arith.cmpf(arith.CmpFPredicate.OEQ, rank, floor)
                    tie = lane.load(ties_s, warpgroup, query)
                    before = arith.cmpi(arith.CmpIPredicate.sle, position, tie)
                    above = arith.ori(above, arith.andi(equal, before))
                    chosen = arith.andi(owner, arith.andi(above, early))
                found.append((chosen, rank, query, position))
                any_found = chosen if any_found is None else arith.ori(any_found, chosen)
        with lane.utils.when(any_found):
            for chosen, rank, query, position in found:
                with lane.utils.when(chosen):
                    at = lane.add(first, query)
                    if everything:
                        lane.store(rank, rank_g, batch, at, position)
                        continue
                    counter = lane.add(lane.times(warpgroup, queries), query)
                    place = lane.grow(count_s, counter, lane.int(1))
                    with lane.utils.when(lane.less(place, capacity)):
                        lane.store(rank, rank_g, batch, at, segment, place)
                        lane.store(position, at_g, batch, at, segment, place)

    body(dots_MN, weights_N, *refs, *scalars)


def _keep_interpreted(
    dots_MN, weights_N, factor_s, limits_s, floors_s, ties_s, rank_g, at_g, count_s, batch, first,
    segment, warpgroup, start, *, queries, capacity, length, everything,
):  # fmt: skip
    terms = jnp.where(dots_MN <= 0, 0.0, dots_MN) * weights_N
    score_MT = terms.reshape(-1, queries, HEADS).sum(-1)
    if factor_s is not None:
        score_MT = score_MT * factor_s[...][:, None]
    rank_MT = xla.ranked(score_MT, True)
    at_M = start + jnp.arange(rank_MT.shape[0], dtype=_i32)
    for x in range(queries):
        rank_M = rank_MT[:, x]
        if everything:
            rank_M = jnp.where(at_M <= limits_s[warpgroup, x], rank_M, -jnp.inf)

            @pl.when(start < length)  # a multiple of a warpgroup's keys
            def _(x=x, rank_M=rank_M):
                rank_g[batch, first + x, pl.ds(start, rank_M.shape[0])] = rank_M

            continue
        floor = floors_s[warpgroup, x]
        above = (rank_M > floor) | ((rank_M == floor) & (at_M <= ties_s[warpgroup, x]))
        chosen = above & (at_M <= limits_s[warpgroup, x])
        count = count_s[warpgroup, x]
        place = jnp.where(chosen, count + jnp.cumsum(chosen) - 1, capacity)
        for ref, values in ((rank_g, rank_M), (at_g, at_M)):
            row = ref[batch, first + x, segment]
            ref[batch, first + x, segment] = row.at[place].set(values, mode="drop")
        count_s[warpgroup, x] = count + chosen.sum(dtype=_i32)
