"""The loss that teaches the sparse-attention indexer where attention goes.

The top-k selection passes no gradient, so the indexer learns from the attention itself: its softmax
over the keys is pulled towards the attention distribution, summed over heads. Source: DeepSeek-V3.2
technical report, section 2.1 (dense warm-up over all keys, then over the selected set).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def indexer_loss(
    index_scores_BTS: jax.Array, attention_probs_BTS: jax.Array, valid_BTS: jax.Array
) -> jax.Array:
    """``mean_t KL(p_t || softmax(I_t))`` over queries with at least two valid keys.

    ``p_t`` is the attention distribution summed over heads and divided by its sum over the valid
    keys. It carries no gradient; the caller stops the gradient of the indexer's inputs too, so that
    the loss trains the indexer alone.

    Args:
      index_scores_BTS: the indexer's scores, float32 [batch, queries, keys].
      attention_probs_BTS: attention probabilities summed or averaged over heads.
      valid_BTS: bool; causal keys (dense attention) or the selected ones (sparse). Rows without a
        valid key (pads) count as nothing.

    Returns:
      float32 scalar in nats, at least 0.
    """
    scores = jnp.where(valid_BTS, index_scores_BTS.astype(jnp.float32), -jnp.inf)
    peak = jnp.max(scores, axis=-1, keepdims=True)
    peak = jax.lax.stop_gradient(jnp.where(jnp.isfinite(peak), peak, 0.0))
    shifted = jnp.where(valid_BTS, index_scores_BTS.astype(jnp.float32) - peak, 0.0)
    total = jnp.sum(jnp.where(valid_BTS, jnp.exp(shifted), 0.0), axis=-1, keepdims=True)
    log_q = shifted - jnp.log(jnp.maximum(total, 1e-30))

    target = jax.lax.stop_gradient(attention_probs_BTS.astype(jnp.float32))
    target = jnp.where(valid_BTS, target, 0.0)
    target = target / jnp.maximum(jnp.sum(target, axis=-1, keepdims=True), 1e-30)
    log_p = jnp.log(jnp.maximum(target, 1e-30))
    divergence = jnp.sum(jnp.where(target > 0, target * (log_p - log_q), 0.0), axis=-1)
    counted = jnp.sum(valid_BTS, axis=-1) > 1
    rows = jnp.maximum(jnp.sum(counted, dtype=jnp.float32), 1.0)
    return jnp.sum(jnp.where(counted, divergence, 0.0)) / rows
