"""What a row computed, against float32 arithmetic on the same packed weights.

Of each side the last call counts, and of its tokens four. The reference unpacks one expert at a
time, on the device, and rounds nothing. Peers have other activations than SiTU, so each of them is
compared with the reference of its own activation.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.harness import compare
from benchmarks.moe import ours
from benchmarks.moe.cases import Case
from benchmarks.moe.peers import MARLIN, OGS
from k3jax.quantization.mxfp4 import GROUP, MXFP4

TOKENS = 4
ERROR = 1e-2  # relative L2: bf16 rounding of w1 z, w3 z, the activation and y makes 4e-3
EIGHT = 3e-2  # what bf16 rounds moves some activations to the next MXFP8 number: 1.3e-2
APART = 1e-1  # MXFP8 has 3 bits of mantissa: W4A8 lies 5e-2 from W4A16
SAME, SIXTEEN = "ours", "ours against W4A16"


def situ(gate, up):
    bound = jnp.float32(ours.LINEAR_BETA) * jnp.tanh(up / ours.LINEAR_BETA)
    return jnp.float32(ours.BETA) * jnp.tanh(gate / ours.BETA) * jax.nn.sigmoid(gate) * bound


def swiglu_one(gate, up):
    """What triton_kernels calls swiglu, with alpha 1 and no limit."""
    return gate * jax.nn.sigmoid(gate) * (up + 1)


def swiglu(gate, up):
    return gate * jax.nn.sigmoid(gate) * up


ACTIVATIONS: list[Callable] = [situ, swiglu_one, swiglu]
ACTIVATION_OF = {OGS: swiglu_one, MARLIN: swiglu}


def eight_bits(x: jax.Array) -> jax.Array:
    """float32 [.., n * 32] rounded to MXFP8."""
    groups = x.reshape(*x.shape[:-1], -1, GROUP)
    largest = jnp.maximum(jnp.abs(groups).max(-1, keepdims=True), 1e-10)
    mantissa, exponent = jnp.frexp(largest / 448)  # in [0.5, 1): 2**e covers it, 2**(e-1) if 0.5
    scale = jnp.ldexp(jnp.float32(1), jnp.where(mantissa == 0.5, exponent - 1, exponent))
    # Behind a barrier: a compiler that may keep more precision drops a conversion there and back.
    codes = lax.optimization_barrier((groups / scale).astype(jnp.float8_e4m3fn))
    return (codes.astype(jnp.float32) * scale).reshape(x.shape)


@jax.jit
def _expected(z_nL, ids_nk, weights_nk, w13, w2, activation, eight):
    """float32 [n, L]. ``activation`` counts in `ACTIVATIONS`, ``eight`` rounds what products read;
    both are arrays, so that one program serves all."""
    product = partial(jnp.matmul, precision=lax.Precision.HIGHEST)

    def rounded(x):
        return jnp.where(eight, eight_bits(x), x)

    def unpacked(w: MXFP4, e) -> jax.Array:
        one = jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, e, keepdims=False), w)
        return one.unpack(jnp.float32)

    def pair(x):
        z_L, e, weight = x
        gate_F, up_F = jnp.split(product(unpacked(w13, e), rounded(z_L)), 2)
        h_F = lax.switch(activation, ACTIVATIONS, gate_F, up_F)
        return weight * product(unpacked(w2, e), rounded(h_F))

    k = ids_nk.shape[1]
    z_AL = jnp.repeat(z_nL.astype(jnp.float32), k, axis=0)
    y_AL = lax.map(pair, (z_AL, ids_nk.reshape(-1), weights_nk.reshape(-1)))
    return y_AL.reshape(-1, k, y_AL.shape[-1]).sum(1)


def sample(case: Case) -> np.ndarray:
    """Tokens that are compared; a case of fewer repeats them, so that shapes stay the same."""
    return np.linspace(0, case.tokens - 1, TOKENS).astype(int)


def expected(case: Case, workload, call: int, activation=situ, eight: bool = False) -> np.ndarray:
    """float32 [4, L] of the sampled tokens of a call."""
    z, ids, weights = (x[sample(case)] for x in workload.inputs[call])
    which = jnp.int32(ACTIVATIONS.index(activation))
    return np.asarray(_expected(z, ids, weights, *workload.shared, which, jnp.bool_(eight)))


def found(case: Case, workload, program, sides) -> dict[str, dict[str, Any]]:
    """Side -> its error, or why there is none."""
    at, last = sample(case), program.calls - 1
    mine = lambda: program.out[-1][at]  # noqa: E731
    pairs = {SAME: lambda: (mine(), expected(case, workload, last, situ, case.eight))}
    if case.eight:
        pairs[SIXTEEN] = lambda: (mine(), expected(case, workload, last))

    def theirs(side):
        want = expected(case, workload, side.calls - 1, ACTIVATION_OF[side.name])
        return compare.tensor_rows(side, at), want

    pairs |= {side.name: partial(theirs, side) for side in compare.told(sides)}
    return compare.errors(pairs)


def limit(case: Case, name: str) -> float:
    """The largest error that is none."""
    if name == SIXTEEN:
        return APART
    return EIGHT if case.eight else ERROR
