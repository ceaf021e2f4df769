"""``k3jax generate --image``."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image
from test_vision_tower import TOKENIZER, model

import k3jax
import k3jax.config
from k3jax import runtime
from k3jax.cli import main
from k3jax.generate.loop import generate
from k3jax.vision import read


@pytest.fixture
def loads(monkeypatch):
    """``k3jax.load`` gives a small random model; the list holds what it was asked about vision."""
    asked = []

    def load(source, dtype, vision):
        asked.append(vision)
        return model(), TOKENIZER

    monkeypatch.setattr(runtime, "MIN_TOKENS", 128)
    monkeypatch.setattr(runtime, "MIN_CACHE", 128)
    monkeypatch.setattr(k3jax, "load", load, raising=False)
    monkeypatch.setattr(k3jax.config.Config, "from_hf", staticmethod(lambda _: model().config))
    return asked


@pytest.fixture
def pictures(tmp_path):
    paths = []
    for name, value in (("a.png", 10), ("b.jpg", 200)):
        paths.append(str(tmp_path / name))
        Image.fromarray(np.full((40, 60, 3), value, np.uint8)).save(paths[-1])
    return paths


def test_images(loads, pictures, capsys):
    arguments = ["generate", "ab", "--max-new-tokens", "4", "--no-stream"]
    for path in pictures:
        arguments += ["--image", path]
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    want = generate(model(), TOKENIZER, "ab", 4, images=read(pictures, model().config))
    assert out == want.text + "\n"
    assert f"prefill {want.prompt_tokens} tokens" in err
    assert want.prompt_tokens == 42  # the pictures among the bytes
    assert loads == [True]


def test_text_only(loads, capsys):
    assert main(["generate", "ab", "--max-new-tokens", "2"]) == 0
    assert main(["generate", "ab", "--max-new-tokens", "2", "--no-vision"]) == 0
    assert loads == [None, False]


def test_refused_before_the_model_is_loaded(loads, pictures, tmp_path, capsys):
    (tmp_path / "empty.png").touch()
    for arguments, message in (
        (["--image", str(tmp_path / "none.png")], "none.png: no such file"),
        (["--image", pictures[0], "--image", str(tmp_path / "empty.png")], "is empty (0 bytes)"),
        (["--image", pictures[0], "--no-vision"], "a.png needs the vision tower"),
    ):
        assert main(["generate", "ab", *arguments]) == 1
        err = capsys.readouterr().err
        assert err.startswith("k3jax: error: ")
        assert message in err
        assert err.count("\n") == 1
    assert loads == []


def test_too_few_images(loads, pictures, capsys):
    text = "<|kimi_image_placeholder|> and <|kimi_image_placeholder|>"
    assert main(["generate", text, "--image", pictures[0]]) == 1
    assert "2 image placeholders for 1 images" in capsys.readouterr().err
