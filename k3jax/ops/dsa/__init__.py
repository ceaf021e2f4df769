"""Gated DSA of Kimi K3.1: an indexer picks ``topk`` cache rows, latent attention reads those."""

from __future__ import annotations

import logging
from collections.abc import Callable

import jax
import jax.numpy as jnp

from k3jax.ops import choice, mla, target
from k3jax.ops.dsa import fp8, mosaic_gpu, mosaic_tpu, xla
from k3jax.ops.dsa.fp8 import agreement
from k3jax.ops.dsa.merge import keep
from k3jax.ops.dsa.missing_mass import MissingMass, missing_mass
from k3jax.ops.mla import blocks, latent
from k3jax.ops.rows import Rows, Scaled

__all__ = [
    "ATTEND_IMPLEMENTATIONS",
    "SELECT_IMPLEMENTATIONS",
    "MissingMass",
    "agreement",
    "attend",
    "candidates",
    "keep",
    "missing_mass",
    "scores",
    "select",
]

log = logging.getLogger(__name__)

# name -> f(q_BTHK, rows, w_BTH, positions_BT, topk) -> (rank_BTk, at_BTk), see `candidates`, in
# ascending order of position and then what has rank -inf; k may exceed topk. Keys in eight bits
# come as `Scaled`, with q in float8_e4m3fn and its factors in w (`fp8.meet`).
SELECT: dict[str, Callable[..., tuple[jax.Array, jax.Array]]] = {
    "mosaic_gpu": mosaic_gpu.candidates,
    "mosaic_tpu": mosaic_tpu.select,
}
# What "auto" tries, in this order; refusals take (q_BTHK, rows, w_BTH, topk).
SELECT_KERNELS = {
    "mosaic_gpu": choice.Kernel(target.is_hopper, mosaic_gpu.refusal),
    "mosaic_tpu": choice.Kernel(target.is_tpu, mosaic_tpu.refusal),
}

SELECT_IMPLEMENTATIONS = ("streamed", *SELECT_KERNELS)
ATTEND_IMPLEMENTATIONS = ("gathered", "masked", *latent.KERNELS)

MASKED_KEYS = 4096
"""Longest cache that "auto" attends to densely under a mask."""

MASKED_RATIO = 8
"""Rows a query may score in the masked form for each row it selected, under "auto"."""


def scores(q_BTHK: jax.Array, k_BSK: jax.Array | Rows | Scaled, w_BTH: jax.Array) -> jax.Array:
    """Indexer scores of every query against every key, in one piece (tests and short S).

    ``score[b,t,s] = sum_h w[b,t,h] * relu(q[b,t,h] . k[b,s])``, float32. The factors H**-0.5
    and K**-0.5 are the caller's, folded into w (a positive factor passes through the ReLU). Head
    weights may be negative. No causal mask is applied.

    Args:
      q_BTHK: index queries, float32 or bfloat16.
      k_BSK: index keys, one for all heads, same dtype. As `Scaled` they are codes of eight bits
        with a factor each, and queries are rounded to such codes too (`fp8.meet`): the products
        of codes are exact, and sums are float32.
      w_BTH: head weights, float32, scales included.

    Returns:
      score_BTS float32.

    Raises:
      ValueError: shapes or dtypes that do not fit.

    Source: DeepSeek-V3.2 (lightning indexer), without its rotation and Hadamard transform.
    """
    _check_indexer(q_BTHK, k_BSK, w_BTH)
    return xla.block_scores(*fp8.meet(q_BTHK, k_BSK, w_BTH), 0, k_BSK.shape[1])


def select(
    q_BTHK: jax.Array,
    k_BSK: jax.Array | Rows | Scaled,
    w_BTH: jax.Array,
    positions_BT: jax.Array,
    topk: int,
    *,
    implementation: str = "auto",
    query_block: int | None = None,
    key_block: int | None = None,
) -> jax.Array:
    """Exact causal top-k of ``scores``: the cache rows a query attends to, one set for all heads.

    Rows s <= position compete; the best ``topk`` stay, or all when there are no more. Equal scores
    (-0.0 equals 0.0) go to the lower position. A NaN score ranks below every finite one but
    is still a legal row. [T, S] scores are never held for long S, and no index is ever a product
    of T and S. The result has no gradient. With S <= topk nothing is scored.

    Args:
      q_BTHK, k_BSK, w_BTH: as for ``scores``. Keys after the positions may hold anything.
      positions_BT: int32, the cache row of each query; -1 marks a padded query (selects nothing).
      topk: rows to keep, 2048 in K3.1.
      implementation: "auto" or a name in `SELECT_IMPLEMENTATIONS`. "auto" takes the kernel of the
        device that the program is for, or "streamed" where there is none or it refuses.
      query_block: queries at a time, or None for a size from ``blocks.BUDGET_BYTES``.
      key_block: keys at a time, or None likewise.

    Returns:
      indices_BTk int32, ascending, padded at the end with -1.

    Raises:
      ValueError: topk < 1, an unknown implementation, or shapes or dtypes that do not fit.

    Source: DeepSeek-V3.2; the tie and NaN rules are this project's.
    """
    _check_indexer(q_BTHK, k_BSK, w_BTH, positions_BT)
    if topk < 1:
        raise ValueError(f"dsa.select: topk must be at least 1, got {topk}")
    keys = k_BSK.shape[1]
    inputs = (*fp8.meet(q_BTHK, k_BSK, w_BTH), positions_BT, topk)
    implementation = _pick(implementation, *inputs[:-1], min(topk, keys))
    if keys <= topk:
        log.debug("dsa.select: all of %d keys, topk %d", keys, topk)
        return xla.everything(positions_BT, keys, topk)
    if implementation in SELECT:
        kernel = SELECT[implementation]
        rank_BTk, at_BTk = kernel(*jax.lax.stop_gradient(inputs[:3]), positions_BT, topk)
        return jnp.where(rank_BTk == -jnp.inf, -1, at_BTk)[..., :topk]
    return xla.ascending(*streamed(*inputs, query_block, key_block))


def candidates(
    q_BTHK: jax.Array,
    k_BSK: jax.Array | Rows | Scaled,
    w_BTH: jax.Array,
    positions_BT: jax.Array,
    topk: int,
) -> tuple[jax.Array, jax.Array]:
    """The best ``topk`` rows that this device holds, for a cache spread over devices.

    Arguments as for ``select``; positions count this device's rows.

    Returns:
      (rank_BTk float32, at_BTk int32) in any order. ``rank`` orders candidates of all devices and
      is -inf where there is none. `keep` picks among them.
    """
    _check_indexer(q_BTHK, k_BSK, w_BTH, positions_BT)
    inputs = (*fp8.meet(q_BTHK, k_BSK, w_BTH), positions_BT, min(topk, k_BSK.shape[1]))
    implementation = _pick("auto", *inputs)
    if implementation in SELECT:
        return SELECT[implementation](*jax.lax.stop_gradient(inputs[:3]), *inputs[3:])
    return streamed(*inputs)


def _pick(implementation: str, q_BTHK, rows: Rows | Scaled, w_BTH, positions_BT, topk: int) -> str:
    """What runs for ``implementation``, a name or "auto"; logged with the reason."""
    name, reason = choice.select(
        *("dsa.select", implementation, SELECT_IMPLEMENTATIONS, SELECT_KERNELS),
        target.device_kind(),
        (q_BTHK, rows, w_BTH, topk),
    )
    name = "streamed" if name == "xla" else name
    log.debug("dsa.select: %s (%s); %d keys, topk %d", name, reason, rows.shape[1], topk)
    return name


def streamed(q_BTHK, rows, w_BTH, positions_BT, topk, query_block=None, key_block=None):
    """`candidates` in the portable form, best first; takes what a kernel takes."""
    batch, queries, heads, _ = q_BTHK.shape
    keys, width = rows.shape[1:]
    plan = blocks.plan(
        queries,
        keys,
        pair=batch * (heads + 4) * 4,  # dot products; score, rank, position and their sort
        per_key=batch * width * max(rows.dtype.itemsize, 2),  # codes become bfloat16
        per_query=batch * topk * 4 * 4,
        key_floor=2 * topk,  # shorter blocks would mostly sort the running list again
    )
    query_block, key_block = query_block or plan[0], min(key_block or plan[1], keys)
    log.debug(
        "dsa.select: streamed; %d x %d keys in blocks of %d x %d, topk %d",
        *(queries, keys, query_block, key_block, topk),
    )
    q_BTHK, rows, w_BTH = jax.lax.stop_gradient((q_BTHK, rows, w_BTH))
    return xla.streamed(
        *(q_BTHK, rows, w_BTH, positions_BT, topk), query_block=query_block, key_block=key_block
    )


def attend(
    q_BTHQ: jax.Array,
    cache_BSC: jax.Array | Rows,
    w_k_HNC: jax.Array,
    w_v_HVC: jax.Array,
    indices_BTk: jax.Array,
    *,
    scale: float,
    spread: mla.Spread | None = None,
    implementation: str = "auto",
    query_block: int | None = None,
) -> jax.Array:
    """Latent attention (formula of ``mla``) of each query over its selected cache rows only.

    "gathered" copies each query's rows and attends in the absorbed form, by query blocks within
    ``blocks.BUDGET_BYTES``. "masked" is dense attention under a mask made from the indices: more
    products, no gather; it takes mla's own choice of form. "auto" takes masked when
    S <= min(8 k, 4096) and there are at least 16 queries, or when S <= k. Where the device has a
    kernel that takes these shapes, "auto" takes that. All are differentiable in q, cache, w_k and
    w_v.

    Args:
      q_BTHQ, cache_BSC, w_k_HNC, w_v_HVC: as for ``mla``. Rows that no query of their batch
        row selected may hold anything, NaN included.
      indices_BTk: int32 from ``select``. Negative entries are absent, and so are those past the
        cache. No row twice for one query. A query without any row gives zeros.
      scale: (N + R) ** -0.5 in K3.1.
      spread: when other devices hold other rows; never masked.
      implementation: "auto" or a name in `ATTEND_IMPLEMENTATIONS`.
      query_block: queries at a time, or None for a size from the budget.

    Returns:
      o_BTHV in the queries' dtype.

    Raises:
      ValueError: an unknown implementation, or shapes or dtypes that do not fit.

    Source: DeepSeek-V3.2 (sparse latent attention); Moonshot's articles on Kimi K3.1.
    """
    apart = spread is not None
    mla.check(q_BTHQ, cache_BSC, w_k_HNC, w_v_HVC, indices_BTk, "dsa.attend", spread=apart)
    queries, heads = q_BTHQ.shape[1:3]
    (batch, keys, row), topk = cache_BSC.shape, indices_BTk.shape[2]
    rows, where = Rows.of(cache_BSC), ("indices", indices_BTk)
    name, reason = choice.select(
        *("dsa.attend", implementation, ATTEND_IMPLEMENTATIONS, latent.KERNELS),
        target.device_kind(),
        (q_BTHQ, rows, w_k_HNC, where),
    )
    if spread is not None:
        heads = jax.eval_shape(spread.queries, q_BTHQ).shape[2]
        name = "gathered" if name == "masked" else name
    if name == "xla":
        short = keys <= topk or (keys <= min(MASKED_RATIO * topk, MASKED_KEYS) and queries >= 16)
        name = "masked" if short and spread is None else "gathered"
        reason += f"; {queries} queries select {topk} of {keys} rows"
    log.debug("dsa.attend: %s (%s)", name, reason)
    inputs = (q_BTHQ, rows, w_k_HNC, w_v_HVC)
    if name in latent.KERNELS:
        return latent.attention(
            *(name, *inputs, where), scale=scale, spread=spread, query_block=query_block
        )
    if name == "masked":
        form, _ = mla.choose(q_BTHQ, rows, w_k_HNC, w_v_HVC)
        return mla.portable(form, *inputs, where, scale=scale, query_block=query_block)
    # Gathered rows before and after masking, scores and weights, weighted rows.
    size = q_BTHQ.dtype.itemsize
    per_query = batch * (topk * row * size * 2 + heads * (topk * 8 + row * 8))
    if query_block is None:
        fits = blocks.BUDGET_BYTES // per_query
        query_block = queries if queries <= fits else blocks.power_of_two(fits)
    return xla.gathered(
        *(q_BTHQ, cache_BSC, w_k_HNC, w_v_HVC, indices_BTk),
        scale=scale,
        query_block=query_block,
        spread=spread,
    )


def _check_indexer(q_BTHK, k_BSK, w_BTH, positions_BT=None) -> None:
    if isinstance(k_BSK, Scaled):
        kinds, factors = (k_BSK.dtype, k_BSK.factors.dtype), k_BSK.factors.shape
        if kinds != (jnp.float8_e4m3fn, jnp.float32) or factors != (*k_BSK.shape[:2], 1):
            raise ValueError(
                f"dsa: scaled keys must be float8_e4m3fn with float32 [B, S, 1], got {kinds[0]} "
                f"{k_BSK.shape} with {kinds[1]} {factors}"
            )
        if q_BTHK.dtype not in (jnp.float32, jnp.bfloat16):
            raise ValueError(f"dsa: q must be float32 or bfloat16, got {q_BTHK.dtype}")
    elif q_BTHK.dtype != k_BSK.dtype or q_BTHK.dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(
            f"dsa: q and k must share float32 or bfloat16, got {q_BTHK.dtype}, {k_BSK.dtype}"
        )
    if w_BTH.dtype != jnp.float32:
        raise ValueError(f"dsa: head weights must be float32, got {w_BTH.dtype}")
    fits = (
        q_BTHK.ndim == 4
        and k_BSK.ndim == 3
        and k_BSK.shape[1] > 0
        and k_BSK.shape[::2] == q_BTHK.shape[::3]
        and w_BTH.shape == q_BTHK.shape[:3]
    )
    if not fits:
        raise ValueError(
            f"dsa: shapes do not fit: q {q_BTHK.shape}, k {k_BSK.shape}, w {w_BTH.shape}"
        )
    if positions_BT is not None and (
        positions_BT.shape != q_BTHK.shape[:2] or positions_BT.dtype != jnp.int32
    ):
        raise ValueError(
            f"dsa: positions must be int32 {q_BTHK.shape[:2]}, got "
            f"{positions_BT.dtype} {positions_BT.shape}"
        )
