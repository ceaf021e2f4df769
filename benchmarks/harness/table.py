"""The rows as text."""

from __future__ import annotations

from typing import Any

HEADS = (
    "row", "implementation", "kernel ms", "wall ms", "floor ms", "binds", "share",
    "peer", "peer kernel ms", "peer wall ms", "ours/peer kernel", "ours/peer wall",
)  # fmt: skip


def figure(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def spread(found: dict[str, Any] | None) -> str:
    """median (least..most)."""
    if found is None:
        return "-"
    return f"{figure(found['median'])} ({figure(found['low'])}..{figure(found['high'])})"


def cells(row: dict[str, Any]) -> list[str]:
    """One line of the table for a row of `benchmarks.harness.run.timed`."""
    if "failed" in row:
        return [row["case"], row["implementation"], f"FAILED: {row['failed']}"]
    peer = row["peers"].get(row["peer"], {})
    return [
        row["case"],
        row["implementation"],
        spread(row["kernel_ms"]),
        spread(row["wall_ms"]),
        figure(row["floor_ms"]),
        row["binds"],
        f"{row['share']:.2f}",
        row["peer"] or "-",
        spread(peer.get("kernel_ms")),
        spread(peer.get("wall_ms")),
        spread(row["kernel_ratio"]),
        spread(row["wall_ratio"]),
    ]


def timings(rows: list[dict[str, Any]]) -> str:
    """Aligned columns; notes of rows below them, numbered."""
    lines = [list(HEADS), *map(cells, rows)]
    whole = [line for line in lines if len(line) == len(HEADS)]
    widths = [max(map(len, column)) for column in zip(*whole, strict=True)]
    notes: list[str] = []
    shown = []
    for line, row in zip(lines, [{}, *rows], strict=True):
        text = "  ".join(x.ljust(w) for x, w in zip(line, widths, strict=False))
        marks = []
        for note in row.get("notes", ()):
            if note not in notes:
                notes.append(note)
            marks.append(f"[{notes.index(note) + 1}]")
        shown.append(f"{text} {''.join(marks)}".rstrip())
    return "\n".join(shown + [f"[{i}] {note}" for i, note in enumerate(notes, 1)])


def headed(parts: dict[str, list[str]]) -> list[str]:
    """The lines below their headings; nothing of a part that has none."""
    found = []
    for heading, text in parts.items():
        if text:
            found += ["", f"{heading}:", *text]
    return found
