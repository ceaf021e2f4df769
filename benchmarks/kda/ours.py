"""Inputs, and the programs of this repository that are timed on them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks.harness.programs import Program, Said, chain
from benchmarks.kda.cases import EPS, LOWER_BOUND, Case, rotation
from k3jax.cache.state import KDACache
from k3jax.config import Config
from k3jax.errors import InputError
from k3jax.layers.kda import KimiDeltaAttention
from k3jax.layers.params import Maker
from k3jax.layers.tokens import Tokens
from k3jax.ops.kda import decode, gated, gated_kda, kda_decode
from sharding.parallel import SINGLE

BLOCK = 65_536  # tokens drawn; longer inputs repeat them, 1.6 GB apart
bf16, f32 = jnp.bfloat16, jnp.float32


def check(implementation: str) -> None:
    """Refuses a name that neither op has.

    Raises:
      InputError: naming what there is.
    """
    names = {"auto": None} | dict.fromkeys([*gated.IMPLEMENTATIONS, *decode.IMPLEMENTATIONS])
    if implementation not in names:
        raise InputError(f"--implementation {implementation}: one of {', '.join(names)}")


def _normal(key, shape, dtype=bf16, scale=1.0):
    return (scale * jax.random.normal(key, shape, f32)).astype(dtype)


def parameters(case: Case, key) -> dict[str, Any]:
    """A_log_H in [0, 1), dt_bias_HK of spread 0.1, and for decode filters and the head norm."""
    keys = jax.random.split(key, 6)
    H, K, P = case.heads, case.dim, case.width
    made: dict[str, Any] = {
        "A_log": jax.random.uniform(keys[0], (H,), f32),
        "dt_bias": _normal(keys[1], (H, K), f32, 0.1),
    }
    if case.kind == "decode":
        filters = [jax.random.uniform(key, (P, case.conv), f32, -0.5, 0.5) for key in keys[2:5]]
        made |= {"conv": tuple(filters), "norm": 1 + _normal(keys[5], (K,), f32, 0.1)}
    return made


def tokens(case: Case, key) -> dict[str, Any]:
    """Random normal bf16 inputs of one call; with ``lengths`` also initial states. Near keys have
    a cosine of about 0.9999, slow decays (1e-3 nats) and write strengths of 0.999."""
    keys = jax.random.split(key, 6)
    B, T, H, K = case.batch, case.tokens, case.heads, case.dim
    if case.kind == "decode":
        qkv = tuple(_normal(key, (B, case.width)) for key in keys[:3])
        z, gate = (_normal(key, (B, H, K)) for key in keys[3:5])
        return {"qkv": qkv, "z": z, "b": _normal(keys[5], (B, H)), "gate": gate}
    if case.lengths is not None:
        B, T = 1, case.real_tokens
    drawn = min(T, BLOCK)
    shapes = dict.fromkeys("qkvz", (B, drawn, H, K)) | {"b": (B, drawn, H)}
    made: dict[str, Any] = {
        name: _normal(key, shapes[name]) for name, key in zip(shapes, keys, strict=False)
    }
    if drawn < T:
        made = {n: jnp.tile(x, (1, T // drawn) + (1,) * (x.ndim - 2)) for n, x in made.items()}
    if case.near_keys:
        made["k"] = made["k"][:, :1] + (0.01 * made["k"]).astype(bf16)
        made["z"], made["b"] = jnp.full_like(made["z"], -8.5), jnp.full_like(made["b"], 6.9)
    if case.lengths is not None:
        made["state"] = _normal(keys[5], (case.batch, H, K, K), f32, 0.1)
    return made


def state(case: Case, key) -> tuple[jax.Array, jax.Array]:
    """(state_BHVK, tails_3BWP) of a decode step."""
    one, two = jax.random.split(key)
    B, H, K = case.batch, case.heads, case.dim
    tails = _normal(two, (3, B, case.conv - 1, case.width))
    return _normal(one, (B, H, K, K), f32, 0.1), tails


def prefill(case: Case, implementation: str, shared, x) -> tuple[jax.Array, jax.Array]:
    return gated_kda(
        x["q"],
        x["k"],
        x["v"],
        x["z"],
        x["b"],
        shared["A_log"],
        shared["dt_bias"],
        x.get("state"),
        lower_bound=LOWER_BOUND,
        packed_lengths_N=case.lengths,
        implementation=implementation,
    )


def decode_step(implementation: str, shared, x, carried):
    o, *carried = kda_decode(
        x["qkv"],
        x["z"],
        x["b"],
        x["gate"],
        shared["conv"],
        shared["A_log"],
        shared["dt_bias"],
        shared["norm"],
        *carried,
        lower_bound=LOWER_BOUND,
        eps=EPS,
        implementation=implementation,
    )
    return o, tuple(carried)


def _layer(case: Case, rngs: nnx.Rngs | None):
    """(graph, parameters) of K3's mixer with the case's widths, bf16."""
    config = Config.preset("kimi-k3")
    kda = replace(
        config.kda,
        num_heads=case.heads,
        head_dim=case.dim,
        conv_width=case.conv,
        gate_lower_bound=LOWER_BOUND,
    )
    config = replace(config, kda=kda, hidden_size=case.hidden)
    return nnx.split(KimiDeltaAttention(config, Maker(rngs, bf16, 0.02)))


def _layer_step(graph, shared, x, carried):
    positions_BT = jnp.full(x.shape[:2], 5, jnp.int32)
    module = nnx.merge(graph, shared)
    y, cache = module(x, KDACache(*carried), Tokens.of(positions_BT, SINGLE))
    return y, (cache.state_BHVK, cache.tails_3BWP)


class Workload:
    """The arrays of a case, made once for all sides.

    ``arguments`` are (shared, inputs, states): parameters, a list of sets of inputs, and a list of
    carried states (empty for prefill).
    """

    def __init__(self, case: Case, most_sets: int = 32, most_calls: int = 128):
        self.case = case
        self.sets, self.calls = 1, 1
        self.shared: Any = None
        self.inputs: Any = None
        if case.kind != "prefill":
            self.sets, self.calls = rotation(case, most_sets, most_calls)
        self.graph = None
        if case.kind == "layer":
            self.graph, self._abstract = _layer(case, None)

    def _shared(self):
        if self.case.kind == "layer":
            return _layer(self.case, nnx.Rngs(0))[1]
        return jax.jit(partial(parameters, self.case))(jax.random.key(0))

    def _inputs(self):
        case = self.case
        if case.kind == "layer":
            return [_normal(jax.random.key(1), (case.batch, 1, case.hidden))]
        make = jax.jit(partial(tokens, case))
        return [make(key) for key in jax.random.split(jax.random.key(1), self.sets)]

    def states(self):
        """Fresh ones for a side: they are consumed."""
        if self.case.kind == "prefill":
            return []
        make = jax.jit(partial(state, self.case))
        return [make(key) for key in jax.random.split(jax.random.key(2), self.sets)]

    def make(self) -> None:
        self.shared, self.inputs = self._shared(), self._inputs()
        jax.block_until_ready((self.shared, self.inputs))

    def free(self) -> None:
        self.shared = self.inputs = None

    def shapes(self):
        """Of the arguments, without making one."""
        layer = self.case.kind == "layer"
        shared = self._abstract if layer else jax.eval_shape(self._shared)
        return shared, *jax.eval_shape(lambda: (self._inputs(), self.states()))

    def compile(self, implementation: str):
        """(compiled program, what "auto" said) without making an array."""
        if self.case.kind == "prefill":

            def program(shared, inputs, states):
                return prefill(self.case, implementation, shared, inputs[0]), states

        elif self.case.kind == "decode":
            program = chain(partial(decode_step, implementation), self.calls)
        else:
            program = chain(partial(_layer_step, self.graph), self.calls)
        with Said("k3jax.ops.kda") as said:
            lowered = jax.jit(program, donate_argnums=2).lower(*self.shapes())
        return lowered.compile(), said.first

    def program(self, implementation: str, compiled) -> Program:
        arguments = (self.shared, self.inputs, self.states())
        return Program(implementation, compiled, arguments, self.calls)
