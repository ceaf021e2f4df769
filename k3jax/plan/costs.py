"""Operations of a step and the bytes it reads, per device and component: formulas, no tracing.

Two operations a multiply-add. Products of activations with weights come from the arrays of the
model (two operations a token and stored element); what has no weight is written out below.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jax.numpy as jnp

from k3jax.config import Config, DSAConfig
from k3jax.plan.memory import Step, Weight, owned_tokens, weights
from sharding import Layout
from sharding.resolve import Leaf, bytes_per_device, local_shape

KDA_CHUNK = 64  # tokens that the chunked form solves at once
INDEX_BYTES_FP8 = 1  # of an index key's value in engines that store it as fp8


@dataclass(frozen=True)
class Work:
    """What one device does in one component: operations, bytes read from and written to HBM."""

    operations: float
    bytes: float


@dataclass(frozen=True)
class _Sizes:
    """Counts that the formulas share. ``group`` tokens and ``rows`` sequences belong to one batch
    group, ``owned`` tokens to one device; ``stripe`` devices share a cache by rows."""

    config: Config
    layout: Layout
    step: Step
    group: int
    rows: int
    owned: int
    tensor: int
    stripe: int
    stripe_batch: int
    size: int  # bytes of a value

    @property
    def keys(self) -> int:
        """Cache rows that a new token may see, on average; the chunk is the end of the context."""
        return self.step.context - (self.step.tokens - 1) // 2

    def layers(self, attention: str = "", ffn: str = "") -> int:
        return sum(
            attention in (s.attention, "") and ffn in (s.ffn, "") for s in self.config.layers
        )


def work(config: Config, layout: Layout, step: Step, dtype=jnp.bfloat16) -> dict[str, Work]:
    """`Work` by component (`sharding.report.COMPONENTS`)."""
    rows = step.batch // layout.size(layout.batch)
    striped = layout.cache_sequence
    z = _Sizes(
        config,
        layout,
        step,
        rows * step.tokens,
        rows,
        owned_tokens(layout, step),
        layout.size(layout.tensor),
        layout.size(striped),
        layout.size(a for a in striped if a in layout.batch),
        jnp.dtype(dtype).itemsize,
    )
    totals: dict[str, list[float]] = {}
    parts: list[Callable[[_Sizes], Iterator[tuple[str, float, float]]]] = [
        _projections,
        _embedding,
        _depth,
        _kda,
        _attention,
        _indexer,
        _experts,
    ]
    for part in parts:
        for component, operations, moved in part(z):
            entry = totals.setdefault(component, [0.0, 0.0])
            entry[0] += operations
            entry[1] += moved
    return {component: Work(*entry) for component, entry in totals.items()}


def _projections(z: _Sizes) -> Iterator[tuple[str, float, float]]:
    """Weights but those of routed experts: 2 operations a token and element here; the weight is
    read once, inputs are read and outputs written once."""
    for w in weights(z.config):
        if w.component in ("experts", "embedding", "vision"):
            continue
        leaf = _gathered(z.layout, w.leaf)
        layers, local = 1, local_shape(z.layout, leaf)
        moved = float(bytes_per_device(z.layout, leaf))
        if leaf.axes[0] == "layers":
            layers, local = local[0], local[1:]
        operations = 0.0
        if len(local) == 2 and "conv" not in leaf.axes:
            tokens = _tokens(z, w)
            operations = 2.0 * layers * tokens * math.prod(local)
            moved += layers * tokens * sum(local) * z.size
        yield w.component, operations, moved


def _gathered(layout: Layout, leaf: Leaf) -> Leaf:
    """A weight as it is used: complete along "embed", which a layout may store in parts."""
    axes = tuple("expert_latent" if a == "embed" else a for a in leaf.axes)
    return Leaf(leaf.shape, leaf.dtype, axes)


def _tokens(z: _Sizes, w: Weight) -> int:
    """Tokens that a device multiplies with a weight: its own, or those of its batch group."""
    name = w.name.rpartition(".")[2]
    if w.component == "head":
        return z.rows  # the last token of a sequence
    if w.component == "indexer" and name != "wk":
        return z.group * z.stripe_batch if z.stripe > 1 else z.owned
    split = any(z.layout.over(axis) for axis in w.leaf.axes if axis not in ("embed", "layers"))
    if w.component in ("router", "indexer") or name in ("q_a_proj", "kv_a_proj"):
        return z.owned
    if w.component in ("latent", "shared", "dense") and not split:
        return z.owned
    return z.group


def _embedding(z: _Sizes) -> Iterator[tuple[str, float, float]]:
    """One row a token; every device of a group looks when the vocabulary is split."""
    tokens = z.group if z.layout.over("vocab") else z.owned
    yield "embedding", 0.0, 2.0 * tokens * z.config.hidden_size * z.size


def _depth(z: _Sizes) -> Iterator[tuple[str, float, float]]:
    """Two reads a layer and one at the end over n sources of width D: a square sum, a product with
    the query and a weighted sum, 6 n D. A sum and an addition write D each.

    n counts all rows of the bank, as it is a fixed buffer.
    """
    c, sources = z.config, z.config.num_blocks + 1
    reads = 2 * c.num_layers
    width = c.hidden_size * z.size
    yield "depth", 6.0 * z.owned * reads * sources * c.hidden_size, 0.0
    yield "depth", 0.0, z.owned * reads * (sources + 1 + 3) * width
    yield "head", 6.0 * z.rows * sources * c.hidden_size, z.rows * sources * width


def _kda(z: _Sizes) -> Iterator[tuple[str, float, float]]:
    """A token and head, with K = V and chunks of C tokens.

    Decode: decay, S'k, the outer product and S'q on the state: 7 K V. The state is read and
    written in float32, the tails in the model's dtype.
    Prefill: K K', Q K', the inverse applied to K and V, and P U inside the chunk: 10 C K + C C;
    W S, Q S and K'U with the state: 6 K V. The state travels once a chunk.
    """
    k = z.config.kda
    K, heads, layers = k.head_dim, k.num_heads // z.tensor, z.layers("kda")
    state = 2 * 4 * K * K * heads
    tails = 2 * 3 * (k.conv_width - 1) * heads * K * z.size
    if z.step.tokens == 1:
        operations, passes = 7.0 * K * K, 1
    else:
        C = min(KDA_CHUNK, z.step.tokens)
        operations, passes = 10.0 * C * K + C * C + 6 * K * K, math.ceil(z.step.tokens / KDA_CHUNK)
    conv = 2 * 3 * k.conv_width * K
    yield "kda", layers * z.group * heads * (operations + conv), 0.0
    yield "kda", 0.0, layers * z.rows * (passes * state + tails)


def _attention(z: _Sizes) -> Iterator[tuple[str, float, float]]:
    """A token, head and visible row of C = 512 + 64 values, in the absorbed form: 2 C for a score
    and 2 * 512 for the sum, and to go in and out of the latent 2 * 512 * (nope + v) a token, which
    the weights count. Expanded: keys and values of a row first, then 2 (nope + rope + v) a score.

    Dense attention takes the cheaper form and reads its rows once a sequence. Sparse attention
    gathers topk rows a token; of a striped cache every device holds up to topk of them.
    """
    c, m, layers = z.config, z.config.mla, z.layers("global")
    row = m.cache_width * z.size
    heads = m.num_heads // z.tensor
    yield "mla", 0.0, layers * z.group * row  # new rows
    absorbed = 2.0 * (m.cache_width + m.kv_lora_rank)
    if c.dsa is None or c.dsa.topk >= z.step.context:
        expand = 2.0 * m.kv_lora_rank * (m.qk_nope_head_dim + m.v_head_dim)
        pairs = z.group * heads * z.keys
        expanded = pairs * 2.0 * (m.qk_head_dim + m.v_head_dim)
        expanded += z.rows * z.step.context * heads * expand
        yield "mla", layers * min(pairs * absorbed, expanded), 0.0
        yield "mla", 0.0, layers * _striped_rows(z) * row
        return
    here = min(c.dsa.topk, math.ceil(z.step.context / z.stripe))
    queries = z.group * z.stripe_batch
    if z.stripe > 1:
        heads *= z.stripe // z.stripe_batch
    yield "mla", layers * queries * heads * here * absorbed, layers * queries * here * row


def _indexer(z: _Sizes) -> Iterator[tuple[str, float, float]]:
    """A token and visible row: a product of width 128 for each of 32 heads, relu, weighted sum:
    (2 * 128 + 3) * 32. Index keys, in the dtype the config gives them, are read once a sequence; a
    score is written and read once.

    Each device scores for the tokens it owns, or all tokens on its stripe of the rows.
    """
    d = z.config.dsa
    if d is None:
        return
    layers, key = z.layers("global"), index_key_bytes(d, z.size)
    yield "indexer", 0.0, layers * z.group * key  # new keys
    if d.topk >= z.step.context:
        return
    queries = z.group * z.stripe_batch if z.stripe > 1 else z.owned
    scored = queries * z.keys / z.stripe
    sequences = _striped_rows(z) if z.stripe > 1 else min(z.rows, z.owned) * z.step.context
    yield "indexer", layers * scored * (2 * d.head_dim + 3) * d.num_heads, 0.0
    yield "indexer", 0.0, layers * (sequences * key + 2 * 4 * scored)


def index_key_bytes(index: DSAConfig, size: int) -> int:
    """Bytes of a token's index key in the cache of a layer, for values of ``size`` bytes; in eight
    bits a value is a byte and a key has a float32 factor."""
    return index.head_dim + 4 if index.scaled_keys else index.head_dim * size


def _striped_rows(z: _Sizes) -> float:
    """Cache rows that this device holds."""
    return z.rows * z.stripe_batch * z.step.context / z.stripe


def _experts(z: _Sizes) -> Iterator[tuple[str, float, float]]:
    """An assignment of a token to an expert: 2 * 3 L F. With uniform routing the experts here that
    at least one of n tokens chooses, k of E, are E_here (1 - (1 - k/E)^n); each is read once."""
    c, moe = z.config, z.config.moe
    shards = z.layout.size(z.layout.experts)
    groups = z.layout.num_devices // shards
    tokens = z.step.batch * z.step.tokens / groups  # that meet at one set of experts
    L, F, k = moe.latent_size, moe.intermediate_size, moe.num_experts_per_token
    assigned = tokens * k / shards
    layers = z.layers(ffn="moe")
    hit = 1 - (1 - k / moe.num_experts) ** tokens
    held = sum(bytes_per_device(z.layout, w.leaf) for w in weights(c) if w.component == "experts")
    moved = layers * assigned * (2 * L + 3 * F) * z.size
    yield "experts", layers * assigned * 6.0 * L * F, held * hit + moved


def figures(config: Config) -> dict[str, float]:
    """The numbers a model is known by; bytes. ``*_at_million`` are read for one decoded token after
    10^6 tokens; there index keys are fp8, one byte a value, as engines keep them."""
    m, k, d = config.mla, config.kda, config.dsa
    layers = sum(s.attention == "global" for s in config.layers)
    kda = sum(s.attention == "kda" for s in config.layers)
    state = kda * k.num_heads * k.head_dim**2
    row = 2 * m.cache_width + (index_key_bytes(d, 2) if d else 0)
    found = {
        "cache_per_token": 1.0 * row * layers,
        "kda_state_bfloat16": 2.0 * state,
        "kda_state_float32": 4.0 * state,
        "block_vectors_per_token": 2.0 * (config.num_blocks + 1) * config.hidden_size,
        "dense_latents_at_million": 1e6 * 2 * m.cache_width * layers,
    }
    if d is not None:
        found["index_keys_at_million"] = 1e6 * INDEX_BYTES_FP8 * d.head_dim * layers
        found["selected_latents_at_million"] = 2.0 * d.topk * m.cache_width * layers
    return found
