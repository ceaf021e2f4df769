"""Each part of a step: its floor, what its kernels took, and the kernels that took the most."""

from __future__ import annotations

from typing import Any

from benchmarks.harness import table
from benchmarks.period.cases import PARTS

TOP = 14  # kernels that are named


def timed_parts(row: dict[str, Any]) -> dict[str, float]:
    """Part -> milliseconds of its kernels; what belongs to no part is "other"."""
    found: dict[str, float] = dict.fromkeys(PARTS, 0.0)
    for one in row["profile"]:
        found[one["part"]] = found.get(one["part"], 0.0) + one["milliseconds"]
    return found


def _row(row: dict[str, Any]) -> list[str]:
    head = f"{row['case']} {row['implementation']}"
    own = (row["kernel_ms"] or row["wall_ms"])["median"]
    total = sum(row["parts"].values())
    hit = " ".join(map(str, row["hit"]))
    lines = [
        f"{head}: {table.figure(own)} ms, floors of the parts {table.figure(total)} ms, share "
        f"{row['share']:.2f}; experts hit by layer: {hit} of {row['experts']}; parameters and "
        f"caches {row['resident_bytes'] / 1e9:.3g} GB, temporaries "
        f"{row['temporaries'] / 2**20:.0f} MiB"
    ]
    timed = timed_parts(row)
    for name, ms in sorted(timed.items(), key=lambda item: -item[1]):
        floor = row["parts"].get(name, 0.0)
        share = f", share {floor / ms:.2f}" if ms and floor else ""
        took = f"took {table.figure(ms)} ms" if row["profile"] else "no kernel times"
        lines.append(f"  {name}: floor {table.figure(floor)} ms, {took}{share}")
    for one in row["profile"][:TOP]:
        lines.append(
            f"    {table.figure(one['milliseconds'])} ms, {one['launches']:g} x {one['name'][:80]} "
            f"({one['part']})"
        )
    return lines


def lines(report: dict[str, Any]) -> list[str]:
    rows = [row for row in report["rows"] if "parts" in row]
    return table.headed({"By part, one step": [text for row in rows for text in _row(row)]})
