"""Tower and projector of a checkpoint: loaded, skipped, absent, damaged."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_files import GOLDEN, INDEX, copy, edit_config, edit_tensor, read_all, write_all
from flax import nnx

import k3jax
from k3jax import checkpoint
from k3jax.checkpoint import names
from k3jax.config import Config
from k3jax.errors import CheckpointError, InputError
from k3jax.layers.vision import VisionTower
from k3jax.vision.loading import has_vision, load_encoder


@pytest.fixture
def folder(tmp_path):
    return copy("vision_tiny", tmp_path)


def without_vision(folder):
    files = read_all(folder)
    for tensors in files.values():
        for name in [n for n in tensors if names.is_vision(n)]:
            del tensors[name]
    write_all(folder, files)


def test_every_tensor_arrives():
    """Each parameter holds the bytes of the file, in bf16 as stored and in float32."""
    config = Config.from_hf(GOLDEN / "vision_tiny")
    stored = {n: t for f in read_all(GOLDEN / "vision_tiny").values() for n, t in f.items()}
    seen = 0
    for dtype in (jnp.bfloat16, jnp.float32):
        module = load_encoder(GOLDEN / "vision_tiny", config, dtype=dtype).module
        flat = {p: np.asarray(v.get_value()) for p, v in nnx.to_flat_state(nnx.state(module))}
        for name, spec in names.vision_tensors(config).items():
            assert spec.target is not None
            got = flat[spec.target][spec.index]
            assert got.dtype == dtype
            code, shape, raw = stored[name]
            assert (code, tuple(shape)) == ("BF16", spec.shape)
            assert got.astype(jnp.bfloat16).tobytes() == raw
            seen += 1
    assert seen == 2 * (6 + 6 * 3)


def test_load_and_skip(monkeypatch):
    source = GOLDEN / "vision_tiny"
    model, _ = k3jax.load(source, dtype=jnp.float32, tokenizer=False)
    assert model.vision is not None
    (features,) = model.encode_images([np.zeros((20, 50, 3), np.uint8)])
    assert features.shape == (2, 64)
    skipped, _ = k3jax.load(source, dtype=jnp.float32, tokenizer=False, vision=False)
    assert skipped.vision is None
    with pytest.raises(InputError, match="vision tower was not loaded"):
        skipped.encode_images([np.zeros((20, 50, 3), np.uint8)])


def test_with_a_few_layers(folder):
    """The first layers with the tower: shards of neither may be absent."""
    config, files = Config.from_hf(folder), read_all(folder)
    unused = [f for f, t in files.items() if all((names.layer_of(n) or 0) >= 1 for n in t)]
    unused = [f for f in unused if not any(names.layer_of(n) is None for n in files[f])]
    assert len(unused) == 1
    (folder / unused[0]).unlink()
    short, _ = k3jax.load(folder, tokenizer=False, layers=1)
    assert short.vision is None
    short, _ = k3jax.load(folder, tokenizer=False, layers=1, vision=True)
    assert short.vision is not None
    whole = load_encoder(GOLDEN / "vision_tiny", config).module
    for a, b in zip(*(jax.tree.leaves(nnx.state(m)) for m in (short.vision.module, whole)),
                    strict=True):  # fmt: skip
        assert np.array_equal(a, b)


def test_text_only(folder):
    config = Config.from_hf(folder)
    assert has_vision(folder, config)
    without_vision(folder)
    assert not has_vision(folder, config)
    model, _ = k3jax.load(folder, tokenizer=False)
    with pytest.raises(InputError, match="vision tower was not loaded"):
        model.encode_images([])
    with pytest.raises(CheckpointError, match="a text-only checkpoint"):
        k3jax.load(folder, tokenizer=False, vision=True)
    config = edit_config(folder, lambda c: c.pop("vision_config"))
    assert not has_vision(folder, config)
    with pytest.raises(InputError, match="text-only model"):
        load_encoder(folder, config)


def test_a_single_file_without_index(folder):
    tensors = {name: t for file in read_all(folder).values() for name, t in file.items()}
    for path in [*folder.glob("*.safetensors"), folder / INDEX]:
        path.unlink()
    write_all(folder, {"model.safetensors": tensors}, index=False)
    model, _ = k3jax.load(folder, tokenizer=False)
    assert model.vision is not None


def test_a_missing_and_a_misshapen_tensor(folder):
    edit_tensor(folder, "mm_projector.proj.0.weight", lambda *_: {})
    name = "vision_tower.encoder.blocks.1.wo.weight"
    edit_tensor(folder, name, lambda d, s, raw: {name: (d, [s[1], s[0]], raw)})
    config = Config.from_hf(folder)
    tower = nnx.to_pure_dict(nnx.state(VisionTower.abstract(config.vision)))
    for part in ("vision", "text"):
        with pytest.raises(CheckpointError) as caught:
            checkpoint.load(folder, tower, config, part=part)
        text = str(caught.value)
        assert "mm_projector.proj.0.weight: is missing" in text
        assert f"{name}: shape is [96, 64], the config needs [64, 96]" in text


def test_a_tree_of_another_size(folder):
    config = Config.from_hf(folder)
    tower = nnx.to_pure_dict(nnx.state(VisionTower.abstract(config.vision)))
    del tower["final_norm"]
    with pytest.raises(CheckpointError, match="parameter final_norm: the model lacks it"):
        checkpoint.load(folder, tower, config, part="vision")
