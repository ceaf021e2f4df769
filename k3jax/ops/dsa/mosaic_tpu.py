"""The indexer and its exact top-k as one Pallas kernel for TPUs (Mosaic).

The grid is (sequence, group of Q queries). Scores of a group stay in VMEM from the first key to the
last, 4 MiB a query for a million keys, and never go to HBM; keys come from there once a group, in
blocks copied ahead. Then, for one query at a time:

1. The k-th best score is found bit by bit, a count over the scores each, and no more bits than it
   takes until exactly k lie at or above. If more than k do so in the end, those that tie with the
   k-th stay up to a position that is found in the same way.
2. The kept are put together. Keys are chunks of 128 lanes; counts a chunk and their running sums
   say in which chunk the j-th kept key lies and how many kept ones that chunk has before it. The
   chunks of 128 such keys at a time are read and transposed, and the j-th key is the one lane
   where the count within the chunk is right.

So a rank is what the threshold was compared with, and positions come in ascending order. Scores are
kept as integers in the order of `xla.ranked`, -2^31 for keys behind the position.

A score is summed over heads in halves, h with h + H/2, then h with h + H/4 and so on, whatever the
group is: it depends on nothing but its query and its key. The rows of the product with a block are
(head, query), so each sum is of whole rows.

VMEM at K3.1's 32 heads of 128 and bfloat16 keys: scores 4 Q S bytes (32 MiB at Q = 8 and 1,048,576
keys; Q falls with longer caches), two blocks of 1,024 keys 512 KiB, products 1 MiB, results 256 KiB
at topk = 2,048. The limit is 56 MiB.

The compiler's schedule for a v5p has 629 cycles for 1,024 keys and 8 queries, where four matrix
units take 512, and 238 for one query. A bit of the threshold takes 20 cycles for 16,384 keys of one
query, at most 43,000 for a million; 128 kept keys take about 570 to write.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from k3jax.ops import mosaic_tpu
from k3jax.ops.dsa import xla
from k3jax.ops.mosaic_tpu import LANES, SUBLANES, column, dot
from k3jax.ops.rows import Rows

BLOCK = 1024  # keys
SUPER = 128  # chunks of LANES keys that are counted together
QUERIES = 8  # of a group, at most
SCORES = 40 * 2**20  # bytes of a group
ILLEGAL = -(2**31)
_NN, _NT, _TN = (1, 0), (1, 1), (0, 0)  # contracted axes of two matrices


def refusal(q_BTHK, rows, w_BTH, topk: int) -> str | None:
    """Why the kernel cannot take these inputs; None if it can."""
    del w_BTH, topk
    if not isinstance(rows, Rows):
        return "index keys are codes with factors"
    heads, width = q_BTHK.shape[2:]
    if heads & (heads - 1):
        return f"{heads} heads, no power of two"
    if width % LANES:
        return f"K is {width}, no multiple of {LANES} lanes"
    if rows.shape[1] * 4 > SCORES:
        return f"scores of {rows.shape[1]} keys are over {SCORES} bytes"
    return mosaic_tpu.refusal(rows)


def _iota(shape, axis):
    return lax.broadcasted_iota(jnp.int32, shape, axis)


def _score(layer_ref, last, at_ref, pages_ref, q_ref, w_ref, keys_ref, scores_ref, block_ref, sem):
    """Fills ``scores_ref`` [Q, chunks, LANES] up to the end of the last superchunk."""
    group = scores_ref.shape[0]
    blocks, per_block = pl.cdiv(last + 1, BLOCK), BLOCK // LANES
    rows_Q1 = _iota((group, 1), 0)
    position_Q1 = sum(jnp.where(rows_Q1 == q, at_ref[0, 0, 0, q], 0) for q in range(group))
    w_X1 = column(w_ref[0, 0])[:, :1]

    def use(i, block_ref):
        dots_XS = dot(q_ref[0, 0], block_ref[...], _NT)
        # A ReLU that keeps NaN, as in `xla.scores`.
        score_XS = jnp.where(dots_XS <= 0, 0.0, dots_XS) * w_X1
        while score_XS.shape[0] > group:
            half = score_XS.shape[0] // 2
            score_XS = score_XS[:half] + score_XS[half:]
        legal_QS = i * BLOCK + _iota((group, BLOCK), 1) <= position_Q1
        rank_QS = jnp.where(legal_QS, xla.ordered(xla.ranked(score_XS, True)), ILLEGAL)
        for c in range(per_block):
            scores_ref[:, i * per_block + c] = rank_QS[:, c * LANES : (c + 1) * LANES]

    mosaic_tpu.each_block(keys_ref, layer_ref[0], pages_ref, blocks, block_ref, sem, use)

    def fill(i, _):
        at = pl.ds(pl.multiple_of(i * per_block, per_block), per_block)
        scores_ref[:, at] = jnp.full((group, per_block, LANES), ILLEGAL, jnp.int32)

    supers = pl.cdiv(last + 1, SUPER * LANES)
    lax.fori_loop(blocks, supers * (SUPER * LANES // BLOCK), fill, None)


def _threshold(tile, supers, wanted, legal, keys: int):
    """(limit, last): kept are the scores > limit and those == limit up to position last.

    ``tile(i)`` gives (scores, positions) of superchunk i, [SUPER, LANES] each.
    """

    def count(test):
        def add(i, total):
            hits = test(*tile(i)).astype(jnp.int32)
            return total + hits.reshape(-1, SUBLANES, LANES).sum(0)

        zero = jnp.zeros((SUBLANES, LANES), jnp.int32)
        return jnp.sum(lax.fori_loop(0, supers, add, zero))

    def digit(state):
        bit, limit, found = state
        trial = limit + lax.shift_left(jnp.int32(1), bit)  # the first one wraps around to 0
        here = count(lambda score, _: score >= trial)
        enough = here >= wanted
        return bit - 1, jnp.where(enough, trial, limit), jnp.where(enough, here, found)

    # With all legal keys wanted nothing is searched: every score above ILLEGAL stays.
    _, limit, found = lax.while_loop(
        lambda s: (s[0] >= 0) & (s[2] != wanted), digit, (jnp.int32(31), jnp.int32(ILLEGAL), legal)
    )
    limit = jnp.maximum(limit, ILLEGAL + 1)
    ties = found != wanted
    needed = wanted - lax.cond(
        ties, lambda: count(lambda score, _: score > limit), lambda: jnp.int32(0)
    )

    def place(state):
        bit, last = state
        trial = last + lax.shift_left(jnp.int32(1), bit)
        here = count(lambda score, at: (score == limit) & (at < trial))
        return bit - 1, jnp.where(here < needed, trial, last)

    bits = (keys - 1).bit_length()
    _, last = lax.while_loop(
        lambda s: s[0] >= 0,
        place,
        (jnp.where(ties, bits - 1, -1), jnp.where(ties, 0, keys).astype(jnp.int32)),
    )
    return limit, last


def _chunks(kept, supers, counts_ref, slots: int):
    """For slots j = 0 .. on: (the chunk of the j-th kept key, kept keys before that chunk).

    ``kept(i)`` says which of superchunk i stay, [SUPER, LANES]. Results are int32 [1, slots].
    Products are of small whole numbers or at full precision: exact.
    """
    counts_ref[...] = jnp.zeros_like(counts_ref)
    ones = jnp.ones((SUBLANES, LANES), jnp.bfloat16)

    def fill(i, _):
        held = kept(i).astype(jnp.float32).astype(jnp.bfloat16)
        counts_ref[pl.ds(i, 1)] = dot(ones, held, _NT)[:1]

    lax.fori_loop(0, supers, fill, None)
    rows = counts_ref.shape[0]
    upper = (_iota((SUPER, SUPER), 0) <= _iota((SUPER, SUPER), 1)).astype(jnp.float32)
    within_XC = dot(counts_ref[...], upper, _NN)
    total_X1 = within_XC[:, SUPER - 1 :]
    lower = (_iota((rows, rows), 0) > _iota((rows, rows), 1)).astype(jnp.float32)
    before_X1 = dot(lower, jnp.broadcast_to(total_X1, (rows, LANES)), _NN)[:, :1]
    end_X1 = before_X1 + total_X1

    slot_1j = _iota((1, slots), 1).astype(jnp.float32)
    passed_Xj = jnp.where(end_X1 <= slot_1j, 1.0, 0.0)
    super_1j = passed_Xj.sum(0, keepdims=True)
    before_1j = jnp.max(passed_Xj * end_X1, axis=0, keepdims=True)
    here_Xj = (_iota((rows, slots), 0).astype(jnp.float32) == super_1j).astype(jnp.float32)
    end_Cj = dot(before_X1 + within_XC, here_Xj, _TN)
    passed_Cj = jnp.where(end_Cj <= slot_1j, 1.0, 0.0)
    # Slots behind the last kept key have passed all; any chunk serves them.
    chunk_1j = super_1j * SUPER + passed_Cj.sum(0, keepdims=True)
    chunk_1j = jnp.minimum(chunk_1j, (supers * SUPER - 1).astype(jnp.float32))
    before_1j = jnp.maximum(before_1j, jnp.max(passed_Cj * end_Cj, axis=0, keepdims=True))
    return chunk_1j.astype(jnp.int32), before_1j.astype(jnp.int32)


def _emit(stays, number, chunk_ref, rows_ref, query_ref, stage_ref, outputs, first):
    """Writes ranks and positions of kept keys ``first`` .. first + LANES - 1.

    Args:
      stays: (scores, positions) -> which are kept.
      number: how many are kept in all.
      chunk_ref: int32 [slots] in scalar memory, `_chunks`; rows_ref: [2, slots], both of its rows.
      query_ref: scores of the query, [chunks, LANES].
      outputs: (ranks, positions), references to [1, slots].
    """

    def read(j, _):
        stage_ref[pl.ds(j, 1)] = query_ref[pl.ds(chunk_ref[0, first + j], 1)]

    lax.fori_loop(0, LANES, read, None, unroll=8)
    at = pl.ds(first, LANES)
    chunk_1j, before_1j = rows_ref[0:1, at], rows_ref[1:2, at]
    score_Cj = stage_ref[...].T
    position_Cj = chunk_1j * LANES + _iota((LANES, LANES), 0)
    held_Cj = stays(score_Cj, position_Cj)
    lower = (_iota((LANES, LANES), 0) >= _iota((LANES, LANES), 1)).astype(jnp.float32)
    ones_Cj = held_Cj.astype(jnp.float32).astype(jnp.bfloat16)
    order_Cj = dot(lower.astype(jnp.bfloat16), ones_Cj, _NN).astype(jnp.int32)
    slot_1j = first + _iota((1, LANES), 1)
    mine_Cj = held_Cj & (order_Cj == slot_1j - before_1j + 1)
    score_1j = jnp.sum(jnp.where(mine_Cj, score_Cj, 0), axis=0, keepdims=True)
    position_1j = jnp.sum(jnp.where(mine_Cj, position_Cj, 0), axis=0, keepdims=True)
    there_1j = slot_1j < number
    rank_1j = xla.unordered(score_1j)
    outputs[0][:, at] = jnp.where(there_1j, rank_1j, -jnp.inf)
    outputs[1][:, at] = jnp.where(there_1j, position_1j, -1)


def _kernel(
    layer_ref, last_ref, at_ref, pages_ref, q_ref, w_ref, keys_ref, rank_ref, position_ref,
    scores_ref, block_ref, block_sem, counts_ref, rows_ref, chunk_ref, chunk_sem, stage_ref,
    *, topk, keys,
):  # fmt: skip
    last = last_ref[pl.program_id(0), pl.program_id(1)]
    _score(
        layer_ref, last, at_ref, pages_ref, q_ref, w_ref, keys_ref, scores_ref, block_ref, block_sem
    )
    slots = rank_ref.shape[3]
    rank_ref[...] = jnp.full(rank_ref.shape, -jnp.inf, jnp.float32)
    position_ref[...] = jnp.full(position_ref.shape, -1, jnp.int32)

    def one_query(q, _):
        legal = at_ref[0, 0, 0, q] + 1
        wanted, supers = jnp.minimum(legal, topk), pl.cdiv(legal, SUPER * LANES)
        query_ref = scores_ref.at[q]

        def tile(i):
            start = pl.multiple_of(i * SUPER, SUPER)
            position = (start + _iota((SUPER, LANES), 0)) * LANES + _iota((SUPER, LANES), 1)
            return query_ref[pl.ds(start, SUPER)], position

        @pl.when(legal > 0)
        def _():
            limit, last = _threshold(tile, supers, wanted, legal, keys)

            def stays(score, position):
                return (score > limit) | ((score == limit) & (position <= last))

            rows = _chunks(lambda i: stays(*tile(i)), supers, counts_ref, slots)
            rows_ref[0:1], rows_ref[1:2] = rows
            copy = pltpu.make_async_copy(rows_ref.at[0:1], chunk_ref, chunk_sem)
            copy.start()
            copy.wait()
            outputs = [ref.at[0, 0, pl.ds(q, 1)] for ref in (rank_ref, position_ref)]

            def emit(i, _):
                first = pl.multiple_of(i * LANES, LANES)
                _emit(stays, wanted, chunk_ref, rows_ref, query_ref, stage_ref, outputs, first)

            lax.fori_loop(0, pl.cdiv(wanted, LANES), emit, None)

    lax.fori_loop(0, scores_ref.shape[0], one_query, None)


def select(
    q_BTHK: Array,
    rows: Rows,
    w_BTH: Array,
    positions_BT: Array,
    topk: int,
    *,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """The function of ``SELECT``. ``interpret`` runs it without a TPU, for tests.

    Positions come in ascending order; their number is topk, rounded up to whole lanes.
    """
    batch, queries, heads, width = q_BTHK.shape
    keys = rows.shape[1]
    slots, supers = pl.cdiv(topk, LANES) * LANES, pl.cdiv(keys, SUPER * LANES)
    group = QUERIES
    while group > 1 and (group >= 2 * queries or group * supers * SUPER * LANES * 4 > SCORES):
        group //= 2
    groups = pl.cdiv(queries, group)
    pad = ((0, 0), (0, groups * group - queries))
    positions_BGQ = jnp.pad(jnp.minimum(positions_BT, keys - 1), pad, constant_values=-1)
    positions_BGQ = positions_BGQ.reshape(batch, groups, group)
    by_head = lambda x: x.reshape(batch, groups, group, heads, -1).swapaxes(2, 3)  # noqa: E731
    q_BGXK = by_head(jnp.pad(q_BTHK, (*pad, (0, 0), (0, 0)))).reshape(batch, groups, -1, width)
    w_BG1X = by_head(jnp.pad(w_BTH, (*pad, (0, 0)))).reshape(batch, groups, 1, -1)
    layer_1, pages_B1M, stack_LNPK = mosaic_tpu.operands(rows)

    def of_group(*shape):
        return pl.BlockSpec((1, 1, *shape), lambda b, g, *_: (b, g, 0, 0))

    in_scalars = pl.BlockSpec(
        (1, 1, 1, group), lambda b, g, *_: (b, g, 0, 0), memory_space=pltpu.SMEM
    )
    rank, at = pl.pallas_call(
        partial(_kernel, topk=topk, keys=keys),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(batch, groups),
            in_specs=[
                in_scalars,
                mosaic_tpu.pages_spec(pages_B1M),
                of_group(heads * group, width),
                of_group(1, heads * group),
                pl.BlockSpec(memory_space=pltpu.HBM),
            ],
            out_specs=[of_group(group, slots)] * 2,
            scratch_shapes=[
                pltpu.VMEM((group, supers * SUPER, LANES), jnp.int32),
                pltpu.VMEM((2, BLOCK, width), rows.dtype),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.VMEM((pl.cdiv(supers, SUBLANES) * SUBLANES, SUPER), jnp.float32),
                pltpu.VMEM((2, slots), jnp.int32),
                pltpu.SMEM((1, slots), jnp.int32),
                pltpu.SemaphoreType.DMA(()),
                pltpu.VMEM((LANES, LANES), jnp.int32),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((batch, groups, group, slots), dtype)
            for dtype in (jnp.float32, jnp.int32)
        ],
        compiler_params=mosaic_tpu.PARAMETERS,
        interpret=interpret,
        name="dsa_select",
    )(
        layer_1,
        positions_BGQ.max(-1),
        positions_BGQ[:, :, None],
        pages_B1M,
        q_BGXK,
        w_BG1X,
        stack_LNPK,
    )
    return tuple(x.reshape(batch, -1, slots)[:, :queries] for x in (rank, at))
