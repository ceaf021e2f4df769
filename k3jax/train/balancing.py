"""Quantile Balancing of the router: the selection bias that gives every expert the same load.

No auxiliary loss and no gradient. The bias computed on one batch selects on the next; it is frozen
in a saved checkpoint, and nothing at inference writes it.

Token i's *margin* for expert j is ``r_ij = alpha_i - s_ij``, with alpha_i the (k+1)-th largest of
``s_i + b``: the bias from which on j beats what token i leaves out. A bias that is the quantile of
an expert's margins at level k/E is reached by a share k/E of the tokens. Two forms of the quantile:

* exact: all margins sorted (`quantile_bias`), which needs all tokens in one place;
* histogram: counts of margins in bins (`count_margins`), which add up over microbatches and over
  devices as integers, then one quantile read inside a bin (`histogram_bias`).

Source: Kimi K3 technical report, section 2.3.3, equations 13 and 14; for the histogram, its public
reimplementations: 1,000 bins over [min(b) - 1, max(b) + 1], where every margin lies.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from k3jax.config import Config
from k3jax.errors import InputError

BINS = 1000
FORMS = ("exact", "histogram")


def quantile_bias(
    scores_NE: jax.Array, bias_E: jax.Array, k: int, valid_N: jax.Array | None = None
) -> jax.Array:
    """One exact update of the selection bias.

    The new bias of expert j is the quantile of its margins at level k/E (linear interpolation
    between order statistics, which for N k/E whole leaves exactly N k/E tokens on the chosen side).
    The mean over experts, which changes no choice, is taken off.

    Args:
      scores_NE: router scores after the sigmoid, float32 [tokens, experts].
      bias_E: the bias those tokens were routed with, float32.
      k: experts per token, below E.
      valid_N: bool, False for padding; None if all tokens count. Without any token the bias stays.

    Returns:
      The new bias, float32 [experts], mean 0.

    Raises:
      InputError: k is outside 1..E-1.
    """
    new_E = _quantiles(_margins(scores_NE, bias_E, k), k, valid_N)
    new_E = new_E - jnp.mean(new_E)
    return new_E if valid_N is None else jnp.where(valid_N.any(), new_E, bias_E)


def count_margins(
    scores_NE: jax.Array,
    bias_E: jax.Array,
    k: int,
    valid_N: jax.Array | None = None,
    *,
    bins: int = BINS,
) -> jax.Array:
    """int32 [experts, bins]: how many margins of each expert lie in each of ``bins`` even bins.

    Counts of batches routed with one bias add up. A margin that is NaN counts nowhere. For the
    arguments see `quantile_bias`.
    """
    experts = scores_NE.shape[-1]
    low, width = _bins(bias_E, bins)
    place_NE = jnp.floor((_margins(scores_NE, bias_E, k) - low) / width)
    counted_NE = ~jnp.isnan(place_NE)
    if valid_N is not None:
        counted_NE &= valid_N[:, None]
    # Clipped: rounding may put a margin at an end of the range one bin too far.
    place_NE = jnp.clip(jnp.where(counted_NE, place_NE, 0), 0, bins - 1).astype(jnp.int32)
    expert_E = jnp.arange(experts, dtype=jnp.int32)
    zeros = jnp.zeros((experts, bins), jnp.int32)
    return zeros.at[expert_E, place_NE].add(counted_NE.astype(jnp.int32))


def histogram_bias(
    counts_EB: jax.Array, bias_E: jax.Array, k: int, axis: str | tuple[str, ...] | None = None
) -> jax.Array:
    """The update from counts: each quantile within one bin of the exact one.

    Args:
      counts_EB: int32, from `count_margins`, summed over microbatches.
      bias_E: the bias they were counted with.
      axis: inside `jax.shard_map`, the mesh axes over which tokens are split: counts are summed
        over them, once, and every device has the same result. As they are integers, the result has
        the same bits for any number of devices and microbatches.

    The n margins of a bin stand evenly in it, the i-th at (i + 1/2) / n of its width, so each order
    statistic is less than a bin from the true one, and so is what is interpolated between two.

    Returns:
      float32 [experts], mean 0. An expert without any count keeps its bias.
    """
    counts_EB = counts_EB if axis is None else lax.psum(counts_EB, axis)
    experts, bins = counts_EB.shape
    _check(k, experts)
    low, width = _bins(bias_E, bins)
    before_EB = jnp.cumsum(counts_EB, axis=1)  # margins up to and with a bin
    total_E = before_EB[:, -1]
    lower_E, fraction_E = _ranks(total_E, k, experts)

    def statistic(rank_E):
        bin_E = jnp.minimum((before_EB <= rank_E[:, None]).sum(axis=1), bins - 1)
        count_E, before_E = (
            jnp.take_along_axis(a, bin_E[:, None], axis=1)[:, 0] for a in (counts_EB, before_EB)
        )
        inside_E = (rank_E - (before_E - count_E)).astype(jnp.float32) + 0.5
        share_E = inside_E / jnp.maximum(count_E, 1).astype(jnp.float32)
        return low + width * (bin_E.astype(jnp.float32) + share_E)

    upper_E = jnp.minimum(lower_E + 1, jnp.maximum(total_E - 1, 0))
    new_E = statistic(lower_E) * (1 - fraction_E) + statistic(upper_E) * fraction_E
    new_E = jnp.where(total_E > 0, new_E, bias_E)
    return new_E - jnp.mean(new_E)


def balanced_bias(
    scores_NE: jax.Array, bias_E: jax.Array, k: int, *, updates: int = 40
) -> jax.Array:
    """The bias that gives every expert N k/E of these very tokens, to about one.

    Not for training: it is fitted to its batch. An update of `quantile_bias` leaves an expert alone
    whose share is anywhere in [(k-1)/E, k/E], since the tokens for which it comes right after the
    chosen ones, a share of 1/E, all have the margin b_j; so repeating it stops at loads a few
    percent low. Here alpha_i lies halfway between the k-th and the (k+1)-th of a token, which has
    no such rest. Each update goes half the way, because all experts move at once, and the bias with
    the most even loads is kept.

    Args:
      updates: 40 bring 4,096 tokens, 28 experts and k = 4 to 584, 585 or 586 of 585.1 (measured).
    """

    _check(k, scores_NE.shape[-1], scores_NE.shape)
    scores_NE = scores_NE.astype(jnp.float32)

    def update(_, carry):
        bias_E, best_E, least = carry
        best_Nk = lax.top_k(scores_NE + bias_E, k + 1)[0]
        alpha_N1 = best_Nk[:, k - 1 :].mean(axis=1, keepdims=True)
        load_E = (scores_NE + bias_E > alpha_N1).sum(axis=0)
        spread = load_E.max() - load_E.min()
        best_E = jnp.where(spread < least, bias_E, best_E)
        new_E = _quantiles(alpha_N1 - scores_NE, k, None)
        return (bias_E + new_E - jnp.mean(new_E)) / 2, best_E, jnp.minimum(spread, least)

    bias_E = bias_E.astype(jnp.float32)
    start = bias_E, bias_E, jnp.int32(scores_NE.shape[0] + 1)
    return lax.fori_loop(0, updates, update, start)[1]


def _check(k: int, experts: int, scores: tuple[int, ...] = (1, 1)) -> None:
    if not 0 < k < experts:
        raise InputError(f"k: {k} is outside 1..{experts - 1} for {experts} experts")
    if len(scores) != 2 or not scores[0]:
        raise InputError(f"scores {scores} are not [tokens, experts] with a token")


def _margins(scores_NE, bias_E, k: int) -> jax.Array:
    """float32 [tokens, experts]: alpha_i - s_ij, without a gradient."""
    experts = scores_NE.shape[-1]
    _check(k, experts, scores_NE.shape)
    scores_NE = lax.stop_gradient(scores_NE.astype(jnp.float32))
    # A sort, because XLA's partitioner gathers all tokens for a top-k.
    alpha_N = jnp.sort(scores_NE + bias_E.astype(jnp.float32), axis=-1)[:, experts - k - 1]
    return alpha_N[:, None] - scores_NE


def _ranks(total: jax.Array, k: int, experts: int) -> tuple[jax.Array, jax.Array]:
    """The quantile at level k/E of ``total`` values lies at rank ``lower + fraction``, from 0.

    That is (total - 1) k / E, in integers: float32 has no whole numbers past 2^24.
    """
    last = jnp.maximum(total - 1, 0)
    rest = k * (last % experts)
    lower = k * (last // experts) + rest // experts
    return lower, (rest % experts).astype(jnp.float32) / experts


def _quantiles(margin_NE: jax.Array, k: int, valid_N: jax.Array | None) -> jax.Array:
    """float32 [experts]: of all tokens or of the valid ones, of which there must be one."""
    tokens, experts = margin_NE.shape
    if valid_N is not None and (valid_N.shape != (tokens,) or valid_N.dtype != bool):
        raise InputError(f"valid: {valid_N.dtype} {valid_N.shape} is not bool [{tokens}]")
    total = jnp.int32(tokens)
    if valid_N is not None:
        margin_NE = jnp.where(valid_N[:, None], margin_NE, jnp.inf)  # sorted behind all others
        total = valid_N.sum().astype(jnp.int32)
    sorted_NE = jnp.sort(margin_NE, axis=0)
    lower, fraction = _ranks(total, k, experts)
    upper = jnp.minimum(lower + 1, jnp.maximum(total - 1, 0))
    return sorted_NE[lower] * (1 - fraction) + sorted_NE[upper] * fraction


def _bins(bias_E: jax.Array, bins: int) -> tuple[jax.Array, jax.Array]:
    """(low, width) of even bins over [min(b) - 1, max(b) + 1]: scores are in [0, 1]."""
    low, high = bias_E.min() - 1.0, bias_E.max() + 1.0
    return low, (high - low) / bins


def balance(
    scores_LNE: jax.Array,
    bias_LE: jax.Array,
    k: int,
    *,
    tokens: int,
    momentum: float,
    form: str = "exact",
) -> jax.Array:
    """The update for all MoE layers at once, smoothed.

    Args:
      scores_LNE: float32 [MoE layers, tokens, experts].
      bias_LE: float32 [MoE layers, experts].
      tokens: about how many of them enter the sort of the exact form, which takes every n-th. With
        8,192 tokens and k/E = 1/8 the share of a layer's tokens an expert gets is known to 3 %
        (binomial), which the moving average brings below 1 %. The histogram counts them all.
      momentum: weight of the old bias; 0 is the published form.
      form: one of `FORMS`.

    Returns:
      float32 [MoE layers, experts].
    """
    if form not in FORMS or tokens < 1:
        raise InputError(f"balance: form {form!r} of {FORMS} and tokens {tokens} of 1 or more")
    if form == "exact":
        step = max(1, scores_LNE.shape[1] // tokens)
        new_LE = jax.vmap(quantile_bias, (0, 0, None))(scores_LNE[:, ::step], bias_LE, k)
    else:
        counts_LEB = jax.vmap(count_margins, (0, 0, None))(scores_LNE, bias_LE, k)
        new_LE = jax.vmap(histogram_bias, (0, 0, None))(counts_LEB, bias_LE, k)
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


def module_bias(module) -> jax.Array:
    """All router biases of a `Transformer`, float32 [MoE layers, experts]."""
    return get_bias(nnx.to_pure_dict(nnx.split(module)[1]), module.config)


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
