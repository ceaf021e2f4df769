"""Exact selection on Hopper GPUs without scores in memory: sample, collect, pick.

1. Every n-th key is scored, and a quantile of those scores becomes a floor: a little more than
   topk of all keys should lie above it.
2. All keys are scored, and only those at or above the floor are kept, about twice topk of them.
3. The best topk of the kept ones are the best of all, if at least topk were kept and none was
   dropped for want of room.

Where that fails, since scores lie too unevenly, steps 2 and 3 are repeated for those queries with
the best floor that is known to be one: once for all of them, then query by query to the end. The
result is exact in every case. A short context keeps all its keys and needs no sample.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from k3jax.ops.dsa import mosaic_gpu_collect
from k3jax.ops.dsa.mosaic_gpu_collect import TILE, collect, ranks
from k3jax.ops.dsa.mosaic_gpu_pick import MOST, SAMPLE, floor, most_keys, pick
from k3jax.ops.dsa.mosaic_gpu_rest import finish
from k3jax.ops.mla import blocks
from k3jax.ops.mosaic_gpu import Interpret
from k3jax.ops.rows import Rows, Scaled

__all__ = ["candidates", "refusal"]

BLOCKS = 132  # multiprocessors
PLACES = MOST  # of all segments of one warpgroup
ROUNDS = 2
QUERIES = 1024  # at a time: 129 MiB of places and 64 MiB of sampled ranks
SPREADS = 5.0
"""Standard deviations between what should lie above the floor and topk, for random scores."""


def refusal(q_BTHK, rows: Rows | Scaled, w_BTH, topk: int) -> str | None:
    """Why the kernels cannot take these inputs; None if they can."""
    if rows.shape[1] > most_keys(topk):
        return f"{rows.shape[1]} keys and topk {topk}: over {most_keys(topk)} keys"
    return mosaic_gpu_collect.refusal(q_BTHK, rows, w_BTH, topk)


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
    options = {"queries": queries, "interpret": interpret}
    splits = max(1, blocks.power_of_two(BLOCKS * queries // (batch * length)))
    floor_BT = jnp.full((batch, length), -jnp.inf, jnp.float32)
    if rows.shape[1] > PLACES:
        floor_BT = _floor(q_BTHK, rows, w_BTH, positions_BT, topk, options)
    state = (floor_BT, jnp.full((batch, length), jnp.iinfo(jnp.int32).max, jnp.int32))

    def one_round(q_BTHK, rows, w_BTH, positions_BT, state):
        floor_BT, tie_BT, *_ = state
        found = collect(
            *(q_BTHK, rows, w_BTH, positions_BT, floor_BT, tie_BT),
            splits=splits,
            capacity=PLACES // splits,
            **options,
        )
        return pick(found, positions_BT=positions_BT, state=state, topk=topk, interpret=interpret)

    # Jitted, so that its kernels are lowered once.
    one_round = one_round if interpret else jax.jit(one_round)
    for _ in range(ROUNDS):
        state = one_round(q_BTHK, rows, w_BTH, positions_BT, state)
    *_, rank_BTk, at_BTk = finish(
        *(q_BTHK, rows, w_BTH, positions_BT), state=state, topk=topk, interpret=interpret
    )
    return rank_BTk, at_BTk


def _floor(q_BTHK, rows, w_BTH, positions_BT, topk, options):
    """A rank for each query with a little more than ``topk`` of its keys above it."""
    batch, length = positions_BT.shape
    size = min(SAMPLE, max(SAMPLE // 8, blocks.power_of_two(rows.shape[1] // 32)))
    keys_B1 = positions_BT.max(1, keepdims=True) + 1
    step, rest = keys_B1 // size, keys_B1 % size
    n = jnp.arange(size, dtype=jnp.int32)
    # n keys / size, without a product that overflows, and a part of a step on, another part each
    # time: what repeats in a text at the sample's distance would stand for all of it.
    shift = (n * 40503) & 0x7FFF
    at_BS = n * step + n * rest // size + (shift * step >> 15)

    def taken(view):
        return Rows.of(view.take(at_BS[:, None])[:, 0])

    codes, factors = mosaic_gpu_collect.views(rows)
    sample = taken(codes) if factors is None else Scaled(taken(codes), taken(factors))
    share_B1 = size / jnp.maximum(keys_B1, 1).astype(jnp.float32)
    limit_BT = ((positions_BT + 1).astype(jnp.float32) * share_B1).astype(jnp.int32) - 1
    groups = batch * length // options["queries"]
    splits = max(1, min(BLOCKS // groups, size // TILE))
    rank_BTS = ranks(q_BTHK, sample, w_BTH, limit_BT, splits=splits, **options)
    expected_B1 = topk * share_B1
    wanted_B1 = jnp.ceil(expected_B1 + SPREADS * jnp.sqrt(expected_B1)).astype(jnp.int32)
    wanted_BT = jnp.broadcast_to(wanted_B1, positions_BT.shape)
    return floor(rank_BTS, wanted_BT, positions_BT, PLACES, interpret=options["interpret"])
