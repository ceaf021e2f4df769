"""Lines of a summary that several benchmarks have."""

from __future__ import annotations

from typing import Any

from benchmarks.harness import compare, table


def beside(report: dict[str, Any]) -> list[str]:
    """Every peer of every row, where there are some."""
    lines = []
    for row in report["rows"]:
        for name, peer in row.get("peers", {}).items():
            head = f"{row['case']} {row['implementation']} beside {name}: "
            if "failed" in peer:
                lines.append(f"{head}FAILED: {peer['failed']}")
                continue
            ratios = row["ratios"][name]
            lines.append(
                f"{head}kernels {table.spread(peer['kernel_ms'])} ms, wall "
                f"{table.spread(peer['wall_ms'])} ms; ours/peer {table.spread(ratios['kernel'])}, "
                f"{table.spread(ratios['wall'])}"
            )
    return lines


def compared(report: dict[str, Any]) -> list[str]:
    """The errors of every row that has some."""
    return [compare.line(row) for row in report["rows"] if row.get("errors")]
