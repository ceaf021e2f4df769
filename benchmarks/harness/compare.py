"""How far outputs are from what they should be: relative L2 errors, side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from benchmarks.harness.timing import reason


def error(got, want) -> float:
    """||got - want|| / ||want||; NaN where either is."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def errors(pairs: Mapping[str, Callable[[], tuple[Any, Any]]]) -> dict[str, dict[str, Any]]:
    """Name -> ``{"error": .. }`` of what it gives, (got, want), or ``{"failed": why}``: the times
    of a row stand in either case."""
    found: dict[str, dict[str, Any]] = {}
    for name, pair in pairs.items():
        try:
            found[name] = {"error": error(*pair())}
        except Exception as problem:
            found[name] = {"failed": reason(problem)}
    return found


def told(sides) -> list[Any]:
    """Sides that ran and kept what they computed."""
    return [side for side in sides if side.error is None and side.results]


def tensor_rows(side, at: np.ndarray) -> np.ndarray:
    """Float rows of the first result of a torch side."""
    return side.results[0][at.tolist()].float().cpu().numpy()


def notes(found: Mapping[str, dict[str, Any]], limit: Callable[[str], float]) -> list[str]:
    """What is wrong: an error above the limit of its name, or one that could not be had."""
    lines = []
    for name, one in found.items():
        if "failed" in one:
            lines.append(f"{name} not compared: {one['failed']}")
        elif not one["error"] <= limit(name):
            lines.append(f"WRONG: relative error of {name} is {one['error']:.2e}")
    return lines


def line(row: dict[str, Any]) -> str:
    """The errors of a row."""
    parts = [
        f"{name} FAILED: {one['failed']}" if "failed" in one else f"{name} {one['error']:.2e}"
        for name, one in row["errors"].items()
    ]
    return f"{row['case']} {row['implementation']}: " + "; ".join(parts)
