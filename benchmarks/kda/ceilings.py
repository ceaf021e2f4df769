"""What the device reaches on a copy and on a matrix product, measured in the same call."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from benchmarks.kda.ours import Program
from benchmarks.kda.timing import Kernels, measure, reason, spread

COPY_BYTES, SIZE = 2**32, 8192  # 4.3 GB in and 4.3 GB out; bf16, 1.1 TFLOP
SMALL_BYTES, SMALL_SIZE = 2**22, 256
H200 = {"bytes_per_second": 4.28e12, "operations_per_second": 790e12}  # measured 2026-11-29


def ceilings(kernels: Kernels, repeats: int, small: bool) -> dict:
    """Bytes and operations a second; an H200's of another day, and why, if measuring fails."""
    try:
        return _measured(kernels, repeats, small)
    except Exception as error:
        return {**H200, "assumed": reason(error)}


def _measured(kernels: Kernels, repeats: int, small: bool) -> dict:
    """By the better of the two measures; random operands of the product."""
    count = (SMALL_BYTES if small else COPY_BYTES) // 4
    size = SMALL_SIZE if small else SIZE
    numbers = jax.jit(lambda: jnp.arange(count, dtype=jnp.int32))()
    draw = jax.jit(lambda key: jax.random.normal(key, (size, size), jnp.float32).astype("bfloat16"))
    a, b = draw(jax.random.key(0)), draw(jax.random.key(1))

    def copy(shared, inputs, states):
        return inputs + 1, states

    def product(shared, inputs, states):
        return jnp.matmul(*inputs), states

    work = {
        "copy": (copy, numbers, 2 * 4 * count),
        "product": (product, (a, b), 2 * size**3),
    }
    found = {}
    for name, (function, inputs, amount) in work.items():
        arguments = ((), inputs, ())
        compiled = jax.jit(function).lower(*arguments).compile()
        program = Program(name, compiled, arguments, 1)
        laps = measure([program], repeats, kernels).get(name)
        if laps is None:
            raise RuntimeError(program.error)
        best = min([*laps.wall, *laps.kernel])
        found[name] = {
            "per_second": 1e3 * amount / best,
            "wall_ms": spread(laps.wall),
            "kernel_ms": spread(laps.kernel),
        }
    found["bytes_per_second"] = found["copy"]["per_second"]
    found["operations_per_second"] = found["product"]["per_second"]
    return found
