"""What was asked of these rows, and whether it is reached; memory; every peer by itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.dsa import accuracy
from benchmarks.dsa.cases import LONG, Case
from benchmarks.dsa.peers import SCORES, SPARSE, TOPK
from benchmarks.harness import table
from benchmarks.harness.report import beside

CHUNK, CHUNK_BYTES = 4096, 4 * 2**30
TIMES = 5.0  # selection and attention of one query against dense attention, at LONG


@dataclass(frozen=True)
class Asked:
    """Ours over a peer's, at most.

    Attributes:
      limit: None where only the ratio is of interest.
    """

    kind: str
    tokens: int
    peer: str
    limit: float | None


ASKED = (
    Asked("select", 1, SCORES, 1.3),
    Asked("select", 128, TOPK, 1.0),
    Asked("select", 128, SCORES, None),
    Asked("select", 1024, SCORES, None),
    Asked("attend", 128, SPARSE, 1.5),
)


def _rows(report: dict[str, Any], kind: str, tokens: int) -> list[dict[str, Any]]:
    """Of bf16 and of fp8 keys, whatever runs them."""
    names = [Case(kind, tokens, LONG, fp8).name for fp8 in (False, True)]
    return [row for row in report["rows"] if row["case"] in names and "failed" not in row]


def _best(row: dict[str, Any]) -> float:
    """Kernel milliseconds, or wall where there are none."""
    return (row["kernel_ms"] or row["wall_ms"])["median"]


def asked(report: dict[str, Any]) -> list[str]:
    """One line a ratio: kernels and wall, limit, yes or no (by kernels where there are times)."""
    lines = []
    for one in ASKED:
        for row in _rows(report, one.kind, one.tokens):
            ratios = row["ratios"].get(one.peer)
            if ratios is None:
                continue
            decisive = (ratios["kernel"] or ratios["wall"])["median"]
            text = (
                f"{row['case']} {row['implementation']} / {one.peer}: "
                f"kernels {table.spread(ratios['kernel'])}, wall {table.spread(ratios['wall'])}"
            )
            lines.append(text + _verdict(decisive, one.limit))
    for row in _rows(report, "both", 1):
        for dense in _rows(report, "dense", 1):
            if dense["implementation"] == row["implementation"]:
                times = _best(dense) / _best(row)
                said = "yes" if times >= TIMES else "NO"
                lines.append(
                    f"{dense['case']} / {row['case']} {row['implementation']}: "
                    f"{table.figure(times)} times, asked for at least {TIMES:g}: {said}"
                )
    return lines


def _verdict(value: float, limit: float | None) -> str:
    if limit is None:
        return ""
    return f"; asked for at most {limit:g}: {'yes' if value <= limit else 'NO'}"


def memory(report: dict[str, Any]) -> list[str]:
    """Temporaries of every program, and of a chunk of prefill against the limit."""
    lines = []
    for row in report["rows"]:
        if "temporaries" not in row:
            continue
        text = f"{row['case']} {row['implementation']}: {row['temporaries'] / 2**20:.0f} MiB"
        if row["case"].endswith(f" T{CHUNK} S{LONG}"):
            said = "yes" if 0 <= row["temporaries"] < CHUNK_BYTES else "NO"
            text += f"; asked for under {CHUNK_BYTES / 2**30:g} GiB: {said}"
        peak = row.get("device_peak")
        lines.append(text + (f"; device peak so far {peak / 2**30:.1f} GiB" if peak else ""))
    return lines


def lines(report: dict[str, Any]) -> list[str]:
    """All of it, with headings."""
    return table.headed(
        {
            "Every peer": beside(report),
            "Against float32 arithmetic": [
                accuracy.line(row) for row in report["rows"] if row.get("errors")
            ],
            "Temporaries": memory(report),
            "Asked for": asked(report),
        }
    )
