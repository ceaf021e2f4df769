"""Two periods of K3.1 Pro through `k3jax.runtime.Model`, and a small model in float32."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.multi_device.common import Bench, Result, Side, compare, draw, estimate, rms, timed
from k3jax.config import Config
from k3jax.model import Transformer
from k3jax.plan import plan
from k3jax.runtime import Model
from sharding import resolve
from sharding.report import COMPONENTS

EXACT = 1e-5  # of float32 logits


@dataclass(frozen=True)
class Prompt:
    tokens_BT: np.ndarray
    context: int


def sliced(bench: Bench):
    """The first layers at full width, with as many experts as one device can hold beside them."""
    z = bench.sizes
    config = z.config.truncated(z.layers)
    config = replace(config, moe=replace(config.moe, num_experts=z.slice_experts))
    what = f"{z.layers} layers, {z.slice_experts} of {z.config.moe.num_experts} experts"
    _both(bench, "slice", config, z.dtype, z.tolerance, {"": bench.all}, z.prompt, what)


def exact(bench: Bench, config: Config):
    """A small model in float32 on both kinds of layout."""
    sides = {"": bench.all, "striped ": bench.all.striped()}
    _both(bench, "float32", config, jnp.float32, EXACT, sides, 24, "small")


def _both(bench: Bench, section, config, dtype, tolerance, sides: dict[str, Side], tokens, what):
    ids = np.random.default_rng(0).integers(0, config.vocab_size, (1, tokens)).astype(np.int32)
    # A timed decode appends a token a call.
    prompt = Prompt(ids, max(2 * tokens, tokens + 1024))
    one, floor = _run(bench.one, config, dtype, prompt)
    for label, side in sides.items():
        many, _ = _run(side, config, dtype, prompt)
        for phase, a, b in zip(("prefill", "decode"), one, many, strict=True):
            context = tokens if phase == "prefill" else tokens + 1
            planned = plan(
                section, config, side.layout, step=phase, batch=1, context=context, chunk=tokens
            )
            b.collectives = planned.collectives
            alone = estimate(config, bench.one.layout, planned.step, (), COMPONENTS)
            compare(
                *(bench, section, f"{label}{phase} T={tokens if phase == 'prefill' else 1}", a, b),
                tolerance=max(tolerance, 2 * floor),
                estimate=planned.seconds,
                estimate_one=alone,
                rms_floor=floor,
                what=what,
                same_token=bool((a.output.argmax(-1) == b.output.argmax(-1)).all()),
            )


def _run(side: Side, config: Config, dtype, prompt: Prompt) -> tuple[tuple[Result, Result], float]:
    """(Results of a prefill into an empty cache and of a decode step, with their logits; floor).

    The floor is what rounding alone does: the relative RMS between the logits of the last token
    when it is decoded and when it is part of the prompt. Near ties of the router and of the indexer
    make it large in bfloat16 with random weights.
    """
    module = Transformer.abstract(config, dtype)
    graphdef, state = nnx.split(module)
    leaves = draw(side, resolve.named(state))
    state = jax.tree.unflatten(jax.tree.structure(state), leaves)
    model = Model(nnx.merge(graphdef, state), layout=side.layout, mesh=side.mesh)
    del leaves, state
    token_B = np.zeros((1,), np.int32)
    caches = {}

    def prefill():
        logits, caches["after"] = model.prefill(prompt.tokens_BT, caches.pop("empty"))
        return logits

    def fresh():
        caches["empty"] = model.init_cache(1, prompt.context)
        jax.block_until_ready(caches["empty"].arrays)

    def decode():
        logits, caches["after"] = model.decode(token_B, caches["after"])
        return logits

    fresh()
    first = _first(prefill)
    second = _first(decode)
    step = timed(decode)
    laps = []
    for _ in range(3):
        caches.clear()
        fresh()
        laps.append(_first(prefill)[0])
    laps.sort()
    caches.clear()
    fresh()
    length = prompt.tokens_BT.shape[1]
    _, cache = model.prefill(prompt.tokens_BT, caches.pop("empty"), np.array([length - 1]))
    decoded, _ = model.decode(prompt.tokens_BT[:, -1], cache)
    results = (
        Result(laps[1], laps[0], laps[2], first[0], first[1], ()),
        Result(*step, second[0], second[1], ()),
    )
    return results, rms(decoded, first[1])


def _first(call):
    begin = time.perf_counter()
    out = jax.block_until_ready(call())
    return time.perf_counter() - begin, np.asarray(out)
