"""A picture of plans: memory of a device and time of a step, stacked. Needs the extra plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from k3jax.errors import InputError
from k3jax.plan import Plan


def plot(plans: Sequence[Plan], path: str | Path) -> None:
    """Writes one bar a layout: memory by kind (with the capacity), time by component.

    Raises:
      InputError: matplotlib is missing, or cannot write this kind of file.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise InputError("a plot needs matplotlib: pip install 'k3jax[plot]'") from None
    timed = [p for p in plans if p.times]
    figure = Figure(figsize=(4 + 2.2 * len(plans), 9), layout="constrained")
    axes = figure.subplots(2 if timed else 1, 1, squeeze=False)[:, 0]
    names = [p.layout.name for p in plans]
    _stack(axes[0], names, [{k: n / 1e9 for k, n in p.memory.items()} for p in plans])
    for i, p in enumerate(plans):
        if p.capacity:
            axes[0].hlines(p.capacity / 1e9, i - 0.4, i + 0.4, color="black", linestyle="dashed")
    if capacities := [p.capacity / 1e9 for p in plans if p.capacity]:
        # A layout that is far from fitting would flatten the others.
        axes[0].set_ylim(0, min(axes[0].get_ylim()[1], 1.5 * max(capacities)))
    axes[0].set_ylabel("memory of a device, GB (dashed: what there is)")
    axes[0].set_title(_title(plans[0]))
    if timed:
        parts = [{k: t.total * 1e3 for k, t in p.times.items()} for p in timed]
        _stack(axes[1], [p.layout.name for p in timed], parts)
        axes[1].set_ylabel("time of a step, ms (estimate)")
    try:
        figure.savefig(path, dpi=120)
    except ValueError as error:  # an ending that is no format
        raise InputError(f"plot {str(path)!r}: {error}") from None


def _title(plan: Plan) -> str:
    s = plan.step
    what = "decode" if s.kind == "decode" else f"prefill of {s.tokens}"
    return f"{plan.model}: {what}, batch {s.batch}, context {s.context:,}"


def _stack(axis, names: list[str], bars: list[dict[str, float]]) -> None:
    from matplotlib import colormaps

    kinds = list(dict.fromkeys(kind for bar in bars for kind in bar))
    colors = colormaps["tab20"]
    bottom = [0.0] * len(bars)
    for i, kind in enumerate(kinds):
        heights = [bar.get(kind, 0.0) for bar in bars]
        axis.bar(names, heights, bottom=bottom, label=kind, color=colors(i % 20), width=0.6)
        bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    axis.margins(x=0.15)
    axis.set_ylim(bottom=0)
    handles, labels = axis.get_legend_handles_labels()
    axis.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1.0, 0.5))
    axis.tick_params("x", rotation=20)
