"""What a row computed, against float64 arithmetic on the same sources, for four tokens."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from benchmarks.attention_residuals import ours
from benchmarks.attention_residuals.cases import Case
from benchmarks.attention_residuals.peers import MIX
from benchmarks.harness import compare
from k3jax.ops.attention_residuals.reference import mix_token

TOKENS = 4
ERROR = 1e-2  # relative L2: one or two roundings to bf16 make 2e-3 to 3e-3


def sample(case: Case) -> np.ndarray:
    """Tokens that are compared, counted over all sequences."""
    return np.unique(np.linspace(0, case.rows - 1, TOKENS).astype(int))


def expected(case: Case, workload, call: int, read: int, normed: bool = True) -> np.ndarray:
    """float64 [n, D] of the sampled tokens of a read; the mix alone if not ``normed``."""
    at, x = sample(case), workload.inputs[call % workload.sets]
    bank = np.asarray(x["bank"].reshape(case.bank, case.rows, -1)[:, at], np.float64)
    own = _rows(case, x["partial"][read])
    names = ("norm", "query", "out_norm")
    vectors = {name: np.asarray(workload.shared[name][read], np.float64) for name in names}
    found = []
    for token, last in zip(bank.swapaxes(0, 1), own, strict=True):
        mixed = mix_token(np.stack([*token, last]), vectors["norm"], vectors["query"], ours.EPS)
        if normed:
            mixed = mixed / np.sqrt(np.mean(mixed * mixed) + ours.EPS) * vectors["out_norm"]
        found.append(mixed)
    return np.stack(found)


def _rows(case: Case, x_BTD) -> np.ndarray:
    """float64 [n, D] of the sampled tokens."""
    return np.asarray(x_BTD.reshape(case.rows, -1)[sample(case)], np.float64)


def found(case: Case, workload, program, sides) -> dict[str, dict[str, Any]]:
    """Side -> its error in all reads of the last call, or why there is none."""

    def mine():
        reads, call = range(case.times), program.calls - 1
        got = [_rows(case, program.out[-1][read]) for read in reads]
        return np.stack(got), np.stack([expected(case, workload, call, read) for read in reads])

    def theirs(side):
        want = expected(case, workload, side.calls - 1, 0, side.name != MIX)
        return compare.tensor_rows(side, sample(case)), want

    pairs = {"ours": mine} | {side.name: partial(theirs, side) for side in compare.told(sides)}
    return compare.errors(pairs)
