"""Multi-head latent attention without rotation (Gated MLA's core, before the output gate)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from k3jax.ops import choice, target
from k3jax.ops.mla import blocks, latent, xla
from k3jax.ops.rows import Rows

__all__ = ["EXPANDED_BYTES", "IMPLEMENTATIONS", "Spread", "choose", "mla"]

log = logging.getLogger(__name__)

PORTABLE = {"expanded": xla.expanded, "absorbed": xla.absorbed}
IMPLEMENTATIONS = (*PORTABLE, *latent.KERNELS)

EXPANDED_BYTES = 2**30
"""Per-head keys and values that "auto" lets the expanded form hold, on global shapes. At K3's
sizes in bf16 (96 heads of 192 + 128) that is 17,476 cache rows of one sequence."""


class Spread(NamedTuple):
    """How attention runs when every device holds some rows of the cache, for all queries.

    Queries in the latent space go to where the rows are; sums over the rows come back. Both are
    small, while the cache stays. With a spread, positions (or indices) count this device's rows and
    are given for all the queries that ``queries`` returns.

    Attributes:
      queries: [B, T, H, C + R] of this device -> [B', T, H', C + R] of all devices that share.
      merge: partial sums over this device's rows, leading axes [B', T, H'] -> complete sums of this
        device's queries, leading axes [B, T, H].
    """

    queries: Callable[[jax.Array], jax.Array]
    merge: Callable[[blocks.Partial], blocks.Partial]


def mla(
    q_BTHQ: jax.Array,
    cache_BSC: jax.Array | Rows,
    w_k_HNC: jax.Array,
    w_v_HVC: jax.Array,
    positions_BT: jax.Array,
    *,
    scale: float,
    spread: Spread | None = None,
    implementation: str = "auto",
    query_block: int | None = None,
    key_block: int | None = None,
) -> jax.Array:
    """Causal attention of queries over a cache of latents.

    With a cache row ``[c | r]`` (latent c of width C, raw part r of width R, shared by all heads
    and never rotated) and a query ``[q_nope | q_rope]`` of widths N and R, head h computes::

        score[s] = scale * (q_nope . w_k[h] c[s] + q_rope . r[s])        s <= position
        o        = w_v[h] sum_s softmax(score)[s] c[s]

    "expanded" makes ``w_k c`` and ``w_v c`` for every row first; "absorbed" scores ``w_k^T q_nope``
    against c and applies w_v to the weighted latent. Both are differentiable and bound their
    memory: query blocks always, key blocks with an online softmax for long S. Scores accumulate
    and the softmax runs in float32; float32 products use full precision.

    Args:
      q_BTHQ: float32 or bfloat16, Q = N + R.
      cache_BSC: [B, S, C + R] or a view of such rows, the same dtype. Rows after every position of
        their batch row may hold anything, NaN included; rows up to a position must be finite.
      w_k_HNC: [H, N, C], the key rows of kv_b_proj; same dtype.
      w_v_HVC: [H, V, C], the value rows of kv_b_proj; same dtype.
      positions_BT: int32, the cache row of each query; it attends to rows s <= position.
        -1 marks a padded query, whose output is zero.
      scale: (N + R) ** -0.5 in K3.
      spread: when other devices hold other rows; always absorbed.
      implementation: "auto" or a name in `IMPLEMENTATIONS`. The kernels run the absorbed form;
        "auto" takes one where it would be absorbed and the device has one that takes these shapes.
      query_block: queries at a time, or None for a size from ``blocks.BUDGET_BYTES``.
      key_block: cache rows at a time, or None likewise.

    Returns:
      o_BTHV in the queries' dtype.

    Raises:
      ValueError: an unknown implementation, or shapes or dtypes that do not fit; the message
        names them.

    Source: DeepSeek-V2 (latent attention and absorption); Moonshot's published modelling code
    (no rotation, raw shared part).
    """
    check(q_BTHQ, cache_BSC, w_k_HNC, w_v_HVC, positions_BT, spread=spread is not None)
    return dispatch(
        q_BTHQ,
        cache_BSC,
        w_k_HNC,
        w_v_HVC,
        ("positions", positions_BT),
        scale=scale,
        spread=spread,
        implementation=implementation,
        query_block=query_block,
        key_block=key_block,
    )


def choose(q_BTHQ, cache_BSC, w_k_HNC, w_v_HVC) -> tuple[str, str]:
    """The form "auto" takes for these shapes, and why.

    Expanded costs ``S (N + V) C + T S (N + R + V)`` products a head, absorbed
    ``T (N + V) C + T S (2 C + 2 R)``. At K3's sizes the two meet at 158 queries for long S, so
    decode is absorbed and prefill expanded, as long as the per-head keys fit EXPANDED_BYTES.
    """
    batch, queries, heads, width = q_BTHQ.shape
    keys, row = cache_BSC.shape[1:]
    (_, nope, latent), value = w_k_HNC.shape, w_v_HVC.shape[1]
    size = batch * keys * heads * (width + value) * q_BTHQ.dtype.itemsize
    costly = keys * (nope + value) * latent + queries * keys * (width + value)
    cheap = queries * (nope + value) * latent + queries * keys * 2 * row
    if costly > cheap:
        return "absorbed", f"{queries} queries over {keys} rows do not repay expanding them"
    if size > EXPANDED_BYTES:
        return "absorbed", f"expanded keys and values take {size} bytes, over {EXPANDED_BYTES}"
    return "expanded", f"fewer products, and {size} bytes of keys and values"


def dispatch(q_BTHQ, cache_BSC, w_k_HNC, w_v_HVC, where, *, scale, implementation, **options):
    """Run the named or chosen form; ``where`` is explained in ``xla``.

    Options: spread, query_block and key_block of `mla`.
    """
    arrays = (q_BTHQ, Rows.of(cache_BSC), w_k_HNC, w_v_HVC)
    implementation, reason = pick(implementation, *arrays, where, options.get("spread"))
    log.debug(
        "mla: %s (%s); %d queries, %d rows",
        *(implementation, reason, q_BTHQ.shape[1], cache_BSC.shape[1]),
    )
    if implementation in latent.KERNELS:
        return latent.attention(implementation, *arrays, where, scale=scale, **options)
    return portable(implementation, *arrays, where, scale=scale, **options)


def pick(implementation: str, q_BTHQ, rows: Rows, w_k_HNC, w_v_HVC, where, spread=None):
    """(name, reason) of what runs for ``implementation``, a name or "auto".

    Raises:
      ValueError: the name is unknown, or its kernel is for other devices or refuses these shapes.
    """
    if implementation not in ("auto", *IMPLEMENTATIONS):
        known = ", ".join(("auto", *IMPLEMENTATIONS))
        raise ValueError(f"mla: implementation {implementation!r} is not one of {known}")
    if implementation in PORTABLE and (implementation == "absorbed" or spread is None):
        return implementation, "asked for"
    form, reason = "absorbed", "the cache is spread over devices"
    if spread is None and where[0] == "positions":
        form, reason = choose(q_BTHQ, rows, w_k_HNC, w_v_HVC)
    if implementation == "auto" and form == "expanded":
        return form, reason
    name, why = choice.select(
        *("mla", implementation, IMPLEMENTATIONS, latent.KERNELS),
        target.device_kind(),
        (q_BTHQ, rows, w_k_HNC, where),
    )
    return (name, why) if name in latent.KERNELS else (form, f"{reason}; {why}")


def portable(
    form, q_BTHQ, rows, w_k_HNC, w_v_HVC, where, *, scale, spread=None, query_block=None,
    key_block=None,
):  # fmt: skip
    """The portable forms with planned block sizes."""
    queries, heads, width = q_BTHQ.shape[1:]
    batch, keys, row = rows.shape
    size = q_BTHQ.dtype.itemsize
    extra = {}
    if spread is not None:
        heads = jax.eval_shape(spread.queries, q_BTHQ).shape[2]
        extra["spread"] = spread
    if form == "expanded":
        per_key, out = batch * heads * (width + w_v_HVC.shape[1]) * size, w_v_HVC.shape[1]
    else:
        per_key, out = batch * row * size, row
    # Scores and weights in float32, and the membership mask; queries, sums and one update of them.
    pair = batch * (heads * 8 + 1)
    per_query = batch * heads * (width * size + 2 * out * 4)
    plan = blocks.plan(queries, keys, pair=pair, per_key=per_key, per_query=per_query)
    return PORTABLE[form](
        *(q_BTHQ, rows, w_k_HNC, w_v_HVC, where),
        scale=scale,
        query_block=query_block or plan[0],
        key_block=min(key_block or plan[1], keys),
        **extra,
    )


def check(
    q_BTHQ, cache_BSC, w_k_HNC, w_v_HVC, rows_BT, name: str = "mla", spread: bool = False
) -> None:
    """Raise ValueError unless shapes and dtypes fit together (see ``mla``)."""
    arrays = (q_BTHQ, cache_BSC, w_k_HNC, w_v_HVC)
    if len({a.dtype for a in arrays}) != 1 or q_BTHQ.dtype not in (jnp.float32, jnp.bfloat16):
        kinds = ", ".join(str(a.dtype) for a in arrays)
        raise ValueError(f"{name}: q, cache, w_k, w_v must share float32 or bfloat16, got {kinds}")
    if rows_BT.dtype != jnp.int32:
        raise ValueError(f"{name}: positions or indices must be int32, got {rows_BT.dtype}")
    (batch, queries, heads, width), (_, nope, latent) = q_BTHQ.shape, w_k_HNC.shape
    fits = (
        cache_BSC.shape[0] == rows_BT.shape[0]
        and (spread or cache_BSC.shape[0] == batch)
        and cache_BSC.shape[1] > 0
        and cache_BSC.shape[2] - latent == width - nope >= 0
        and w_k_HNC.shape[0] == w_v_HVC.shape[0] == heads
        and w_v_HVC.shape[2] == latent
        and rows_BT.shape[1] == queries
    )
    if not fits:
        shapes = " ".join(str(a.shape) for a in (*arrays, rows_BT))
        raise ValueError(f"{name}: shapes do not fit: q, cache, w_k, w_v, positions = {shapes}")
