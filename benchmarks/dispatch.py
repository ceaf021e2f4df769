"""Host overhead of a decode step: the published schedule of 93 layers at toy widths.

    python benchmarks/dispatch.py [--steps 200] [--json]

The same steps are run twice: one `Model.decode` call a step, and all of them inside one compiled
loop. The difference a step is what Python and dispatch cost. Floor: 0. Bound: 2 ms.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from k3jax.config import Config
from k3jax.model import Transformer
from k3jax.runtime import Model

BOUND_MS = 2.0


def toy() -> Config:
    """Kimi K3.1 Pro with all 93 layers and every width cut down."""
    full = Config.preset("kimi-k3.1-pro")
    assert full.dsa is not None
    return dataclasses.replace(
        full,
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        kda=dataclasses.replace(full.kda, num_heads=2, head_dim=16),
        mla=dataclasses.replace(
            full.mla,
            num_heads=2,
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_nope_head_dim=8,
            qk_rope_head_dim=8,
            v_head_dim=8,
        ),
        dsa=dataclasses.replace(full.dsa, num_heads=2, head_dim=8, topk=16),
        moe=dataclasses.replace(
            full.moe,
            num_experts=8,
            num_experts_per_token=2,
            latent_size=32,
            intermediate_size=32,
        ),
        vision=None,
        bos_token_id=250,
        eos_token_id=251,
        pad_token_id=255,
        media_token_id=252,
    )


def measure(steps: int) -> dict:
    model = Model(Transformer(toy(), nnx.Rngs(0)))
    token = jnp.zeros((1,), jnp.int32)

    def by_calls() -> float:
        cache = model.init_cache(1, 1024)
        jax.block_until_ready(cache.arrays)
        begin = time.perf_counter()
        for _ in range(steps):
            logits, cache = model.decode(token, cache)
        jax.block_until_ready(logits)
        return (time.perf_counter() - begin) / steps

    graphdef, state = nnx.split(model.module)

    @jax.jit
    def loop(state, arrays):
        def body(_, carry):
            arrays, _ = carry
            logits, arrays = nnx.merge(graphdef, state).extend(token[:, None], arrays)
            return arrays, logits

        empty = jnp.zeros((1, model.config.vocab_size), jnp.float32)
        return jax.lax.fori_loop(0, steps, body, (arrays, empty))

    def by_loop() -> float:
        arrays = model.init_cache(1, 1024).arrays
        jax.block_until_ready(arrays)
        begin = time.perf_counter()
        jax.block_until_ready(loop(state, arrays))
        return (time.perf_counter() - begin) / steps

    by_calls(), by_loop()  # compile
    calls = [by_calls() for _ in range(5)]
    inside = [by_loop() for _ in range(5)]
    return {
        "layers": model.config.num_layers,
        "arrays": len(jax.tree.leaves(state)),
        "call_ms": 1e3 * float(np.median(calls)),
        "loop_ms": 1e3 * float(np.median(inside)),
        "overhead_ms": 1e3 * float(np.median(calls) - np.median(inside)),
        "bound_ms": BOUND_MS,
        "jax": jax.__version__,
        "backend": jax.default_backend(),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    row = measure(options.steps)
    if options.json:
        print(json.dumps(row))
        return
    for name, value in row.items():
        print(f"{name:12s} {value:.3f}" if isinstance(value, float) else f"{name:12s} {value}")


if __name__ == "__main__":
    main()
