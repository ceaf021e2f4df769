"""Portable forms. All arithmetic in float32.

Rows of a bank are scored one at a time and mixed in one fused sum, so that at most one of them
stands in memory in float32 (28 KiB a token at K3's width): a compiler that does not fuse the
conversion into both sums of a score would make such a copy of the whole bank.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from k3jax.ops.rms_norm import rms_norm


def _key_weight(norm, query):
    return norm.astype(jnp.float32) * query.astype(jnp.float32)


def _scores(v: jax.Array, key_weight_D: jax.Array, eps: float) -> jax.Array:
    """[..., D] raw rows -> [...] float32."""
    v = v.astype(jnp.float32)
    inverse_rms = lax.rsqrt(jnp.mean(jnp.square(v), axis=-1) + jnp.float32(eps))
    return jnp.sum(v * key_weight_D, axis=-1) * inverse_rms


def _there(row: jax.Array, live) -> jax.Array:
    """Zeros for a row that is not there; it may hold NaN."""
    return jnp.where(live, row, jnp.zeros((), row.dtype))


def _bank_scores(score, bank_NBTD: jax.Array, count) -> jax.Array:
    """Scores of rows, -inf for those that are not there.

    Args:
      score: [B, T, D] -> [B, T] or [Q, B, T] float32.
    """

    @jax.checkpoint  # else the backward pass would keep every row in float32
    def one(row_BTD, live):
        return jnp.where(live, score(_there(row_BTD, live)), -jnp.inf)

    return lax.map(lambda x: one(*x), (bank_NBTD, jnp.arange(bank_NBTD.shape[0]) < count))


def _weighted(weights_NBT: jax.Array, bank_NBTD: jax.Array, count) -> jax.Array:
    """Sum over the rows in float32, in one pass."""
    rows = [_there(row, n < count).astype(jnp.float32) for n, row in enumerate(bank_NBTD)]
    products = [w[..., None] * row for w, row in zip(weights_NBT, rows, strict=True)]
    return functools.reduce(jnp.add, products)


def mix(
    bank_NBTD: jax.Array,
    partial_BTD: jax.Array,
    norm_D: jax.Array,
    query_D: jax.Array,
    count: jax.Array | int,
    *,
    eps: float,
) -> jax.Array:
    """Softmax mix of the first ``count`` bank rows and the running sum.

    Args:
      bank_NBTD: [N, B, T, D]; rows from ``count`` on may hold anything.
      partial_BTD: [B, T, D], the running sum of the current block.
      norm_D, query_D: [D], the norm weight and the fixed query of this read.
      count: valid bank rows, 0 to N; 0 returns ``partial_BTD`` unchanged.
      eps: inside the root of the key norm.
    Returns:
      [B, T, D] in the dtype of ``partial_BTD``.
    """
    key_weight = _key_weight(norm_D, query_D)
    score = lambda v_BTD: _scores(v_BTD, key_weight, eps)  # noqa: E731
    scores = _bank_scores(score, bank_NBTD, count)
    scores = jnp.concatenate([scores, score(partial_BTD)[None]])
    weights = jax.nn.softmax(scores, axis=0)
    mixed = _weighted(weights[:-1], bank_NBTD, count)
    own = weights[-1][..., None] * partial_BTD.astype(jnp.float32)
    return (mixed + own).astype(partial_BTD.dtype)


def read(
    bank_NBTD, partial_BTD, norm_D, query_D, out_norm_D, count, *,
    eps: float, out_eps: float, weight_after_cast: bool,
) -> jax.Array:  # fmt: skip
    """See `k3jax.ops.attention_residuals.read`."""
    mixed = mix(bank_NBTD, partial_BTD, norm_D, query_D, count, eps=eps)
    return rms_norm(mixed, out_norm_D, out_eps, weight_after_cast=weight_after_cast)


def mix_all(sources_NBTD, norm_D, query_D, count=None, *, eps: float) -> jax.Array:
    """The full (unblocked) variant: the mix over the embedding and every earlier sublayer output.

    Args:
      sources_NBTD: [N, B, T, D], oldest first; rows from ``count`` on may hold anything.
    Returns:
      [B, T, D] in the dtype of the sources.
    """
    count = sources_NBTD.shape[0] if count is None else count
    key_weight = _key_weight(norm_D, query_D)
    score = lambda v_BTD: _scores(v_BTD, key_weight, eps)  # noqa: E731
    weights = jax.nn.softmax(_bank_scores(score, sources_NBTD, count), axis=0)
    return _weighted(weights, sources_NBTD, count).astype(sources_NBTD.dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BankPart:
    """The bank's share of Q softmaxes, before the running sum is merged. All float32.

    Attributes:
      max_QBT: largest score; -inf where the bank is empty.
      sum_QBT: sum of exp(score - max).
      value_QBTD: sum of exp(score - max) times the raw rows.
    """

    max_QBT: jax.Array
    sum_QBT: jax.Array
    value_QBTD: jax.Array


def score_bank(bank_NBTD, norms_QD, queries_QD, count, *, eps: float) -> BankPart:
    """Phase one: scores of all ``count`` bank rows for the Q reads of a block at once.

    Args:
      bank_NBTD: [N, B, T, D]; rows from ``count`` on may hold anything.
      norms_QD, queries_QD: [Q, D], one pair a sublayer of the block.
    """
    key_weights = _key_weight(norms_QD, queries_QD)

    def score(v_BTD):
        v = v_BTD.astype(jnp.float32)
        inverse_rms = lax.rsqrt(jnp.mean(jnp.square(v), axis=-1) + jnp.float32(eps))
        dots = jnp.einsum("btd,qd->qbt", v, key_weights, precision=lax.Precision.HIGHEST)
        return dots * inverse_rms

    scores = _bank_scores(score, bank_NBTD, count)  # [N, Q, B, T]
    top = jnp.max(scores, axis=0)
    weights = jnp.where(jnp.isneginf(scores), 0.0, jnp.exp(scores - jnp.where(count > 0, top, 0.0)))
    return BankPart(top, jnp.sum(weights, axis=0), _weighted(weights, bank_NBTD[:, None], count))


def merge_partial(part: BankPart, index, partial_BTD, norm_D, query_D, *, eps: float) -> jax.Array:
    """Phase two: merge the running sum into read ``index`` of a `BankPart` by online softmax.

    Returns:
      [B, T, D] in the dtype of ``partial_BTD``; equal to `mix` up to float32 rounding.
    """
    score = _scores(partial_BTD, _key_weight(norm_D, query_D), eps)
    old_max = part.max_QBT[index]
    top = jnp.maximum(old_max, score)
    rescale, weight = jnp.exp(old_max - top), jnp.exp(score - top)
    total = part.sum_QBT[index] * rescale + weight
    own = weight[..., None] * partial_BTD.astype(jnp.float32)
    value = part.value_QBTD[index] * rescale[..., None] + own
    return (value / total[..., None]).astype(partial_BTD.dtype)


def merge_read(
    part: BankPart, index, partial_BTD, norm_D, query_D, out_norm_D, *,
    eps: float, out_eps: float, weight_after_cast: bool,
) -> jax.Array:  # fmt: skip
    """`merge_partial` and the sublayer's norm; equal to `read` up to one rounding of the mix."""
    mixed = merge_partial(part, index, partial_BTD, norm_D, query_D, eps=eps)
    return rms_norm(mixed, out_norm_D, out_eps, weight_after_cast=weight_after_cast)
