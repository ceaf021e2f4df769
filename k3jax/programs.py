"""The programs of a model: forward, prefill and decode as functions of arrays, on any layout.

On a layout each is one fully manual `shard_map`: a device computes on its shards, and communicates
only through `sharding.collectives`. XLA decides nothing about the spreading, so the plan of a
layout (`k3jax plan`) can be read off the traced program.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from k3jax.cache import state as cache_state
from k3jax.config import Config
from k3jax.model import Transformer
from sharding import Layout, resolve
from sharding.compile import row_major
from sharding.parallel import SINGLE, Parallel

PHASES = ("prefill", "decode")
TENSOR_SPLITS = ("latent", "mlp", "shared_mlp", "vocab")


def parallel(layout: Layout | None, phase: str) -> Parallel:
    """The roles of the mesh axes in a phase, "prefill" or "decode"."""
    if layout is None:
        return SINGLE
    return Parallel(
        batch=layout.batch,
        tensor=layout.tensor,
        experts=layout.experts,
        cache_sequence=layout.cache_sequence,
        embed=layout.over("embed"),
        split=frozenset(name for name in TENSOR_SPLITS if layout.over(name)),
        dispatch=layout.dispatch[phase],
    )


def variables(module: nnx.Module) -> list[Any]:
    """The variables of a module in the order of its flattened state."""
    return jax.tree.leaves(nnx.split(module)[1], is_leaf=lambda v: isinstance(v, nnx.Variable))


def check(config: Config, module: nnx.Module, layout: Layout) -> None:
    """Refuse a layout that this model does not divide over.

    Raises:
      LayoutError: every array, axis and number that does not fit.
    """
    leaves = resolve.named(nnx.split(module)[1])
    resolve.check(layout, leaves, heads=(config.kda.num_heads, config.mla.num_heads))


@dataclass(frozen=True)
class Programs:
    """Pure functions over the flat parameters of one model, and where their arrays live.

    Attributes:
      forward: ``(leaves, tokens_BT, embeddings_BTD, lengths_B, *, collect) -> (logits, aux)``.
      prefill: ``(leaves, cache, tokens_BT, lengths_B, features_BTD) -> (logits_BV, cache)``; the
        rows of images may be left out.
      decode: ``(leaves, cache, tokens_B, lengths_B) -> (logits_BV, cache)``; lengths are 1, or 0
        for a row that stays as it is; None for all rows.
      verify: ``(leaves, cache, tokens_BT, lengths_B, accepted_B) -> (logits_BTV, cache)`` with
        windows of drafts; ``accepted_B`` counts in the windows that ``cache`` comes with, or is
        None where it has none.
      commit: ``(leaves, cache, accepted_B) -> cache``; its windows mean nothing any more.
      leaf_specs: of the parameters, in order.
      batch: the spec of arrays that lead with the batch.
    """

    forward: Callable[..., Any]
    prefill: Callable[..., Any]
    decode: Callable[..., Any]
    verify: Callable[..., Any]
    commit: Callable[..., Any]
    leaf_specs: tuple[P, ...]
    batch: P

    @classmethod
    def of(
        cls,
        module: Transformer,
        layout: Layout | None = None,
        mesh: Mesh | AbstractMesh | None = None,
    ) -> Programs:
        """Programs of a module (which may be abstract) on a layout and its mesh."""
        graphdef, state = nnx.split(module)
        treedef = jax.tree.structure(state)

        def bind(leaves):
            return nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves))

        def forward(leaves, tokens_BT, embeddings_BTD, lengths_B, *, collect=()):
            return bind(leaves)(
                tokens_BT,
                embeddings_BTD=embeddings_BTD,
                lengths_B=lengths_B,
                collect=collect,
                parallel=parallel(layout, "prefill"),
            )

        def prefill(leaves, cache, tokens_BT, lengths_B, features_BTD=None):
            roles = parallel(layout, "prefill")
            return bind(leaves).extend(tokens_BT, cache, lengths_B, roles, features_BTD)

        def decode(leaves, cache, tokens_B, lengths_B=None):
            tokens_BT = tokens_B[:, None]
            return bind(leaves).extend(tokens_BT, cache, lengths_B, parallel(layout, "decode"))

        def verify(leaves, cache, tokens_BT, lengths_B, accepted_B=None):
            roles = parallel(layout, "decode")
            return bind(leaves).verify(tokens_BT, cache, accepted_B, lengths_B, roles)

        def commit(leaves, cache, accepted_B):
            return bind(leaves).commit(cache, accepted_B)

        if layout is None:
            return cls(forward, prefill, decode, verify, commit, (), P())
        specs = tuple(resolve.spec(layout, v) for v in variables(module))
        batch = P(layout.batch)
        vocab = layout.over("vocab") or None
        specs_of = functools.partial(array_specs, layout)
        spread = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)

        def spread_forward(leaves, tokens_BT, embeddings_BTD, lengths_B, *, collect=()):
            return spread(
                functools.partial(forward, collect=collect),
                in_specs=(specs, batch, batch, batch),
                out_specs=(P(layout.batch, None, vocab), P(None, layout.batch)),
            )(leaves, tokens_BT, embeddings_BTD, lengths_B)

        def spread_prefill(leaves, arrays, tokens_BT, lengths_B, features_BTD=None):
            cache = specs_of(arrays)
            ins, out = (specs, cache, batch, batch, batch), (P(layout.batch, vocab), cache)
            inputs = (leaves, arrays, tokens_BT, lengths_B, features_BTD)
            return spread(prefill, in_specs=ins, out_specs=out)(*inputs)

        def spread_decode(leaves, arrays, tokens_B, lengths_B):
            cache = specs_of(arrays)
            ins, out = (specs, cache, batch, batch), (P(layout.batch, vocab), cache)
            return spread(decode, in_specs=ins, out_specs=out)(leaves, arrays, tokens_B, lengths_B)

        def spread_verify(leaves, arrays, tokens_BT, lengths_B, accepted_B=None):
            windows = jax.eval_shape(lambda a: cache_state.with_windows(a, 1, jnp.bfloat16), arrays)
            ins = (specs, specs_of(arrays), batch, batch, batch)
            out = (P(layout.batch, None, vocab), specs_of(windows))
            inputs = (leaves, arrays, tokens_BT, lengths_B, accepted_B)
            return spread(verify, in_specs=ins, out_specs=out)(*inputs)

        def spread_commit(leaves, arrays, accepted_B):
            windows = specs_of(arrays)
            ins = (specs, windows, batch)
            return spread(commit, in_specs=ins, out_specs=windows)(leaves, arrays, accepted_B)

        return cls(
            spread_forward,
            spread_prefill,
            spread_decode,
            spread_verify,
            spread_commit,
            specs,
            batch,
        )


def abstract_cache(
    config: Config, batch: int, length: int, dtype, window: int | None = None
) -> cache_state.CacheArrays:
    """Shapes of the decode state of ``batch`` sequences of ``length`` tokens, and ``window`` drafts
    of each that wait to be committed."""

    def arrays():
        cache = cache_state.empty(config, batch, length, dtype)
        return cache if window is None else cache_state.with_windows(cache, window, dtype)

    return jax.eval_shape(arrays)


def cache_specs(
    config: Config, layout: Layout, window: int | None = None
) -> cache_state.CacheArrays:
    """The spec of every array of the decode state."""
    return array_specs(layout, abstract_cache(config, 1, 1, jnp.bfloat16, window))


def array_specs(layout: Layout, arrays: cache_state.CacheArrays) -> cache_state.CacheArrays:
    """The spec of every array of a decode state; that may have windows or page tables."""
    names = cache_state.axes(arrays)
    return jax.tree.map(
        lambda a, axes: resolve.spec(layout, resolve.Leaf(a.shape, a.dtype, axes)), arrays, names
    )


def cache_formats(
    config: Config, layout: Layout, mesh: Mesh, window: int | None = None
) -> cache_state.CacheArrays:
    """Sharding and memory order of every array of the decode state."""
    arrays = abstract_cache(config, 1, 1, jnp.bfloat16, window)
    specs = cache_specs(config, layout, window)
    return row_major(
        jax.tree.map(
            lambda a, spec: jax.ShapeDtypeStruct(
                a.shape, a.dtype, sharding=NamedSharding(mesh, spec)
            ),
            *(arrays, specs),
        )
    )


def padded(layout: Layout | None, batch: int, length: int) -> tuple[int, int]:
    """The batch and cache length that a layout makes of what is asked for: both are rounded up so
    that they divide over its devices."""
    if layout is None:
        return batch, length
    groups, stripes = layout.size(layout.batch), layout.size(layout.cache_sequence)
    return -(-batch // groups) * groups, -(-length // stripes) * stripes


def abstract_step(
    config: Config,
    layout: Layout,
    mesh: Mesh | AbstractMesh,
    phase: str,
    *,
    batch: int,
    context: int,
    chunk: int = 1,
    dtype=jnp.bfloat16,
):
    """A whole step from shapes alone, to trace or to compile without devices or memory.

    Args:
      phase: "decode" for one token a sequence, "prefill" for ``chunk`` tokens a sequence.
      batch, context: sequences, and tokens that their caches hold; rounded up as `padded`.
    Returns:
      (function, arguments): `jax.ShapeDtypeStruct` with shardings where ``mesh`` has devices. The
      second argument is the cache, which the result replaces: donate it.
    """
    if phase not in PHASES:
        raise ValueError(f"phase {phase!r}: one of {PHASES}")
    module = Transformer.abstract(config, dtype, extra_experts=layout.extra_experts)
    check(config, module, layout)
    programs = Programs.of(module, layout, mesh)
    batch, context = padded(layout, batch, context)

    def place(array, spec):
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)

    leaves = [v.get_value() for v in variables(module)]
    leaves = tuple(map(place, leaves, programs.leaf_specs))
    cache = abstract_cache(config, batch, context, dtype)
    cache = jax.tree.map(place, cache, cache_specs(config, layout))
    shape = (batch,) if phase == "decode" else (batch, chunk)
    ids = place(jax.ShapeDtypeStruct(shape, np.int32), programs.batch)
    lengths = place(jax.ShapeDtypeStruct((batch,), np.int32), programs.batch)
    return getattr(programs, phase), (leaves, cache, ids, lengths)
