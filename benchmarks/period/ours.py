"""Parameters, caches and inputs, and the decode step of the model that is timed on them."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks.harness import fill
from benchmarks.harness.programs import Program, Said, chain
from benchmarks.period.cases import Case, PeriodConfig
from k3jax.layers.decoder import Depth
from k3jax.model import Transformer, positions
from k3jax.programs import abstract_cache
from sharding.resolve import named

bf16 = jnp.bfloat16
LOW, HIGH = 118, 122  # scale bytes: weights of 0.02 root mean square
# (end of a parameter's name, spread, mean) in the order of the search; else the model's spread
SPREADS = (
    ("norm", 0.1, 1.0),
    ("A_log", 0.8, 1.4),
    ("dt_bias", 0.1, 0.0),
    ("router_bias", 0.0, 0.0),
    ("conv", 0.29, 0.0),
    ("query", 0.02, 0.0),
)
LOGGERS = ("grouped_matmul", "kda", "mla", "attention_residuals")


def parameter(config: PeriodConfig, name: str, shape, dtype, seed: int) -> jax.Array:
    """A parameter made on the device, by its name."""
    if dtype == jnp.uint8:
        make = fill.scales(shape, seed, LOW, HIGH) if name.endswith("scales") else None
        return fill.codes(shape, seed) if make is None else make
    found = [(spread, mean) for end, spread, mean in SPREADS if name.endswith(end)]
    return fill.uniform(shape, seed, dtype, *(found[0] if found else (config.initializer_range,)))


class Store:
    """The parameters of one model at a time: 67 GB at full size."""

    def __init__(self):
        self.config: PeriodConfig | None = None
        self.leaves: Any = None

    def get(self, config: PeriodConfig) -> list[jax.Array]:
        if self.config != config:
            self.leaves = None
            gc.collect()
            state = nnx.split(Transformer.abstract(config))[1]
            made = []
            for seed, (name, variable) in enumerate(named(state).items()):
                x = variable.get_value()
                made.append(parameter(config, name, x.shape, x.dtype, 1000 + seed))
            self.leaves, self.config = jax.block_until_ready(made), config
        return self.leaves


def cache_leaf(case: Case, path, x) -> jax.Array:
    """A cache that ``context - 1`` tokens left, full of random numbers."""
    if path[-1].name == "lengths_B":
        return jnp.full(x.shape, case.context - 1, x.dtype)
    seed = sum(map(ord, jax.tree_util.keystr(path)))
    return fill.uniform(x.shape, seed, x.dtype, 0.1 if x.dtype == jnp.float32 else 0.5)


class Workload:
    """The arrays of a case: parameters, the depth that earlier layers left, and a cache, which a
    step writes in place. Its length stays as it is, so every step does the same work."""

    sets = calls = 1

    def __init__(self, case: Case, store: Store):
        self.case, self.store = case, store
        self.graphdef, state = nnx.split(Transformer.abstract(case.config))
        self.treedef = jax.tree.structure(state)
        self.abstract = [x.get_value() for x in named(state).values()]
        self.shared: Any = None
        self.inputs: Any = None

    def _depth(self) -> Depth:
        config, first = self.case.config, self.case.first_layer
        one = (self.case.batch, 1, config.hidden_size)
        count = -(-first // config.attn_res_block_size)
        bank = fill.uniform((config.num_blocks, *one), 1, bf16, 1.0)
        return Depth(bank, fill.uniform(one, 2, bf16, 1.0), jnp.int32(count), jnp.int32(first))

    def _cache(self):
        case = self.case
        shapes = abstract_cache(case.config, case.batch, case.context, bf16)
        return jax.tree_util.tree_map_with_path(lambda p, x: cache_leaf(case, p, x), shapes)

    def make(self) -> None:
        self.shared = self.store.get(self.case.config)
        self.inputs = jax.block_until_ready([self._depth()])

    def free(self) -> None:
        """Keeps the parameters, which other cases share."""
        self.shared = self.inputs = None

    def step(self, leaves, depth: Depth, cache):
        """((the running sum after the last layer [B, 1, D], the experts of each layer and token,
        int32 [layers, B, 1, k]), the cache)."""
        model = nnx.merge(self.graphdef, jax.tree.unflatten(self.treedef, leaves))
        at = positions(cache.lengths_B, 1, None)
        after, cached, routing = model.backbone(depth, at, cache, ("routing",))
        assert cached is not None
        out = after.partial_BTD, routing["expert_ids"]
        return out, replace(cached, lengths_B=cache.lengths_B)

    def compile(self, implementation: str):
        """(compiled step, what ops chose) without making an array."""
        depth, cache = jax.eval_shape(lambda: (self._depth(), self._cache()))
        program = jax.jit(chain(self.step, self.calls), donate_argnums=2)
        with Said(*(f"k3jax.ops.{name}" for name in LOGGERS)) as said:
            lowered = program.lower(self.abstract, [depth], [cache])
        return lowered.compile(), "; ".join(said.messages)

    def program(self, implementation: str, compiled) -> Program:
        arguments = (self.shared, self.inputs, [self._cache()])
        return Program(implementation, compiled, arguments, self.calls)
