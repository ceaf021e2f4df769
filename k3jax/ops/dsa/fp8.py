"""Index keys in eight bits: how queries meet them, and how far two selections agree."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from k3jax.ops.rows import Rows, Scaled
from k3jax.quantization import fp8


def meet(q_BTHK, k_BSK, w_BTH) -> tuple[jax.Array, Rows | Scaled, jax.Array]:
    """Queries, a view of the keys and head weights, as every implementation takes them.

    For keys in eight bits queries get eight bits too, with a factor for each query and head. As a
    positive factor passes through the ReLU, it goes into the head weight:
    ``score = factor[s] * sum_h (w q_factor)[h] relu(q_code[h] . k_code[s])``.
    """
    if not isinstance(k_BSK, Scaled):
        return q_BTHK, Rows.of(k_BSK), w_BTH
    codes_BTHK, factor_BTH = fp8.quantize(q_BTHK)
    return codes_BTHK, k_BSK, w_BTH * factor_BTH


def agreement(a_BTk: jax.Array, b_BTk: jax.Array) -> jax.Array:
    """The share of the rows of selection ``a`` that selection ``b`` has too, over all queries.

    Args:
      a_BTk, b_BTk: int32 of `k3jax.ops.dsa.select`; -1 is none. Their k may differ.

    Returns:
      A float32 scalar from 0 to 1; 1 where ``a`` selects nothing.
    """
    # No row stands twice in one selection, so equal neighbours are a row of both.
    both = jnp.sort(jnp.concatenate([a_BTk, b_BTk], -1), -1)
    common = ((both[..., 1:] == both[..., :-1]) & (both[..., 1:] >= 0)).sum()
    count = (a_BTk >= 0).sum()
    share = common.astype(jnp.float32) / jnp.maximum(count, 1).astype(jnp.float32)
    return jnp.where(count == 0, jnp.float32(1), share)
