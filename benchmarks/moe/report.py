"""What was asked of these rows, and whether it is reached; every peer; errors; memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.harness import table
from benchmarks.harness.report import beside, compared, ratio
from benchmarks.moe.cases import Case
from benchmarks.moe.peers import OGS

LIMIT, SHARE = 1.2, 0.03


@dataclass(frozen=True)
class Asked:
    """Of the row of so many tokens with uniform routing.

    Attributes:
      aim: ours over triton_kernels' that is hoped for; at most `LIMIT` times it is asked for.
      measured: milliseconds that triton_kernels took on an H200 on another day.
    """

    tokens: int
    aim: float
    measured: float


ASKED = (
    Asked(1, 0.75, 0.129),
    Asked(16, 0.75, 1.36),
    Asked(64, 0.75, 3.92),
    Asked(512, 0.75, 6.19),
    Asked(4096, 0.6, 14.5),
)


def asked(report: dict[str, Any]) -> list[str]:
    """One line a row: the ratio of this call, and ours against the other day's figure."""
    lines = []
    for one in ASKED:
        for row in report["rows"]:
            if row["case"] != Case(one.tokens).name or "failed" in row:
                continue
            own = (row["kernel_ms"] or row["wall_ms"])["median"]
            head = f"{row['case']} {row['implementation']}"
            limit = LIMIT * one.measured
            lines.append(
                f"{head}: {table.figure(own)} ms; asked for at most {LIMIT} x {one.measured} = "
                f"{table.figure(limit)} ms: {'yes' if own <= limit else 'NO'}"
            )
            if OGS in row["ratios"]:
                lines.append(ratio(head, OGS, row["ratios"][OGS], LIMIT, one.aim))
    return lines


def memory(report: dict[str, Any]) -> list[str]:
    """Temporaries of every program, as a share of all packed weights."""
    lines = []
    for row in report["rows"]:
        if "temporaries_share" not in row:
            continue
        share = row["temporaries_share"]
        lines.append(
            f"{row['case']} {row['implementation']}: {row['temporaries'] / 2**20:.0f} MiB, "
            f"{share:.2%} of the packed weights; asked for under {SHARE:.0%}: "
            f"{'yes' if 0 <= share < SHARE else 'NO'}"
        )
    return lines


def lines(report: dict[str, Any]) -> list[str]:
    return table.headed(
        {
            "Every peer": beside(report),
            "Relative L2 errors against float32 arithmetic": compared(report),
            "Temporaries": memory(report),
            "Asked for": asked(report),
        }
    )
