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


def ratio(head: str, peer: str, ratios: dict[str, Any], limit: float, aim: float) -> str:
    """Ours over a peer's, and whether limit and aim are reached (by kernels where there are
    times)."""
    decisive = (ratios["kernel"] or ratios["wall"])["median"]
    return (
        f"{head} / {peer}: kernels {table.spread(ratios['kernel'])}, wall "
        f"{table.spread(ratios['wall'])}; asked for at most {limit}: "
        f"{'yes' if decisive <= limit else 'NO'}; aim {aim}: {'yes' if decisive <= aim else 'no'}"
    )
