"""What the model sees of an image, for notebooks and documents. Needs matplotlib, extra "plot"."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from k3jax.errors import InputError
from k3jax.vision.preprocess import Item


def show(
    item: Item,
    values: Any = None,
    *,
    frame: int = 0,
    label: str = "",
    grid: bool = True,
    path: str | Path | None = None,
):
    """The resized, padded image with its token grid, and a value of every token as a heat map.

    Args:
      item: from `k3jax.vision.read`.
      values: [tokens] or [rows, columns] of numbers, one a token; None draws the image alone.
      frame: which frame of a group.
      label: of the colour bar.
      grid: draw the border of every token.
      path: where to save the picture as well; its suffix says as what.
    Returns:
      A matplotlib Figure; a notebook shows it.
    Raises:
      InputError: another number of values than tokens, a frame that is not there, no matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError("pictures need matplotlib: pip install 'k3jax[plot]'") from None
    frames, rows, columns = item.grid
    rows, columns = rows // item.merge[0], columns // item.merge[1]
    if not 0 <= frame < frames:
        raise InputError(f"{item.name}: frame {frame} of {frames} frames")
    pixels = item.picture(frame)
    height, width, _ = pixels.shape
    figure = Figure(figsize=_inches(width, height, values is not None), layout="constrained")
    panels = figure.subplots(1, 1 if values is None else 2, squeeze=False)[0]
    for panel in panels:
        panel.imshow(pixels, extent=(0, columns, rows, 0), interpolation="nearest")
        if grid:
            line = {"color": "white", "linewidth": 0.4, "alpha": 0.6}
            for x in range(1, columns):
                panel.axvline(x, **line)
            for y in range(1, rows):
                panel.axhline(y, **line)
        panel.set_aspect((height / rows) / (width / columns))
        panel.set_xlabel("token column")
    panels[0].set_ylabel("token row")
    resized = f"{item.resized[0]} x {item.resized[1]}"
    panels[0].set_title(
        f"{item.width} x {item.height} px, resized {resized}, {item.tokens} tokens", fontsize=9
    )
    if values is not None:
        heat = np.asarray(values, np.float32)
        if heat.size != item.tokens:
            raise InputError(f"{item.name}: {heat.size} values for {item.tokens} tokens")
        drawn = panels[1].imshow(
            heat.reshape(rows, columns),
            extent=(0, columns, rows, 0),
            cmap="inferno",
            alpha=0.65,
            interpolation="nearest",
        )
        panels[1].set_aspect((height / rows) / (width / columns))
        figure.colorbar(drawn, ax=panels[1], label=label, shrink=0.8)
        panels[1].set_title(label or "value of each token", fontsize=9)
    if path is not None:
        figure.savefig(path, dpi=120)
    return figure


def _inches(width: int, height: int, two: bool) -> tuple[float, float]:
    """A readable size for extreme strips too."""
    ratio = min(max(height / width, 0.2), 4.0)
    wide = 5.0 if ratio <= 1 else 5.0 / ratio + 1
    return wide * (2.1 if two else 1.0) + 0.5, max(wide * ratio, 1.5) + 0.7
