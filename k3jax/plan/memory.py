"""Bytes a device holds: the arrays of the model and of its caches under a layout, exactly."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import jax
import jax.numpy as jnp
from flax import nnx

from k3jax import programs
from k3jax.cache import state as cache_state
from k3jax.config import Config
from k3jax.model import Transformer
from k3jax.plan.hardware import TPUS
from sharding import Layout
from sharding.resolve import Leaf, bytes_per_device, check, local_shape, named, stored

WEIGHTS = {
    "experts": "routed experts",
    "kda": "KDA weights",
    "mla": "global attention",
    "indexer": "indexer",
    "latent": "latent, router",
    "router": "latent, router",
    "shared": "shared experts",
    "dense": "dense MLP",
    "embedding": "embedding, head",
    "head": "embedding, head",
    "depth": "norms, depth queries",
}
TOWER = "vision tower"  # stands beside the step, in programs of its own
CACHES = {
    "state_BHVK": "KDA state",
    "tails_3BWP": "conv tails",
    "latent_BSC": "latents",
    "index_key_BSK": "index keys",
    "index_factor_BS": "index keys",
    "lengths_B": "conv tails",  # a few bytes
}


@dataclass(frozen=True)
class Weight:
    """A parameter: the component of the model it belongs to (`sharding.report.COMPONENTS`)."""

    name: str
    component: str
    leaf: Leaf


@dataclass(frozen=True)
class Step:
    """One call of the model.

    Attributes:
      kind: "decode" or "prefill".
      batch: sequences, a multiple of the devices that split them.
      tokens: new tokens a sequence; 1 to decode, the chunk to prefill.
      context: tokens a sequence has with the new ones, and rows its cache holds.
    """

    kind: str
    batch: int
    tokens: int
    context: int


@lru_cache(maxsize=8)
def weights(config: Config, dtype=jnp.bfloat16) -> tuple[Weight, ...]:
    """Every parameter of a model, as a description."""
    leaves = named(nnx.state(Transformer.abstract(config, dtype=dtype)))
    return tuple(
        Weight(name, component(config, name), Leaf(tuple(v.shape), v.dtype, tuple(v.axes)))
        for name, v in leaves.items()
    )


def component(config: Config, name: str) -> str:
    """The component of a parameter, from its path such as "period.0.attention.q_proj"."""
    parts = name.split(".")
    if parts[0] in ("embed", "lm_head"):
        return {"embed": "embedding", "lm_head": "head"}[parts[0]]
    if parts[0] not in ("head", "period", "tail"):
        return "depth"  # output_res, final_norm
    spec = getattr(config.schedule, parts[0])[int(parts[1])]
    if parts[2] == "attention":
        if spec.attention == "kda":
            return "kda"
        return "indexer" if parts[3] == "indexer" else "mla"
    if parts[2] != "ffn":
        return "depth"
    if spec.ffn == "dense":
        return "dense"
    if parts[3].startswith(("w13", "w2")):
        return "experts"
    return parts[3].partition("_")[0]  # router, router_bias, latent_down, .., shared


def caches(config: Config, step: Step, dtype=jnp.bfloat16) -> dict[str, Leaf]:
    """The cache arrays of a step by path, as descriptions."""
    shapes = programs.abstract_cache(config, step.batch, step.context, dtype)
    described = jax.tree.map(
        lambda x, axes: Leaf(tuple(x.shape), x.dtype, axes), shapes, cache_state.axes(shapes)
    )
    return named(described)


def cache_bytes(layout: Layout, leaf: Leaf) -> int:
    """Bytes of a cache array on one device. A TPU keeps it row-major in tiles of 8 x 128 (fewer
    rows where there are fewer), so a row of 576 values takes 640."""
    if layout.chip not in TPUS or len(leaf.shape) < 2:
        return bytes_per_device(layout, leaf)
    *lead, rows, width = local_shape(layout, leaf)
    tile = min(8, 1 << (rows - 1).bit_length())
    size = jnp.dtype(leaf.dtype).itemsize
    return math.prod(lead) * (-(-rows // tile) * tile) * (-(-width // 128) * 128) * size


def owned_tokens(layout: Layout, step: Step) -> int:
    """New tokens whose residual stream one device holds."""
    group = step.batch // layout.size(layout.batch) * step.tokens
    return math.ceil(group / layout.size(layout.tensor))


def per_device(
    config: Config, layout: Layout, step: Step, dtype=jnp.bfloat16
) -> tuple[dict[str, int], int]:
    """(bytes of one device by kind, those of the step's arguments).

    Weights and caches are what is stored, caches with a TPU's padding of rows. "block vectors" are
    those of owned tokens; "workspace" is an estimate that the compiler's figure replaces.

    Raises:
      LayoutError: the model's arrays do not divide under the layout.
    """
    held = {w.name: w.leaf for w in weights(config, dtype)}
    held = stored(layout, held)
    cached = caches(config, step, dtype)
    check(layout, held | cached, heads=(config.kda.num_heads, config.mla.num_heads))
    out = dict.fromkeys(WEIGHTS.values(), 0)
    for w in weights(config, dtype):
        out[WEIGHTS[w.component]] += bytes_per_device(layout, held[w.name])
    for name, leaf in cached.items():
        kind = CACHES[name.rpartition(".")[2]]
        out[kind] = out.get(kind, 0) + cache_bytes(layout, leaf)
    rows = step.batch // layout.size(layout.batch)
    arguments = sum(out.values()) + 4 * rows * (step.tokens + 1)  # ids and lengths
    size = jnp.dtype(dtype).itemsize
    vectors = (config.num_blocks + 1) * config.hidden_size * size
    out["block vectors"] = owned_tokens(layout, step) * vectors
    out["workspace"] = sum(_workspace(config, layout, step, size))
    return {kind: n for kind, n in out.items() if n}, arguments


def _workspace(config: Config, layout: Layout, step: Step, size: int) -> Iterator[int]:
    """Temporaries of the widest sublayer, the dispatch of tokens and the logits: an estimate."""
    group = step.batch // layout.size(layout.batch) * step.tokens
    tensor, moe = layout.size(layout.tensor), config.moe
    # KDA: input, q, k, v, decay, gate and output of all heads here, four of them in float32 too.
    yield group * (2 * config.hidden_size + 10 * config.kda.width // tensor) * size
    # Every device of the experts' axes may have to take every token: latents in, float32 out.
    arrive = owned_tokens(layout, step) * layout.size(layout.experts)
    yield arrive * (moe.latent_size * (size + 4) + 8 * moe.num_experts_per_token)
    # Logits, and the scores of an indexer while it looks for the largest.
    vocabulary = config.vocab_size // layout.size(layout.over("vocab"))
    yield step.batch // layout.size(layout.batch) * vocabulary * 4
    if config.dsa is not None:
        rows = min(step.context, 2**31)
        queries = min(owned_tokens(layout, step), 128)
        yield queries * rows // layout.size(layout.cache_sequence) * 4
