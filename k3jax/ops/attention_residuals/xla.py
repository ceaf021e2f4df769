"""Portable forms. All arithmetic in float32, HIGHEST precision on every contraction."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

HIGHEST = lax.Precision.HIGHEST


def _scores(v: jax.Array, key_weight: jax.Array, eps: float) -> jax.Array:
    """[..., D] raw rows, [D] or [Q, D] norm times query -> [...] or [..., Q], all float32."""
    inverse_rms = lax.rsqrt(jnp.mean(jnp.square(v), axis=-1) + jnp.float32(eps))
    dots = jnp.einsum("...d,qd->...q", v, jnp.atleast_2d(key_weight), precision=HIGHEST)
    scores = dots * inverse_rms[..., None]
    return scores if key_weight.ndim == 2 else scores[..., 0]


def _key_weight(norm, query):
    return norm.astype(jnp.float32) * query.astype(jnp.float32)


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
      bank_NBTD: [N, B, T, D]; rows from ``count`` on are not read (they must be finite).
      partial_BTD: [B, T, D], the running sum of the current block.
      norm_D, query_D: [D], the norm weight and the fixed query of this read.
      count: valid bank rows, 0 to N; 0 returns ``partial_BTD`` unchanged.
      eps: inside the root of the key norm.
    Returns:
      [B, T, D] in the dtype of ``partial_BTD``.
    """
    key_weight = _key_weight(norm_D, query_D)
    bank, partial = bank_NBTD.astype(jnp.float32), partial_BTD.astype(jnp.float32)
    live_N = jnp.arange(bank.shape[0]) < count
    bank_scores = jnp.where(live_N[:, None, None], _scores(bank, key_weight, eps), -jnp.inf)
    scores = jnp.concatenate([bank_scores, _scores(partial, key_weight, eps)[None]])
    weights = jax.nn.softmax(scores, axis=0)
    mixed = jnp.einsum("nbt,nbtd->btd", weights[:-1], bank, precision=HIGHEST)
    return (mixed + weights[-1][..., None] * partial).astype(partial_BTD.dtype)


def mix_all(sources_NBTD, norm_D, query_D, count=None, *, eps: float) -> jax.Array:
    """The full (unblocked) variant: the mix over the embedding and every earlier sublayer output.

    Args:
      sources_NBTD: [N, B, T, D], oldest first; rows from ``count`` on are not read.
    Returns:
      [B, T, D] in the dtype of the sources.
    """
    v = sources_NBTD.astype(jnp.float32)
    scores = _scores(v, _key_weight(norm_D, query_D), eps)
    if count is not None:
        live_N = jnp.arange(v.shape[0]) < count
        scores = jnp.where(live_N[:, None, None], scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=0)
    return jnp.einsum("nbt,nbtd->btd", weights, v, precision=HIGHEST).astype(sources_NBTD.dtype)


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
      bank_NBTD: [N, B, T, D].
      norms_QD, queries_QD: [Q, D], one pair a sublayer of the block.
    """
    v = bank_NBTD.astype(jnp.float32)
    scores = _scores(v, _key_weight(norms_QD, queries_QD), eps)  # [N, B, T, Q]
    live_N = jnp.arange(v.shape[0]) < count
    scores = jnp.where(live_N[:, None, None, None], scores, -jnp.inf)
    top = jnp.max(scores, axis=0)
    weights = jnp.where(jnp.isneginf(scores), 0.0, jnp.exp(scores - jnp.where(count > 0, top, 0.0)))
    value = jnp.einsum("nbtq,nbtd->qbtd", weights, v, precision=HIGHEST)
    move = lambda x: jnp.moveaxis(x, -1, 0)  # noqa: E731
    return BankPart(move(top), move(jnp.sum(weights, axis=0)), value)


def merge_partial(part: BankPart, index, partial_BTD, norm_D, query_D, *, eps: float) -> jax.Array:
    """Phase two: merge the running sum into read ``index`` of a `BankPart` by online softmax.

    Returns:
      [B, T, D] in the dtype of ``partial_BTD``; equal to `mix` up to float32 rounding.
    """
    partial = partial_BTD.astype(jnp.float32)
    score = _scores(partial, _key_weight(norm_D, query_D), eps)
    old_max = part.max_QBT[index]
    top = jnp.maximum(old_max, score)
    rescale, weight = jnp.exp(old_max - top), jnp.exp(score - top)
    total = part.sum_QBT[index] * rescale + weight
    value = part.value_QBTD[index] * rescale[..., None] + weight[..., None] * partial
    return (value / total[..., None]).astype(partial_BTD.dtype)
