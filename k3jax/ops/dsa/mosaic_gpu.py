"""Exact selection on Hopper GPUs without scores in memory: sample, collect, pick.

1. Every n-th key is scored, and a quantile of those scores becomes a floor: a little more than
   topk of all keys should lie above it.
2. All keys are scored, and only those at or above the floor are kept, about twice topk of them.
3. The best topk of the kept ones are the best of all, if at least topk were kept and none was
   dropped for want of room.

Where that fails, since scores lie too unevenly, the portable form runs instead. The result is exact
in either case. A short context keeps all its keys and needs no sample.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import Array

from k3jax.ops.dsa import mosaic_gpu_pick
from k3jax.ops.dsa.mosaic_gpu_collect import TILE, collect, refusal
from k3jax.ops.mla import blocks
from k3jax.ops.mosaic_gpu import Interpret
from k3jax.ops.rows import Rows, Scaled

__all__ = ["candidates", "refusal"]

BLOCKS = 132  # multiprocessors
PLACES = mosaic_gpu_pick.MOST  # of all segments of one warpgroup
SAMPLE = mosaic_gpu_pick.SAMPLE  # keys
ROUNDS = 2
QUERIES = 1024  # at a time: 129 MiB of places and 64 MiB of sampled ranks
SPREADS = 5.0
"""Standard deviations between what should lie above the floor and topk, for random scores."""


def candidates(
    q_BTHK: Array,
    rows: Rows | Scaled,
    w_BTH: Array,
    positions_BT: Array,
    topk: int,
    *,
    interpret: Interpret = False,
) -> tuple[Array, Array]:
    """See ``SELECT`` in `k3jax.ops.dsa`.

    Args:
      interpret: whether to run in interpret mode, on a CPU; with parameters, how.
    """
    length = positions_BT.shape[1]
    queries = min(8, 1 << (length - 1).bit_length())

    def one_block(q_BTHK, w_BTH, positions_BT):
        return _block(q_BTHK, rows, w_BTH, positions_BT, topk, queries, interpret)

    extra = -length % queries

    def pad(x, fill):
        widths = [(0, 0), (0, extra), *[(0, 0)] * (x.ndim - 2)]
        return jnp.pad(x, widths, constant_values=jnp.asarray(fill, x.dtype))

    arrays = (pad(q_BTHK, 0), pad(w_BTH, 0), pad(positions_BT, -1))
    rank_BTk, at_BTk = blocks.over_queries(one_block, QUERIES, arrays, (0, 0, -1))
    return rank_BTk[:, :length], at_BTk[:, :length]


def _block(q_BTHK, rows, w_BTH, positions_BT, topk, queries, interpret):
    batch, length = positions_BT.shape
    scan = functools.partial(collect, queries=queries, interpret=interpret)
    splits = max(1, blocks.power_of_two(BLOCKS * queries // (batch * length)))
    floor_BT = jnp.full((batch, length), -jnp.inf, jnp.float32)
    if rows.shape[1] > PLACES:
        floor_BT = _floor(q_BTHK, rows, w_BTH, positions_BT, topk, scan, interpret)
    width = 1 << (topk - 1).bit_length()
    need_BT = jnp.minimum(topk, positions_BT + 1)
    state = (
        floor_BT,
        jnp.full((batch, length), jnp.iinfo(jnp.int32).max, jnp.int32),
        jnp.full((batch, length, width), -jnp.inf, jnp.float32),
        jnp.full((batch, length, width), -1, jnp.int32),
    )
    pick = functools.partial(mosaic_gpu_pick.pick, need_BT=need_BT, topk=topk, interpret=interpret)
    for _ in range(ROUNDS):
        found = scan(
            *(q_BTHK, rows, w_BTH, positions_BT, *state[:2]),
            splits=splits,
            capacity=PLACES // splits,
        )
        state = pick(found, state=state)
    floor_BT, _, *best = state
    return jax.lax.cond(
        (floor_BT == jnp.inf).all(),
        lambda: tuple(best),
        lambda: _portable(q_BTHK, rows, w_BTH, positions_BT, topk, width),
    )


def _floor(q_BTHK, rows, w_BTH, positions_BT, topk, scan, interpret):
    """A rank for each query with a little more than ``topk`` of its keys above it."""
    batch, length = positions_BT.shape
    size = min(SAMPLE, max(SAMPLE // 8, blocks.power_of_two(rows.shape[1] // 32)))
    keys_B1 = positions_BT.max(1, keepdims=True) + 1
    step, rest = keys_B1 // size, keys_B1 % size
    n = jnp.arange(size, dtype=jnp.int32)
    at_BS = n * step + n * rest // size  # n keys / size, without a product that overflows
    taken = [view.take(at_BS[:, None])[:, 0] for view in _views(rows)]
    sample = Rows.of(taken[0]) if len(taken) == 1 else Scaled(*map(Rows.of, taken))
    share_B1 = size / jnp.maximum(keys_B1, 1).astype(jnp.float32)
    limit_BT = ((positions_BT + 1).astype(jnp.float32) * share_B1).astype(jnp.int32) - 1
    groups = batch * length // scan.keywords["queries"]
    splits = max(1, min(BLOCKS // groups, size // TILE))
    unused = (jnp.zeros(limit_BT.shape, jnp.float32), jnp.zeros_like(limit_BT))
    rank_BTS = scan(
        *(q_BTHK, sample, w_BTH, limit_BT, *unused), splits=splits, capacity=1, everything=True
    )
    expected_B1 = topk * share_B1
    wanted_B1 = jnp.ceil(expected_B1 + SPREADS * jnp.sqrt(expected_B1)).astype(jnp.int32)
    wanted_BT = jnp.broadcast_to(wanted_B1, positions_BT.shape)
    floor_BT = mosaic_gpu_pick.floor(rank_BTS, wanted_BT, interpret=interpret)
    return jnp.where(positions_BT < PLACES, -jnp.inf, floor_BT)


def _views(rows: Rows | Scaled) -> tuple[Rows, ...]:
    return tuple(rows) if isinstance(rows, Scaled) else (rows,)


def _portable(q_BTHK, rows, w_BTH, positions_BT, topk, width):
    from k3jax.ops.dsa import streamed

    rank_BTk, at_BTk = streamed(q_BTHK, rows, w_BTH, positions_BT, topk)
    extra = [(0, 0), (0, 0), (0, width - topk)]
    return jnp.pad(rank_BTk, extra, constant_values=-jnp.inf), jnp.pad(at_BTk, extra)
