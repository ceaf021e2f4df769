"""Quantile Balancing of the router: the selection bias that gives every expert the same load.

No auxiliary loss and no gradient. The bias computed on one batch selects on the next; it is frozen
in a saved checkpoint. Source: Kimi K3 technical report, section 2.3.3, equations 13 and 14.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from k3jax.config import Config


def quantile_bias(scores_NE: jax.Array, bias_E: jax.Array, k: int) -> jax.Array:
    """One exact update of the selection bias.

    ``alpha_i`` is the (k+1)-th largest of ``s_i + b``: what token i's expert j must reach to be
    chosen. Expert j is chosen by a share k/E of the tokens if its new bias is the quantile of
    ``alpha_i - s_ij`` at level k/E (linear interpolation between order statistics, which for
    N k/E whole leaves exactly N k/E tokens on the chosen side). The mean over experts, which
    changes no choice, is taken off.

    Args:
      scores_NE: router scores after the sigmoid, float32 [tokens, experts].
      bias_E: the bias those tokens were routed with, float32.
      k: experts per token, below E.

    Returns:
      The new bias, float32 [experts], mean 0.

    Raises:
      ValueError: k is outside 1..E-1.
    """
    experts = scores_NE.shape[-1]
    if not 0 < k < experts:
        raise ValueError(f"k: {k} is outside 1..{experts - 1} for {experts} experts")
    scores_NE = jax.lax.stop_gradient(scores_NE.astype(jnp.float32))
    bias_E = bias_E.astype(jnp.float32)
    alpha_N = jnp.sort(scores_NE + bias_E, axis=-1)[:, experts - k - 1]
    new_E = jnp.quantile(alpha_N[:, None] - scores_NE, k / experts, axis=0)
    return new_E - jnp.mean(new_E)


def balance(
    scores_LNE: jax.Array, bias_LE: jax.Array, k: int, *, tokens: int, momentum: float
) -> jax.Array:
    """The update for all MoE layers at once, on a thinned batch and smoothed.

    Every n-th token is used so that about ``tokens`` of them enter the sort. With 8,192 tokens and
    k/E = 1/8 the share of a layer's tokens an expert gets is known to 3 % (binomial), which the
    moving average brings below 1 %.

    Args:
      scores_LNE: float32 [MoE layers, tokens, experts].
      bias_LE: float32 [MoE layers, experts].
      momentum: weight of the old bias; 0 is the exact form.

    Returns:
      float32 [MoE layers, experts].
    """
    step = max(1, scores_LNE.shape[1] // tokens)
    new_LE = jax.vmap(quantile_bias, (0, 0, None))(scores_LNE[:, ::step], bias_LE, k)
    return momentum * bias_LE + (1.0 - momentum) * new_LE


def loads(expert_ids_LNk: jax.Array, num_experts: int) -> jax.Array:
    """Share of the assignments each expert got, float32 [layers, experts], rows sum to 1."""

    def count(ids_Nk):
        return jnp.bincount(ids_Nk.reshape(-1), length=num_experts)

    counts_LE = jax.vmap(count)(expert_ids_LNk).astype(jnp.float32)
    return counts_LE / expert_ids_LNk[0].size


def moe_layers(config: Config) -> list[tuple[str, int, int | None]]:
    """Where each MoE layer's parameters are, in layer order: (group, index, period or None)."""
    schedule = config.schedule
    return [schedule.locate(i) for i, spec in enumerate(config.layers) if spec.ffn == "moe"]


def get_bias(params: dict, config: Config) -> jax.Array:
    """All router biases of a nested parameter dict, float32 [MoE layers, experts]."""
    rows = []
    for group, index, period in moe_layers(config):
        value = params[group][index]["ffn"]["router_bias"]
        rows.append(value if period is None else value[period])
    return jnp.stack(rows)


def set_bias(params: dict, config: Config, bias_LE: jax.Array) -> dict:
    """The nested parameter dict with every router bias replaced; the rest is shared."""
    params = dict(params)
    stacked: dict[int, list[jax.Array]] = {}
    for row, (group, index, period) in enumerate(moe_layers(config)):
        if period is None:
            params = _replace(params, group, index, bias_LE[row])
        else:
            stacked.setdefault(index, []).append(bias_LE[row])
    for index, values in stacked.items():
        params = _replace(params, "period", index, jnp.stack(values))
    return params


def _replace(params: dict, group: str, index: int, value: jax.Array) -> dict:
    layer = dict(params[group][index])
    layer["ffn"] = {**layer["ffn"], "router_bias": value}
    return {**params, group: {**params[group], index: layer}}
