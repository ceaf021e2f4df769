"""Inputs, and the programs of this repository that are timed on them."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.attention_residuals.cases import Case, rotation
from benchmarks.harness import fill
from benchmarks.harness.programs import Program, Said, chain
from k3jax.errors import InputError
from k3jax.ops import attention_residuals

EPS = 1e-5
OPTIONS = {"eps": EPS, "out_eps": EPS, "weight_after_cast": True}
bf16 = jnp.bfloat16


def check(implementation: str) -> None:
    """Refuses a name that the op does not have.

    Raises:
      InputError: naming what there is.
    """
    names = ["auto", *attention_residuals.IMPLEMENTATIONS]
    if implementation not in names:
        raise InputError(f"--implementation {implementation}: one of {', '.join(names)}")


def parameters(case: Case) -> dict[str, Any]:
    """For each read [D] of norm, query and the sublayer's norm; the valid rows of the bank; for two
    phases norms and queries as stacks too.

    Scores of such queries have a spread of 1.7, so no source has all the weight.
    """

    def vectors(kind: int, spread: float, mean: float) -> list[jax.Array]:
        seeds = [3 * read + kind for read in range(case.times)]
        return [fill.uniform((case.hidden,), seed, bf16, spread, mean) for seed in seeds]

    made: dict[str, Any] = {
        "norm": vectors(0, 0.1, 1.0),
        "query": vectors(1, 0.02, 0.0),
        "out_norm": vectors(2, 0.1, 1.0),
        "count": jnp.int32(case.bank),
    }
    if case.kind == "two-phase":
        made |= {"norms": jnp.stack(made["norm"]), "queries": jnp.stack(made["query"])}
    return made


def sources(case: Case, seed: int) -> dict[str, Any]:
    """A bank [N, B, T, D] and the running sum [B, T, D] of each read of one call."""
    one, seed = (case.batch, case.tokens, case.hidden), 1000 * (seed + 1)
    return {
        "bank": fill.uniform((case.bank, *one), seed, bf16, 1.0),
        "partial": [fill.uniform(one, seed + 1 + i, bf16, 1.0) for i in range(case.times)],
    }


def step(case: Case, implementation: str, shared, x, state):
    """All reads of one call, a list of [B, T, D]. Each waits for the one before it, as in a model:
    otherwise what they share would be computed once."""
    bank, part, count, found = x["bank"], None, shared["count"], []
    if case.kind == "two-phase":
        stacks = shared["norms"], shared["queries"]
        part = attention_residuals.score_bank(bank, *stacks, count, eps=EPS)
    vectors = zip(shared["norm"], shared["query"], shared["out_norm"], strict=True)
    for i, (partial_BTD, one) in enumerate(zip(x["partial"], vectors, strict=True)):
        if found:
            waiting = (bank, part, partial_BTD, found[-1])
            bank, part, partial_BTD, found[-1] = lax.optimization_barrier(waiting)
        if part is None:
            arrays, options = (bank, partial_BTD, *one, count), {"implementation": implementation}
            found.append(attention_residuals.read(*arrays, **options, **OPTIONS))
        else:
            found.append(attention_residuals.merge_read(part, i, partial_BTD, *one, **OPTIONS))
    return found, state


class Workload:
    """The arrays of a case; sources take turns."""

    def __init__(self, case: Case, most_sets: int = 24, most_calls: int = 48):
        self.case = case
        self.sets, self.calls = rotation(case, most_sets, most_calls)
        self.shared: Any = None
        self.inputs: Any = None

    def _inputs(self):
        return [sources(self.case, i) for i in range(self.sets)]

    def make(self) -> None:
        self.shared, self.inputs = parameters(self.case), self._inputs()
        jax.block_until_ready((self.shared, self.inputs))

    def free(self) -> None:
        self.shared = self.inputs = None

    def compile(self, implementation: str):
        """(compiled program, what "auto" said) without making an array."""
        shapes = jax.eval_shape(lambda: (parameters(self.case), self._inputs(), []))
        program = chain(partial(step, self.case, implementation), self.calls)
        with Said("k3jax.ops.attention_residuals") as said:
            lowered = jax.jit(program, donate_argnums=2).lower(*shapes)
        return lowered.compile(), said.first

    def program(self, implementation: str, compiled) -> Program:
        return Program(implementation, compiled, (self.shared, self.inputs, []), self.calls)
