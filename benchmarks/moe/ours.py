"""Packed weights, inputs, and the programs of this repository that are timed on them."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.harness import fill
from benchmarks.harness.programs import Program, Said, chain
from benchmarks.moe.cases import Case
from k3jax.errors import InputError
from k3jax.ops import choice, grouped_matmul, target
from k3jax.quantization.mxfp4 import GROUP, MXFP4

BETA, LINEAR_BETA = 4.0, 25.0  # of K3's SiTU
LOW, HIGH = 118, 122  # scale bytes: weights of 0.02 root mean square, as trained experts have
PORTABLE = "tiles"
PORTABLE_CALLS = 2  # it is slow, and each call is a loop to compile


def check(implementation: str) -> None:
    """Refuses a name that the op does not have.

    Raises:
      InputError: naming what there is.
    """
    names = ["auto", *grouped_matmul.IMPLEMENTATIONS]
    if implementation not in names:
        raise InputError(f"--implementation {implementation}: one of {', '.join(names)}")


def _packed(shape: tuple[int, int, int], seed: int) -> MXFP4:
    *lead, width = shape
    codes = fill.codes((*lead, width // 2), seed)
    return MXFP4(codes, fill.scales((*lead, width // GROUP), seed + 1, LOW, HIGH))


def _weights(experts: int, latent: int, inner: int) -> tuple[MXFP4, MXFP4]:
    w13 = _packed((experts, 2 * inner, latent), 1)
    return w13, _packed((experts, latent, inner), 3)


@lru_cache(maxsize=1)
def weights(experts: int, latent: int, inner: int) -> tuple[MXFP4, MXFP4]:
    """w13 [E, 2F, L] and w2 [E, L, F], 15.7 GB at K3's size: made once for all cases."""
    return jax.block_until_ready(_weights(experts, latent, inner))


def step(case: Case, implementation: str, shared, x, state):
    """One call: tokens are sorted by expert, run through them, weighted and summed."""
    z, ids, weights = x
    r = grouped_matmul.experts(
        *(z, ids, weights, *shared),
        situ_beta=BETA,
        situ_linear_beta=LINEAR_BETA,
        activations="mxfp8" if case.eight else None,
        implementation=implementation,
    )
    return r, state


def kernels() -> list[str]:
    """Names of what is compiled without being tuned on the device."""
    return list(grouped_matmul.KERNELS)


def chosen(case: Case, implementation: str) -> str:
    """The name of what runs for ``implementation``."""
    shared, (x, *_), _ = Workload(case).shapes()
    arguments = (x[0], x[1], *shared, "mxfp8" if case.eight else None)
    known, table = grouped_matmul.IMPLEMENTATIONS, grouped_matmul.KERNELS
    device = target.device_kind()
    name, _ = choice.select("experts", implementation, known, table, device, arguments)
    return PORTABLE if name == "xla" else name


class Workload:
    """The arrays of a case: packed weights, and for each call latents, ids and weights."""

    sets = 1

    def __init__(self, case: Case):
        self.case = case
        self.sizes = (case.experts, case.latent, case.inner)
        self.shared: Any = None
        self.inputs: Any = None

    def _latents(self):
        shape = (self.case.tokens, self.case.latent)
        return [fill.uniform(shape, 5 + i, jnp.bfloat16, 1.0) for i in range(self.case.calls)]

    def _inputs(self):
        drawn = zip(self._latents(), self.case.draws, strict=True)
        return [(z, jnp.asarray(ids), jnp.asarray(weights)) for z, (ids, weights) in drawn]

    def make(self) -> None:
        self.shared, self.inputs = weights(*self.sizes), self._inputs()
        jax.block_until_ready(self.inputs)

    def free(self) -> None:
        """Keeps the weights, which other cases share."""
        self.shared = self.inputs = None

    def shapes(self):
        """Of the arguments, without making one."""
        return jax.eval_shape(lambda: (_weights(*self.sizes), self._inputs(), []))

    def compile(self, implementation: str):
        """(compiled program, what "auto" said) without making an array."""
        case, shapes = self.case, self.shapes()
        calls = case.calls
        if chosen(case, implementation) == PORTABLE:
            calls = min(calls, PORTABLE_CALLS)
        program = chain(partial(step, case, implementation), calls)
        with Said("k3jax.ops.grouped_matmul") as said:
            lowered = jax.jit(program, donate_argnums=2).lower(*shapes)
        return (lowered.compile(), calls), said.first

    def program(self, implementation: str, compiled) -> Program:
        executable, calls = compiled
        return Program(implementation, executable, (self.shared, self.inputs, []), calls)
