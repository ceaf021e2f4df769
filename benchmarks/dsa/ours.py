"""Inputs, and the programs of this repository that are timed on them."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.dsa import core
from benchmarks.dsa.cases import Case, rotation
from benchmarks.harness.programs import Program, Said, chain
from k3jax.cache.state import layer_cache
from k3jax.config import Config, LayerSpec
from k3jax.errors import InputError
from k3jax.layers.global_attention import GlobalAttention
from k3jax.layers.params import Maker
from k3jax.layers.tokens import Tokens
from k3jax.ops import choice, dsa, target
from k3jax.ops.mla import latent
from k3jax.ops.rows import Rows, Scaled
from k3jax.quantization import fp8
from sharding.parallel import SINGLE

bf16, f32 = jnp.bfloat16, jnp.float32
PORTABLE = "xla"  # "streamed" selection, and attention by `benchmarks.dsa.core`


def check(implementation: str) -> None:
    """Refuses a name that no op has.

    Raises:
      InputError: naming what there is.
    """
    names = ["auto", PORTABLE, *dict.fromkeys([*dsa.SELECT_KERNELS, *latent.KERNELS])]
    if implementation not in names:
        raise InputError(f"--implementation {implementation}: one of {', '.join(names)}")


def _normal(key, shape, dtype=bf16, scale=1.0):
    return (scale * jax.random.normal(key, shape, f32)).astype(dtype)


def quantised(keys_BSK: jax.Array) -> dict[str, jax.Array]:
    """Index keys in fp8: codes, and factors [B, S, 1]."""
    codes, factors = fp8.quantize(keys_BSK)
    return {"codes": codes, "factors": factors[..., None]}


def caches(case: Case, key) -> dict[str, Any]:
    """Random normal rows of one sequence, as far as the case reads them; latents of spread 0.5."""
    one, two = jax.random.split(key)
    made: dict[str, Any] = {}
    if case.selects:
        keys = _normal(one, (1, case.keys, case.index_dim))
        made["index"] = quantised(keys) if case.fp8 else {"keys": keys}
    if case.kind != "select":
        made["latent"] = _normal(two, (1, case.keys, case.width), scale=0.5)
    return made


def queries(case: Case, key) -> dict[str, jax.Array]:
    """Random normal index queries, head weights of either sign with both scales in them, absorbed
    queries, and positions that end at the last row."""
    one, two, three = jax.random.split(key, 3)
    T, H, K = case.tokens, case.index_heads, case.index_dim
    first = case.keys - T
    made = {"positions": first + jnp.arange(T, dtype=jnp.int32)[None]}
    if case.selects:
        made["q_index"] = _normal(one, (1, T, H, K))
        made["w"] = _normal(two, (1, T, H), f32, (H * K) ** -0.5)
    if case.kind != "select":
        made["q"] = _normal(three, (1, T, case.heads, case.width), scale=0.5)
    return made


def selections(case: Case, sets: int, calls: int) -> list[np.ndarray]:
    """int32 [1, T, k] for each call: ascending pieces of permutations of all rows, so that no row
    comes twice before every row of its cache did. Any of them may be beyond a query's position."""
    rng, size = np.random.default_rng(0), case.tokens * case.topk
    found: list[np.ndarray] = []
    rest = [np.empty(0, np.int32) for _ in range(sets)]
    per_query = case.keys // case.topk * case.topk  # a query never sees two permutations
    for call in range(calls):
        at = call % sets
        while len(rest[at]) < size:
            more = rng.permutation(case.keys)[:per_query].astype(np.int32)
            rest[at] = np.concatenate([rest[at], more])
        piece, rest[at] = rest[at][:size], rest[at][size:]
        found.append(np.sort(piece.reshape(1, case.tokens, case.topk), -1))
    return found


def scale(case: Case) -> float:
    """(query channels of a head)^-0.5."""
    return (case.inner[1] + case.rows[1]) ** -0.5


def index_keys(index: dict[str, jax.Array]) -> Rows | Scaled:
    if "keys" in index:
        return Rows.of(index["keys"])
    return Scaled(Rows.of(index["codes"]), Rows.of(index["factors"]))


def select(case: Case, implementation: str, cache, x) -> jax.Array:
    """int32 [1, T, k]."""
    name = "streamed" if implementation == PORTABLE else implementation
    keys: Any = index_keys(cache["index"])
    arguments = (x["q_index"], keys, x["w"], x["positions"], case.topk)
    return dsa.select(*arguments, implementation=name)


def attention(case: Case, implementation: str, cache, x, where):
    """Weighted latents [1, T, H, C] and log-sum-exp [1, T, H], by a kernel or the portable form."""
    rows = Rows.of(cache["latent"])
    name, _ = chosen(case, implementation)
    run = core.attention if name == PORTABLE else latent.LATENT[name]
    return run(x["q"], rows, where, scale=scale(case), width=case.rows[0])


def chosen(case: Case, implementation: str) -> tuple[str, str]:
    """(name, reason) of what attends for ``implementation``."""
    C, R = case.rows
    rows = Rows.of(jax.ShapeDtypeStruct((1, case.keys, C + R), bf16))  # pyright: ignore[reportArgumentType]
    q = jax.ShapeDtypeStruct((1, case.tokens, case.heads, case.inner[1] + R), bf16)
    w_k = jax.ShapeDtypeStruct((case.heads, case.inner[1], C), bf16)
    shape = (1, case.tokens) if case.kind == "dense" else (1, case.tokens, case.topk)
    kind = "positions" if case.kind == "dense" else "indices"
    where = (kind, jax.ShapeDtypeStruct(shape, jnp.int32))
    known, device = (PORTABLE, *latent.KERNELS), target.device_kind()
    arguments = (q, rows, w_k, where)
    return choice.select("attention", implementation, known, latent.KERNELS, device, arguments)


def step(case: Case, implementation: str, cache, x, state):
    """One call of a row that is not a layer."""
    if case.kind == "select":
        return select(case, implementation, cache, x), state
    if case.kind == "dense":
        where = ("positions", x["positions"])
    elif case.kind == "attend":
        where = ("indices", x["selected"])
    else:
        where = ("indices", select(case, implementation, cache, x))
    return attention(case, implementation, cache, x, where), state


def _config(case: Case) -> Config:
    """K3.1 with the case's sizes."""
    config = Config.preset("kimi-k3.1-pro")
    assert config.dsa is not None
    (latent_rank, rope), (q_rank, nope, value) = case.rows, case.inner
    mla = replace(
        config.mla,
        num_heads=case.heads,
        q_lora_rank=q_rank,
        kv_lora_rank=latent_rank,
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope,
        v_head_dim=value,
    )
    more: dict[str, Any] = {"index_key_dtype": "float8_e4m3fn"} if case.fp8 else {}
    sparse = replace(
        config.dsa, num_heads=case.index_heads, head_dim=case.index_dim, topk=case.topk, **more
    )
    return replace(config, hidden_size=case.hidden, mla=mla, dsa=sparse)


def _layer(case: Case, rngs: nnx.Rngs | None):
    """(graph, parameters), bf16."""
    return nnx.split(GlobalAttention(_config(case), Maker(rngs, bf16, 0.02)))


def _layer_cache(case: Case, key):
    """A full cache of one sequence, random normal."""
    empty = layer_cache(_config(case), LayerSpec("global", "moe"), 1, case.keys, bf16)
    leaves, structure = jax.tree.flatten(empty)
    keys = jax.random.split(key, len(leaves))
    drawn = [_normal(k, x.shape, x.dtype) for k, x in zip(keys, leaves, strict=True)]
    drawn = [abs(x) if x.dtype == f32 else x for x in drawn]  # factors of codes are positive
    return jax.tree.unflatten(structure, drawn)


def _layer_step(case: Case, graph, shared, x, cache):
    """The last tokens of a sequence: their rows are written over those of the cache."""
    first = case.keys - case.tokens
    positions_BT = first + jnp.arange(case.tokens, dtype=jnp.int32)[None]
    y, cache, _ = nnx.merge(graph, shared)(x, cache, Tokens.of(positions_BT, SINGLE))
    return y, cache


class Workload:
    """The arrays of a case, made once for all sides.

    ``arguments`` are (shared, inputs, states): caches in turn, or a layer's parameters; what the
    queries bring, for each call; and a layer's caches, which it writes.
    """

    def __init__(self, case: Case, most_sets: int = 24, most_calls: int = 96):
        self.case, self.layer = case, case.kind == "layer"
        self.sets, self.calls = rotation(case, most_sets, most_calls)
        self.shared: Any = None
        self.inputs: Any = None

    @cached_property
    def module(self):
        """(graph, shapes of the parameters) of a layer."""
        return _layer(self.case, None)

    def _shared(self):
        if self.layer:
            return _layer(self.case, nnx.Rngs(0))[1]
        make = jax.jit(partial(caches, self.case))
        return [make(key) for key in jax.random.split(jax.random.key(0), self.sets)]

    def _inputs(self):
        case, keys = self.case, jax.random.split(jax.random.key(1), self.calls)
        if self.layer:
            return [_normal(keys[0], (1, case.tokens, case.hidden))]
        make = jax.jit(partial(queries, case))
        return [make(key) for key in keys]

    def _states(self):
        if not self.layer:
            return []
        return [jax.jit(partial(_layer_cache, self.case))(jax.random.key(2))]

    def make(self) -> None:
        self.shared, self.inputs = self._shared(), self._inputs()
        if self.case.kind == "attend":
            drawn = selections(self.case, self.sets, self.calls)
            for x, selected in zip(self.inputs, drawn, strict=True):
                x["selected"] = jnp.asarray(selected)
        jax.block_until_ready((self.shared, self.inputs))

    def free(self) -> None:
        self.shared = self.inputs = None

    def shapes(self):
        """Of the arguments, without making one."""
        shared = self.module[1] if self.layer else jax.eval_shape(self._shared)
        inputs, states = jax.eval_shape(lambda: (self._inputs(), self._states()))
        if self.case.kind == "attend":
            shape = (1, self.case.tokens, self.case.topk)
            inputs = [x | {"selected": jax.ShapeDtypeStruct(shape, jnp.int32)} for x in inputs]
        return shared, inputs, states

    def compile(self, implementation: str):
        """(compiled program, what "auto" said) without making an array."""
        case, shapes = self.case, self.shapes()
        run = partial(step, case, implementation)
        if self.layer:
            run = partial(_layer_step, case, self.module[0])
        with Said("k3jax.ops.dsa", "k3jax.ops.mla") as said:
            one, (x, *_), states = shapes
            jax.eval_shape(run, one if self.layer else one[0], x, states[0] if states else None)
        words, portable = said.messages, False
        if not self.layer:
            portable = any(word.startswith("dsa.select: streamed") for word in words)
        if case.kind in ("attend", "both", "dense"):
            name, why = chosen(case, implementation)
            words, portable = [*words, f"attention: {name} ({why})"], portable or name == PORTABLE
        # The portable form takes long, and is long to compile: two calls, or one for each cache.
        calls = min(self.calls, max(2, self.sets)) if portable else self.calls
        program = chain(run, calls, 0 if self.layer else self.sets)
        lowered = jax.jit(program, donate_argnums=2).lower(*shapes)
        return (lowered.compile(), calls), "; ".join(words)

    def program(self, implementation: str, compiled) -> Program:
        executable, calls = compiled
        arguments = (self.shared, self.inputs, self._states())
        return Program(implementation, executable, arguments, calls)
