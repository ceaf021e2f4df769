"""The hybrid decode state: what a sequence carries from one call to the next.

A KDA layer keeps a fixed-size float32 state and the last ``width - 1`` inputs of its short
convolution. A global layer keeps one latent row a token and, in K3.1, one index key a token.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from k3jax.config import Config, LayerSpec
from k3jax.ops.kda import Window


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KDACache:
    """Attributes:
    state_BHVK: [B, H, V, K] float32.
    tails_3BWP: [3, B, W-1, P], pre-convolution inputs of q, k and v, model dtype, oldest first.
    window: drafts that were run and are not part of the state; or None.
    """

    state_BHVK: jax.Array
    tails_3BWP: jax.Array
    window: Window | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GlobalCache:
    """Attributes:
    latent_BSC: [B, S, kv_lora_rank + rope], normed latent and raw rope part, model dtype.
    index_key_BSK: [B, S, K] for K3.1, else None.
    """

    latent_BSC: jax.Array
    index_key_BSK: jax.Array | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CacheArrays:
    """One cache a layer, grouped as the model is; arrays of ``period`` lead with the period."""

    lengths_B: jax.Array
    head: tuple
    period: tuple
    tail: tuple


AXES = {
    "lengths_B": ("batch",),
    "state_BHVK": ("batch", "head_count", "head_dim", "head_dim"),
    "tails_3BWP": ("qkv", "batch", "conv", "heads"),
    "qkv_3BTP": ("qkv", "batch", "token", "heads"),
    "z_BTHK": ("batch", "token", "head_count", "head_dim"),
    "b_BTH": ("batch", "token", "head_count"),
    "latent_BSC": ("batch", "cache_sequence", "kv_cache"),
    "index_key_BSK": ("batch", "cache_sequence", "index_dim"),
}
"""Logical axes of each array; a stack of layers has "layers" before them."""


def layer_cache(config: Config, spec: LayerSpec, batch: int, max_length: int, dtype, stack=None):
    """An empty cache of one layer, or of ``stack`` layers of its kind."""
    lead = () if stack is None else (stack,)
    if spec.attention == "kda":
        kda = config.kda
        state = (*lead, batch, kda.num_heads, kda.head_dim, kda.head_dim)
        tails = (*lead, 3, batch, kda.conv_width - 1, kda.width)
        return KDACache(jnp.zeros(state, jnp.float32), jnp.zeros(tails, dtype))
    latent = jnp.zeros((*lead, batch, max_length, config.mla.cache_width), dtype)
    if config.dsa is None:
        return GlobalCache(latent, None)
    keys = jnp.zeros((*lead, batch, max_length, config.dsa.head_dim), dtype)
    return GlobalCache(latent, keys)


def empty(config: Config, batch: int, max_length: int, dtype) -> CacheArrays:
    """Caches of all layers for ``batch`` sequences of at most ``max_length`` tokens."""
    schedule = config.schedule

    def one(spec, stack=None):
        return layer_cache(config, spec, batch, max_length, dtype, stack)

    return CacheArrays(
        lengths_B=jnp.zeros((batch,), jnp.int32),
        head=tuple(one(spec) for spec in schedule.head),
        period=tuple(one(spec, schedule.num_periods) for spec in schedule.period),
        tail=tuple(one(spec) for spec in schedule.tail),
    )


def axes(arrays: CacheArrays) -> CacheArrays:
    """The logical axes of every array, in the same structure."""

    def one(path, leaf):
        names = AXES[path[-1].name]
        return ("layers", *names) if len(leaf.shape) > len(names) else names

    return jax.tree_util.tree_map_with_path(one, arrays)


def with_windows(cache: CacheArrays, length: int | None, dtype=None) -> CacheArrays:
    """The cache with an empty window of ``length`` rows in each `KDACache`; without any if None."""

    def window(state_BHVK, tails_3BWP):
        *lead, batch, heads, _, k_dim = state_BHVK.shape
        return Window(
            jnp.zeros((*lead, 3, batch, length, tails_3BWP.shape[-1]), dtype),
            jnp.zeros((*lead, batch, length, heads, k_dim), dtype),
            jnp.zeros((*lead, batch, length, heads), dtype),
        )

    def one(c):
        if not isinstance(c, KDACache):
            return c
        new = None if length is None else window(c.state_BHVK, c.tails_3BWP)
        return dataclasses.replace(c, window=new)

    groups = {name: tuple(map(one, getattr(cache, name))) for name in ("head", "period", "tail")}
    return dataclasses.replace(cache, **groups)


def write_rows(stack: jax.Array, rows_BTC: jax.Array, positions_BT: jax.Array, slot) -> jax.Array:
    """Write token rows at their positions; rows whose position is -1 are dropped.

    Args:
      stack: [B, S, C], or [L, B, S, C] with a ``slot``.
    """
    size = stack.shape[-2]
    # A scatter to -1 would write the last row: send dropped rows past the end instead.
    target = jnp.where(positions_BT < 0, size, positions_BT)
    batch = jnp.arange(rows_BTC.shape[0])[:, None]
    index = (batch, target) if slot is None else (slot, batch, target)
    return stack.at[index].set(rows_BTC.astype(stack.dtype), mode="drop")
