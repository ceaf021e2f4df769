"""The picture of what the model sees."""

from __future__ import annotations

import io
import sys

import numpy as np
import pytest
from PIL import Image

from k3jax.config import Config
from k3jax.errors import InputError
from k3jax.vision import read
from k3jax.vision.pictures import show

CONFIG = Config.preset("kimi-k3").vision


def item(width=60, height=100, frames=1):
    picture = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    (one,) = read([[picture] * frames], CONFIG)
    return one


def test_image_grid_and_heat(tmp_path):
    one = item()
    heat = np.arange(one.tokens, dtype=float)
    figure = show(one, heat, label="norm", path=tmp_path / "a.png")
    left, right, bar = figure.axes
    assert np.array_equal(left.images[0].get_array(), one.picture())
    assert np.array_equal(right.images[1].get_array().ravel(), heat)
    rows, columns = one.grid[1] // 2, one.grid[2] // 2
    assert len(left.lines) == rows - 1 + columns - 1
    assert "100" in left.get_title()
    assert f"{one.tokens} tokens" in left.get_title()
    assert bar.get_ylabel() == "norm"
    with Image.open(tmp_path / "a.png") as saved:
        assert saved.size[0] > 300
    plain = show(one, grid=False)
    assert len(plain.axes) == 1
    assert len(plain.axes[0].lines) == 0


def test_strips_and_frames():
    for width, height in ((1, 3000), (3000, 1)):
        file = io.BytesIO()
        show(item(width, height)).savefig(file)
        assert Image.open(file).size[0] < 2000
    assert show(item(frames=3), frame=2)


def test_refused(monkeypatch):
    with pytest.raises(InputError, match="5 values for 12 tokens"):
        show(item(), np.zeros(5))
    with pytest.raises(InputError, match="frame 1 of 1 frames"):
        show(item(), frame=1)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(InputError, match=r"pip install 'k3jax\[plot\]'"):
        show(item())
