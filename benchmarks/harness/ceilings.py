"""What the device reaches on a copy and on matrix products, measured in the same call."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.harness.programs import Program
from benchmarks.harness.timing import Kernels, measure, reason, spread

COPY_BYTES, SIZE = 2**32, 8192  # 4.3 GB in and 4.3 GB out; 1.1 TFLOP
SMALL_BYTES, SMALL_SIZE = 2**22, 256
# measured 2026-11-29
H200 = {
    "bytes_per_second": 4.28e12,
    "operations_per_second": 790e12,
    "fp8_operations_per_second": 1344e12,
}


def floor(
    moved_bytes: float, operations: float, bytes_per_second: float, operations_per_second: float
) -> tuple[float, str]:
    """(milliseconds that no version can beat, "bytes" or "operations": which says so)."""
    moving = 1e3 * moved_bytes / bytes_per_second
    computing = 1e3 * operations / operations_per_second
    return max((moving, "bytes"), (computing, "operations"))


def ceilings(kernels: Kernels, repeats: int, small: bool, fp8: bool = False) -> dict:
    """Bytes and bf16 operations a second, with ``fp8`` also fp8 ones; an H200's of another day, and
    why, if measuring fails."""
    try:
        found = _measured(kernels, repeats, small)
    except Exception as error:
        return {**H200, "assumed": reason(error)}
    if fp8:
        found |= _fp8(kernels, repeats, small, found["operations_per_second"])
    return found


def _measured(kernels: Kernels, repeats: int, small: bool) -> dict:
    """By the better of the two measures; random operands of the product."""
    count = (SMALL_BYTES if small else COPY_BYTES) // 4
    size = SMALL_SIZE if small else SIZE
    numbers = jax.jit(lambda: jnp.arange(count, dtype=jnp.int32))()

    def copy(shared, inputs, states):
        return inputs + 1, states

    def product(shared, inputs, states):
        return jnp.matmul(*inputs), states

    work = {
        "copy": (copy, numbers, 2 * 4 * count),
        "product": (product, _operands(size, jnp.bfloat16), 2 * size**3),
    }
    found = {n: _timed(n, f, x, amount, kernels, repeats) for n, (f, x, amount) in work.items()}
    found["bytes_per_second"] = found["copy"]["per_second"]
    found["operations_per_second"] = found["product"]["per_second"]
    return found


def _operands(size: int, dtype):
    draw = jax.jit(lambda key: jax.random.normal(key, (size, size), jnp.float32).astype(dtype))
    return draw(jax.random.key(0)), draw(jax.random.key(1))


def _timed(name: str, function, inputs, amount: int, kernels: Kernels, repeats: int) -> dict:
    arguments = ((), inputs, ())
    compiled = jax.jit(function).lower(*arguments).compile()
    program = Program(name, compiled, arguments, 1)
    laps = measure([program], repeats, kernels).get(name)
    if laps is None:
        raise RuntimeError(program.error)
    return {
        "per_second": 1e3 * amount / min([*laps.wall, *laps.kernel]),
        "wall_ms": spread(laps.wall),
        "kernel_ms": spread(laps.kernel),
    }


def _fp8(kernels: Kernels, repeats: int, small: bool, bf16: float) -> dict:
    """The rate of e4m3 products with bf16 results. One that is no higher than bf16's was made by
    widening the operands and says nothing about the device: an H200's of another day instead."""
    size, name = SMALL_SIZE if small else SIZE, "fp8_operations_per_second"

    def product(shared, inputs, states):  # rows times rows, the only order that fp8 units know
        dimensions = (((1,), (1,)), ((), ()))
        a, b = inputs
        o = lax.dot_general(a, b, dimensions, preferred_element_type=jnp.bfloat16)
        return o, states

    try:
        inputs = _operands(size, jnp.float8_e4m3fn)
        found = _timed("fp8 product", product, inputs, 2 * size**3, kernels, repeats)
    except Exception as error:
        return {name: H200[name], "fp8_assumed": reason(error)}
    rate = found["per_second"]
    if rate < 1.1 * bf16 and not small:
        return {name: H200[name], "fp8_assumed": f"measured {rate:.3g}, like bf16"}
    return {name: rate, "fp8 product": found}
