"""What was asked of these rows, and whether it is reached; every peer; errors."""

from __future__ import annotations

from typing import Any

from benchmarks.attention_residuals.peers import GLUON, MIX, READ
from benchmarks.harness import table
from benchmarks.harness.report import beside, compared, ratio

LIMIT, AIM, MEASURED = 1.0, 0.6, 0.264  # FLA's milliseconds on an H200 on another day
LARGE = "read B1 T4096"
DIRECT, PHASES = "direct B64 T1", "two-phase B64 T1"


def _best(row: dict[str, Any]) -> float:
    """Kernel milliseconds, or wall where there are none."""
    return (row["kernel_ms"] or row["wall_ms"])["median"]


def _rows(report: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [row for row in report["rows"] if row["case"] == name and "failed" not in row]


def asked(report: dict[str, Any]) -> list[str]:
    """One line a ratio: limit and aim, yes or no (by kernels where there are times)."""
    lines = []
    for row in _rows(report, LARGE):
        head, own = f"{row['case']} {row['implementation']}", _best(row)
        lines.append(
            f"{head}: {table.figure(own)} ms; asked for at most {LIMIT} x {MEASURED} ms: "
            f"{'yes' if own <= LIMIT * MEASURED else 'NO'}"
        )
        there = [peer for peer in (READ, GLUON, MIX) if peer in row["ratios"]]
        lines += [ratio(head, peer, row["ratios"][peer], LIMIT, AIM) for peer in there]
    for row in _rows(report, PHASES):
        for direct in _rows(report, DIRECT):
            text = table.figure(_best(row) / _best(direct))
            lines.append(f"{row['case']} / {direct['case']}: {text} of the time")
    return lines


def lines(report: dict[str, Any]) -> list[str]:
    return table.headed(
        {
            "Every peer": beside(report),
            "Relative L2 errors against float64 arithmetic": compared(report),
            "Asked for": asked(report),
        }
    )
