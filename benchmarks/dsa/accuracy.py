"""What a row computed, against float32 arithmetic on the same inputs, at full size.

Of each side the last call counts, and of its queries four. A selection is compared as a set: rows
that differ, and how far the score of the worst of them lies from the lowest one selected. That gap
is 1e-6 or less where only the order of float32 sums differs. Random normal queries and keys make
scores crowded, so an agreement of fp8 and bf16 keys is lower here than on a trained indexer.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.dsa import core, ours
from benchmarks.dsa.cases import Case
from benchmarks.harness.compare import error
from benchmarks.harness.timing import reason
from k3jax.ops import dsa

QUERIES = 4
GAP = 1e-3  # beyond it a selection is wrong, not near a tie
ATTENTION = 2e-2  # relative L2: bf16 rounding makes 2e-3 to 4e-3
BOTH = 5e-2  # one row of 2,048 may be another one
CODED = "ours of the same codes"


def sample(case: Case) -> np.ndarray:
    """The queries that are compared."""
    return np.unique(np.linspace(0, case.tokens - 1, QUERIES).astype(int))


class Reference:
    """Answers in float32 for the calls of a workload, each computed once."""

    def __init__(self, case: Case, workload: ours.Workload):
        self.case, self.workload, self.at = case, workload, sample(case)
        self.found: dict[tuple[str, int], Any] = {}

    def _once(self, name: str, call: int, make):
        if (name, call) not in self.found:
            self.found[name, call] = make(call)
        return self.found[name, call]

    def scores(self, call: int) -> np.ndarray:
        """float32 [n, S], -inf behind a query's position, with bf16 keys in any case."""
        return self._once("scores", call, self._scores)

    def _scores(self, call: int) -> np.ndarray:
        case, turn = self.case, call % self.workload.sets
        index = self.workload.shared[turn]["index"]
        if case.fp8:  # the keys that were rounded
            key = jax.random.split(jax.random.key(0), self.workload.sets)[turn]
            plain = Case(**{**vars(case), "kind": "select", "fp8": False})
            index = jax.jit(partial(ours.caches, plain))(key)["index"]
        x = self.workload.inputs[call]
        q, w, positions = (x[name][:, self.at] for name in ("q_index", "w", "positions"))
        return np.asarray(_float32_scores(q, index["keys"], w, positions))[0]

    def coded(self, call: int) -> np.ndarray:
        """The same scores of codes: of keys, and of the queries as the op rounds them."""
        return self._once("coded", call, self._coded)

    def _coded(self, call: int) -> np.ndarray:
        cache, x = self.workload.shared[call % self.workload.sets], self.workload.inputs[call]
        q, w, positions = (x[name][:, self.at] for name in ("q_index", "w", "positions"))
        return np.asarray(_code_scores(q, cache["index"], w, positions))[0]

    def selected(self, call: int) -> np.ndarray:
        """int32 [n, k] of those scores."""
        return np.argpartition(-self.scores(call), self.case.topk - 1)[:, : self.case.topk]

    def attended(self, call: int) -> np.ndarray:
        """float32 [n, H, C]."""
        return self._once("attended", call, self._attended)

    def _attended(self, call: int) -> np.ndarray:
        case, x = self.case, self.workload.inputs[call]
        rows = self.workload.shared[call % self.workload.sets]["latent"]
        if case.kind == "dense":
            where = ("positions", x["positions"][:, self.at])
        elif case.kind == "attend":
            where = ("indices", x["selected"][:, self.at])
        else:
            where = ("indices", jnp.asarray(self.selected(call)[None], jnp.int32))
        kind, value = where
        run = jax.jit(
            lambda q, rows, value: core.attention(
                q.astype(jnp.float32),
                core.float32(rows),
                (kind, value),
                scale=ours.scale(case),
                width=case.rows[0],
            )[0]
        )
        return np.asarray(run(x["q"][:, self.at], rows, value))[0]


@jax.jit
def _float32_scores(q, keys, w, positions):
    return _legal(dsa.scores(q.astype(jnp.float32), keys.astype(jnp.float32), w), positions)


@jax.jit
def _code_scores(q, index, w, positions):
    keys: Any = ours.index_keys(index)
    return _legal(dsa.scores(q, keys, w), positions)


def _legal(scores, positions):
    at_S = jnp.arange(scores.shape[-1], dtype=jnp.int32)
    return jnp.where(at_S <= positions[..., None], scores, -jnp.inf)


def selection(got_nk, scores_nS, topk: int) -> dict[str, float]:
    """Agreement of rows (mean and least of the queries), how many differ, and the largest gap."""
    agreements, differing, gap = [], 0, 0.0
    for got, scores in zip(np.asarray(got_nk), scores_nS, strict=True):
        want = set(np.argpartition(-scores, topk - 1)[:topk].tolist())
        mine = set(got[got >= 0].tolist())
        agreements.append(len(want & mine) / topk)
        differing += len(want - mine)
        last = float(min(scores[list(want)]))
        off = [abs(float(scores[i]) - last) for i in want ^ mine]
        gap = max([gap, *(d / max(abs(last), 1e-30) for d in off)])
        if len(mine) != len(got):
            gap = float("inf")
    return {
        "agreement": float(np.mean(agreements)),
        "least": float(min(agreements)),
        "differing": differing,
        "gap": gap,
    }


def compare(case: Case, reference: Reference, output, call: int) -> dict[str, float]:
    """Of the output of one call: positions [T, k], or weighted latents [T, H, C]."""
    if case.kind == "select":
        return selection(output, reference.scores(call), case.topk)
    return {"error": error(output, reference.attended(call))}


def found(case: Case, workload, program, sides) -> dict[str, dict[str, Any]]:
    """Side -> what `compare` says, or why there is nothing. The times stand in either case."""
    if case.kind == "layer":
        return {}
    reference, at = Reference(case, workload), sample(case)
    made = {}
    for name, call, take in (
        ("ours", program.calls - 1, lambda: _ours(case, program, at)),
        *((s.name, s.calls - 1, partial(_theirs, s, at)) for s in sides if _tells(s)),
    ):
        try:
            made[name] = compare(case, reference, take(), call)
            if name == "ours" and case.kind == "select" and case.fp8:
                made[CODED] = selection(take(), reference.coded(call), case.topk)
        except Exception as problem:
            made[name] = {"failed": reason(problem)}
    return made


def _tells(side) -> bool:
    return side.error is None and bool(side.results) and not side.part


def _ours(case: Case, program, at: np.ndarray) -> np.ndarray:
    last = program.out[-1]
    return np.asarray((last if case.kind == "select" else last[0])[0, at])


def _theirs(side, at: np.ndarray) -> np.ndarray:
    out = side.results[0][at.tolist()]
    return out.cpu().numpy() if not out.is_floating_point() else out.float().cpu().numpy()


def notes(case: Case, errors: dict[str, dict[str, Any]]) -> list[str]:
    """What is wrong about ours."""
    own = errors.get("ours", {})
    if "failed" in own:
        return [f"not compared: {own['failed']}"]
    wrong, chosen = [], errors.get(CODED if case.fp8 else "ours", {})
    if "gap" in chosen and not chosen["gap"] <= GAP:
        wrong.append(f"WRONG selection: {chosen}")
    limit = BOTH if case.kind == "both" else ATTENTION
    # With fp8 keys other rows are attended to, and the reference has bf16 keys.
    if "error" in own and not case.fp8 and not own["error"] <= limit:
        wrong.append(f"WRONG attention: relative error {own['error']:.2e}")
    return wrong


def line(row: dict[str, Any]) -> str:
    """The errors of a row."""
    parts = []
    for name, e in row["errors"].items():
        if "failed" in e:
            parts.append(f"{name} FAILED: {e['failed']}")
        elif "error" in e:
            parts.append(f"{name} relative error {e['error']:.2e}")
        else:
            parts.append(
                f"{name} agrees in {e['agreement']:.4%} (least {e['least']:.2%}), "
                f"{e['differing']} rows differ, gap {e['gap']:.1e}"
            )
    return f"{row['case']} {row['implementation']}: " + "; ".join(parts)
