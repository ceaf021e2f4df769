"""Single layers at full size through the layer modules: experts, KDA, global attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.multi_device.common import (
    Bench,
    Result,
    Side,
    compare,
    draw,
    estimate,
    measure,
    own_spec,
    rms,
)
from k3jax.cache import state as cache_state
from k3jax.config import Config, LayerSpec
from k3jax.layers.feed_forward import LatentMoE
from k3jax.layers.global_attention import GlobalAttention
from k3jax.layers.kda import KimiDeltaAttention
from k3jax.layers.params import Maker
from k3jax.layers.tokens import Tokens
from k3jax.model import positions
from k3jax.plan.memory import Step
from k3jax.programs import parallel
from sharding import resolve
from sharding.experts import FORMS, dispatch
from sharding.resolve import Leaf

MOE = ("router", "experts", "latent", "shared")
GLOBAL = ("mla", "indexer")


def moe(bench: Bench):
    """One layer of packed experts with its shared expert, in every form of dispatch; then dispatch
    and combine alone, with experts that return their input."""
    sizes = bench.sizes
    config = _one_layer(sizes.config, "kda")
    module = LatentMoE(config, Maker(None, sizes.dtype, 0.02), "mxfp4")
    alone: dict[int, Result] = {}
    spread: dict[tuple[int, str], Result] = {}
    for side in (bench.one, bench.all):
        leaves = draw(side, _leaves(module))
        for tokens in sizes.moe_tokens:
            x = _tokens(side, config, tokens, sizes.dtype)
            if side is bench.one:
                alone[tokens] = measure(_moe_step(module, side, tokens), [leaves, x])
                continue
            for form in ("gather", "dense"):  # a layout of GPUs refuses ragged
                step = _moe_step(module, side.form(form), tokens)
                spread[tokens, form] = measure(step, [leaves, x])
        del leaves
    for (tokens, form), result in spread.items():
        result.output = result.output[:tokens]  # what follows is no token
        planned = [
            estimate(config, s.layout, Step("prefill", 1, tokens, tokens), found, MOE)
            for s, found in ((bench.all, result.collectives), (bench.one, ()))
        ]
        compare(
            *(bench, "moe", f"layer {form} T={tokens}", alone[tokens], result),
            estimate=planned[0],
            estimate_one=planned[1],
        )
    for tokens in sizes.moe_tokens:
        want = measure(*_exchange(bench.one, config, tokens, "gather", sizes.dtype))
        for form in FORMS:
            result = measure(*_exchange(bench.all, config, tokens, form, sizes.dtype))
            result.output = result.output[:tokens]
            compare(
                *(bench, "moe", f"exchange {form} T={tokens}", want, result),
                estimate=estimate(
                    *(config, bench.all.layout, Step("prefill", 1, tokens, tokens)),
                    *(result.collectives, ()),
                ),
            )


def _moe_step(module: LatentMoE, side: Side, count: int):
    call = _bound(module)

    def step(leaves, x_ND):
        tokens = Tokens.of(positions(jnp.zeros((1,), jnp.int32), count, None), _roles(side))
        y, _ = call(leaves)(x_ND[None], tokens)
        return y.reshape(x_ND.shape)

    own = own_spec(side)
    return _mapped(side, step, (_specs(side, _leaves(module)), own), own)


def _exchange(side: Side, config: Config, count: int, form: str, dtype):
    """(function, arguments): dispatch and combine, where an expert's output is its input."""
    E, L, k = config.moe.num_experts, config.moe.latent_size, config.moe.num_experts_per_token
    axes, own = side.layout.experts, own_spec(side)
    rng = np.random.default_rng(count)
    ids_Nk = np.argsort(rng.uniform(size=(count, E)), axis=1)[:, :k].astype(np.int32)
    weights_Nk = rng.uniform(0.5 / k, 1.5 / k, size=(count, k)).astype(np.float32)
    padding = [(0, -count % side.devices), (0, 0)]
    ids_Nk = np.pad(ids_Nk, padding, constant_values=-1)
    weights_Nk, count = np.pad(weights_Nk, padding), len(ids_Nk)
    (z_NL,) = draw(side, {"x": Leaf((count, L), jnp.dtype(dtype), ("heads", "expert_latent"))})

    def compute(z_ML, ids_Mk, weights_Mk):
        share_M = jnp.where(ids_Mk >= 0, weights_Mk, 0.0).sum(1)[:, None]
        return jnp.where(share_M > 0, z_ML.astype(jnp.float32) * share_M, 0.0)

    def step(z_NL, ids_Nk, weights_Nk):
        return dispatch(form, axes, z_NL, ids_Nk, weights_Nk, E, compute).astype(dtype)

    sharding = NamedSharding(side.mesh, own)
    routing = [jax.device_put(a, sharding) for a in (ids_Nk, weights_Nk)]
    return _mapped(side, step, (own, own, own), own), [z_NL, *routing]


def attention(bench: Bench):
    """A KDA layer and a global layer with heads split: a decode step, and a prompt at the end of
    the context."""
    z = bench.sizes
    cases = [
        ("kda", "decode", z.batch, 1, z.context),
        ("kda", "prefill", 1, z.prompt, z.context),
        ("global", "decode", z.batch, 1, z.context),
        ("global", "prefill", 1, z.prompt, z.context),
    ]
    for case in cases:
        _attention_case(bench, "attention", bench.one, bench.all, z.dtype, *case)
    exact = ("global", "decode", min(z.batch, 8), 1, z.context)
    _attention_case(bench, "attention", bench.one, bench.all, jnp.float32, *exact)


def striped(bench: Bench):
    """A decode step of a global layer over a long context whose rows are striped over devices."""
    z = bench.sizes
    for dtype, batch in [(z.dtype, b) for b in z.long_batches] + [(jnp.float32, 1)]:
        case = ("global", "decode", batch, 1, z.long_context)
        _attention_case(bench, "striped", bench.one, bench.all.striped(), dtype, *case)


def _attention_case(bench, section, one, many, dtype, kind, phase, batch, count, context):
    """In bfloat16 the last bits of an index query decide some rows of a selection among 131,072
    random keys, and a row is much; float32 shows whether the layout computes the same."""
    config = _one_layer(bench.sizes.config, kind)
    results, step = [], Step(phase, batch, count, context)
    for side in (one, many):
        function, arguments = _attention_step(side, config, dtype, kind, step)
        results.append(measure(function, arguments, state=2))
        del arguments
    planned = [
        estimate(config, s.layout, step, r.collectives, GLOBAL if kind == "global" else (kind,))
        for s, r in zip((one, many), results, strict=True)
    ]
    # Tokens that no device needed to own came last.
    want, got = ([a[: batch * count] for a in r.output] for r in results)
    more: dict[str, Any] = {"rms": rms(got[0], want[0])}
    if len(got) == len(want) == 2:
        # A score that differs in its last bits exchanges rows at the edge of a selection, which
        # random keys make visible: the numbers are compared where the same rows were read.
        same_N = (got[1] == want[1]).all(-1)
        more["rms_all"] = more["rms"]
        more["same_selection"] = float(same_N.mean())
        more["rows_in_common"] = _overlap(got[1], want[1])
        if same_N.any():
            more["rms"] = rms(got[0][same_N], want[0][same_N])
    name = f"{kind} {phase} B={batch} T={count} S={context} {jnp.dtype(dtype).name}"
    planned = {"estimate": planned[1], "estimate_one": planned[0]}
    compare(bench, section, name, *results, **planned, **more)


def _overlap(got_Nk, want_Nk) -> float:
    """Share of selected rows that both have, over at most 64 tokens."""
    some = range(0, len(got_Nk), max(1, len(got_Nk) // 64))
    shares = [len(np.intersect1d(got_Nk[i], want_Nk[i])) / len(set(want_Nk[i])) for i in some]
    return float(np.mean(shares))


def _attention_step(side: Side, config: Config, dtype, kind: str, what: Step):
    """(function, arguments) of a call on a full context; the last argument is its cache.

    The function gives ((outputs of owned tokens, [selected rows]), the cache after them).
    """
    make = Maker(None, dtype, 0.02)
    module = (KimiDeltaAttention if kind == "kda" else GlobalAttention)(config, make)
    call, roles = _bound(module), _roles(side, what.kind)
    scope = "kda" if kind == "kda" else "mla"
    batch, count = what.batch, what.tokens
    spec = LayerSpec("kda" if kind == "kda" else "global", "moe")
    shapes = jax.eval_shape(
        lambda: cache_state.layer_cache(config, spec, batch, what.context, dtype)
    )
    names = cache_state.axes(shapes)
    described = jax.tree.map(lambda a, axes: Leaf(a.shape, a.dtype, axes), shapes, names)
    is_leaf = lambda a: isinstance(a, Leaf)  # noqa: E731
    flat, treedef = jax.tree.flatten(described, is_leaf=is_leaf)
    labels = [path[-1].name for path, _ in jax.tree_util.tree_leaves_with_path(shapes)]
    cached = dict(zip(labels, flat, strict=True))
    own = own_spec(side)
    shows = kind == "global" and not side.layout.cache_sequence  # selected rows

    def step(leaves, x_ND, cache):
        before_B = jnp.full((batch,), what.context - count, jnp.int32)
        tokens = Tokens.of(positions(before_B, count, None), roles)
        lead = (1, tokens.per_device) if roles.tensor else (batch, count)
        with jax.named_scope(scope):
            y, cache, *aux = call(leaves)(x_ND.reshape(*lead, -1), cache, tokens)
        out = [y.reshape(x_ND.shape)]
        if shows:
            out.append(aux[0]["selected"].reshape(batch * count, -1))
        return out, cache

    cache_specs = jax.tree.unflatten(treedef, [resolve.spec(side.layout, a) for a in flat])
    function = _mapped(
        side,
        step,
        (_specs(side, _leaves(module)), own, cache_specs),
        ([own, P()] if shows else [own], cache_specs),
    )
    leaves = draw(side, _leaves(module))
    x = _tokens(side, config, batch * count, dtype)
    cache = jax.tree.unflatten(treedef, draw(side, cached, seed=1))
    return function, [leaves, x, cache]


def _one_layer(config: Config, attention: str) -> Config:
    return replace(config, layers=(LayerSpec(attention, "moe"),))


def _roles(side: Side, phase: str = "prefill"):
    return parallel(side.layout, phase)


def _leaves(module) -> dict[str, Any]:
    return resolve.named(nnx.split(module)[1])


def _specs(side: Side, leaves) -> list[P]:
    return [resolve.spec(side.layout, leaf) for leaf in leaves.values()]


def _bound(module):
    graphdef, state = nnx.split(module)
    treedef = jax.tree.structure(state)

    def bind(leaves: Sequence[jax.Array]):
        return nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves))

    return bind


def _mapped(side: Side, step, in_specs, out_specs):
    return jax.shard_map(
        step, mesh=side.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )


def _tokens(side: Side, config: Config, count: int, dtype) -> jax.Array:
    """Owned tokens [N, D], as a norm leaves them; N rounded up to divide."""
    count = -(-count // side.devices) * side.devices
    leaf = Leaf((count, config.hidden_size), jnp.dtype(dtype), ("heads", "embed"))
    return draw(side, {"x": leaf})[0]
