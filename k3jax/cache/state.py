"""The hybrid decode state: what a sequence carries from one call to the next.

A KDA layer keeps a fixed-size float32 state and the last ``width - 1`` inputs of its short
convolution. A global layer keeps one latent row a token and, in K3.1, one index key a token: in a
row of a batch for each sequence, or in pages of a pool that sequences share.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from k3jax.config import Config, LayerSpec
from k3jax.ops.kda import Window
from k3jax.ops.rows import Rows, Scaled


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
    """Rows of a layer, or with "layers" before them of a stack, which shares one table.

    With a table the arrays are pools: [N, P, ..] for N pages of P rows in place of [B, S, ..], and
    row s of sequence b is row ``s % P`` of page ``table_BM[b, s // P]``. A table entry of -1 is a
    page that does not exist: nothing is written there, and nobody may see its rows. Where caches
    are striped over n devices a page is striped as well: each device has P / n rows of it.

    Attributes:
    latent_BSC: [B, S, kv_lora_rank + rope], normed latent and raw rope part, model dtype.
    index_key_BSK: [B, S, K] for K3.1, else None; model dtype, or codes in float8_e4m3fn.
    index_factor_BS: [B, S] float32, what a key's codes are multiplied by; None for model dtype.
    table_BM: int32 pages of each sequence; None when a sequence is a row of the batch.
    """

    latent_BSC: jax.Array
    index_key_BSK: jax.Array | None
    index_factor_BS: jax.Array | None = None
    table_BM: jax.Array | None = None

    def latents(self, slot=None) -> Rows:
        return Rows.of(self.latent_BSC, slot, self.table_BM)

    def index_keys(self, slot=None) -> Rows | Scaled | None:
        if self.index_key_BSK is None:
            return None
        if self.index_factor_BS is not None:
            return Scaled.of(self.index_key_BSK, self.index_factor_BS, slot, self.table_BM)
        return Rows.of(self.index_key_BSK, slot, self.table_BM)

    def write(self, latent_BTC, key_BTK, factor_BT, positions_BT, slot=None) -> GlobalCache:
        """The cache with new rows at their positions, see `write_rows`; what it lacks is None."""

        def put(stack: jax.Array, rows) -> jax.Array:
            return write_rows(stack, rows, positions_BT, slot, self.table_BM)

        keys, factors = self.index_key_BSK, self.index_factor_BS
        return GlobalCache(
            put(self.latent_BSC, latent_BTC),
            None if keys is None else put(keys, key_BTK),
            None if factors is None else put(factors, factor_BT),
            self.table_BM,
        )


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
    "index_factor_BS": ("batch", "cache_sequence"),
    "table_BM": ("batch", "token"),  # pages of a sequence are whole, as its tokens are
}
"""Logical axes of each array; a stack of layers has "layers" before them. In a pool "batch" are its
pages and "cache_sequence" the rows of a page."""


def layer_cache(
    config: Config,
    spec: LayerSpec,
    batch: int,
    max_length: int,
    dtype,
    stack=None,
    page_size: int | None = None,
):
    """An empty cache of one layer, or of ``stack`` layers of its kind."""
    lead = () if stack is None else (stack,)
    if spec.attention == "kda":
        kda = config.kda
        state = (*lead, batch, kda.num_heads, kda.head_dim, kda.head_dim)
        tails = (*lead, 3, batch, kda.conv_width - 1, kda.width)
        return KDACache(jnp.zeros(state, jnp.float32), jnp.zeros(tails, dtype))
    rows, table = (*lead, batch, max_length), None
    if page_size is not None:
        pages = -(-max_length // page_size)
        rows = (*lead, batch * pages, page_size)
        table = jnp.arange(batch * pages, dtype=jnp.int32).reshape(batch, pages)
    latent = jnp.zeros((*rows, config.mla.cache_width), dtype)
    if config.dsa is None:
        return GlobalCache(latent, None, None, table)
    keys, factors = (*rows, config.dsa.head_dim), None
    if config.dsa.scaled_keys:
        dtype, factors = jnp.float8_e4m3fn, jnp.zeros(rows, jnp.float32)
    return GlobalCache(latent, jnp.zeros(keys, dtype), factors, table)


def empty(
    config: Config, batch: int, max_length: int, dtype, page_size: int | None = None
) -> CacheArrays:
    """Caches of all layers for ``batch`` sequences of at most ``max_length`` tokens.

    With a ``page_size`` (any number from 1) the rows of global layers lie in pages, as many as all
    sequences need at full length, in order; `with_table` deals them out anew.
    """
    schedule = config.schedule

    def one(spec, stack=None):
        return layer_cache(config, spec, batch, max_length, dtype, stack, page_size)

    return CacheArrays(
        lengths_B=jnp.zeros((batch,), jnp.int32),
        head=tuple(one(spec) for spec in schedule.head),
        period=tuple(one(spec, schedule.num_periods) for spec in schedule.period),
        tail=tuple(one(spec) for spec in schedule.tail),
    )


def with_table(cache: CacheArrays, table_BM: jax.Array) -> CacheArrays:
    """The cache with another page table, int32 [B, M], in every global layer; rows stay.

    A page is for one sequence, or for several that only read it. Every layer gets a copy: the whole
    cache is donated to a step, and an array can be donated once.
    """

    def one(c):
        if not isinstance(c, GlobalCache):
            return c
        return dataclasses.replace(c, table_BM=jnp.array(table_BM, jnp.int32, copy=True))

    return each(cache, one)


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

    return each(cache, one)


def each(cache: CacheArrays, one) -> CacheArrays:
    """The cache with ``one`` of every layer's, or stack's, cache."""
    groups = {name: tuple(map(one, getattr(cache, name))) for name in ("head", "period", "tail")}
    return dataclasses.replace(cache, **groups)


def write_rows(
    stack: jax.Array,
    rows_BTX: jax.Array,
    positions_BT: jax.Array,
    slot=None,
    table_BM: jax.Array | None = None,
) -> jax.Array:
    """Write token rows at their positions.

    Dropped are rows whose position is -1 or past the end, and those whose page does not exist.

    Args:
      stack: [B, S, ..], or [N, P, ..] with a table; "layers" stand before with a ``slot``.
      rows_BTX: [B, T, ..], cast to the dtype of the stack.
      table_BM: int32, the page of each P positions; -1 for none.
    """
    entries, size = stack.shape[:2] if slot is None else stack.shape[1:3]
    batch = jnp.arange(rows_BTX.shape[0], dtype=jnp.int32)[:, None]
    # A scatter to -1 would write the last row: send dropped rows past the end instead.
    if table_BM is None:
        entry, row = batch, jnp.where(positions_BT < 0, size, positions_BT)
    else:
        page = jnp.where(positions_BT < 0, table_BM.shape[1], positions_BT // size)
        entry = table_BM.at[batch, page].get(mode="fill", fill_value=-1)
        entry, row = jnp.where(entry < 0, entries, entry), positions_BT % size
    index = (entry, row) if slot is None else (slot, entry, row)
    return stack.at[index].set(rows_BTX.astype(stack.dtype), mode="drop")
