"""The vision tower, the preprocessing and the merge against outputs of Moonshot's own code."""

from __future__ import annotations

import hashlib
import json

import jax.numpy as jnp
import numpy as np
import pytest
import tolerances as tol
from test_golden import GOLDEN, relative

import k3jax
from k3jax import runtime, vision
from k3jax.vision.preprocess import Item, normalise

FOLDER = GOLDEN / "vision_tiny"
META = json.loads((FOLDER / "golden_meta.json").read_text())
Z = np.load(FOLDER / "golden.npz")
CASES = [name for name in META["cases"] if name.startswith("vision_")]
# the depth of one compiled program is enough for every prompt here
BUCKET = 64

_models: dict = {}


@pytest.fixture(autouse=True)
def one_bucket(monkeypatch):
    monkeypatch.setattr(runtime, "MIN_TOKENS", BUCKET)
    monkeypatch.setattr(runtime, "MIN_CACHE", BUCKET)


def load(dtype=jnp.float32) -> k3jax.Model:
    if dtype not in _models:
        _models[dtype] = k3jax.load(FOLDER, dtype=dtype, tokenizer=False)[0]
    return _models[dtype]


def items_of(case: str) -> list[Item]:
    """The recorded pixels as items."""
    patches, items = Z[f"{case}/pixel_u8"], []
    for t, h, w in Z[f"{case}/grid_thws"].tolist():
        count = t * h * w
        own, patches = patches[:count].reshape(count, -1), patches[count:]
        items.append(Item(case, w * 14, h * 14, (w * 14, h * 14), (t, h, w), (2, 2), own))
    return items


def synth(width: int, height: int, mode: str) -> np.ndarray:
    """The picture the recorded preprocessing was given."""
    y, x = np.mgrid[0:height, 0:width].astype(np.int64)
    factors = ((3, 5, 4), (7, 2, 6), (1, 11, 3), (5, 3, 5))[: {"L": 1, "RGB": 3, "RGBA": 4}[mode]]
    channels = [(x * a + y * b + ((x * y) >> c)) & 255 for a, b, c in factors]
    picture = np.stack(channels, -1).astype(np.uint8)
    return picture[..., 0] if mode == "L" else picture


@pytest.mark.parametrize("case", CASES)
def test_projected_fp32(case):
    got = np.concatenate(load().vision(items_of(case)))
    assert relative(got, Z[f"{case}/projected_float32"]) <= tol.VISION_FP32


@pytest.mark.parametrize("case", CASES)
def test_projected_bf16(case):
    got = np.concatenate(load(jnp.bfloat16).vision(items_of(case))).astype(np.float32)
    want = Z[f"{case}/projected_bfloat16"]
    assert np.sqrt(np.mean((got - want) ** 2)) / want.std() <= tol.VISION_BF16_RMS


@pytest.mark.parametrize("case", CASES)
def test_inside_the_tower(case):
    """Patch embedding with positions, first block, encoder, merge; from floats, unpadded."""
    tower, found = load().vision.module, []
    for item in items_of(case):
        _, inside = tower.inside(normalise(item.patches_NP), jnp.array(item.grid))
        inside = {name: np.asarray(array) for name, array in inside.items()}
        found.append(inside | {"block0": inside["hidden"][0]})
        found[-1]["merged"] = found[-1]["merged"][: item.tokens]
    for name, golden in (
        ("embedded", "patch_embed"),
        ("block0", "block0"),
        ("encoder", "encoder"),
        ("merged", "merged"),
    ):
        if f"{case}/{golden}" in Z.files:
            got = np.concatenate([inside[name] for inside in found])
            assert relative(got, Z[f"{case}/{golden}"]) <= tol.VISION_FP32, name


@pytest.mark.parametrize("meta", META["preprocess"], ids=lambda m: str(m["size"]) + m["mode"])
def test_preprocessing(meta):
    config = load().config.vision
    width, height = meta["size"]
    (item,) = vision.read([synth(width, height, meta["mode"])], config)
    case = f"preprocess/{width}x{height}_{meta['mode']}"
    assert list(item.grid) == meta["grid"] == Z[f"{case}/grid_thws"][0].tolist()
    assert item.resized == (meta["resize"]["new_width"], meta["resize"]["new_height"])
    assert item.tokens == meta["tokens"] == vision.count_tokens(width, height, config)
    values = normalise(item.patches_NP).reshape(-1)
    got = values[Z[f"{case}/sample_pos"]]
    assert np.abs(got - Z[f"{case}/sample_val"]).max() <= tol.PIXELS
    for row, name in ((0, "first_patch_u8"), (-1, "last_patch_u8")):
        assert np.array_equal(item.patches_NP[row], Z[f"{case}/{name}"].reshape(-1))
    assert abs(values.sum(dtype=np.float64) - meta["pixel_sum"]) <= tol.PIXELS * values.size
    # The whole of it, with this version of Pillow's bicubic.
    assert hashlib.sha256(item.patches_NP.tobytes()).hexdigest() == meta["sha256_u8"]


def expanded(model, case):
    """(expanded ids [T], feature rows [T, D]) of a recorded prompt."""
    items = items_of(case)
    ids = Z[f"{case}/input_ids"][0].tolist()
    media = model.config.media_token_id
    ids = vision.expand(ids, [item.tokens for item in items], media)
    return np.array(ids, np.int32), vision.aligned(ids, model.encode_images(items), media)


@pytest.mark.parametrize("case", ["mm_one_image", "mm_two_images"])
def test_multimodal_logits(case):
    """Pixels and ids in, logits of every expanded position out."""
    model = load()
    ids, features = expanded(model, case)
    assert len(ids) == META["cases"][case]["tokens_out"]
    merged = model.module.embed_tokens(ids[None], features_BTD=features[None])
    assert relative(merged, Z[f"{case}/merged_embeds"]) <= tol.VISION_FP32
    want = Z[f"{case}/logits_float32"]
    logits, _ = model.forward(embeddings_BTD=merged)
    assert relative(logits, want) <= tol.GOLDEN_FP32
    last, cache = model.prefill(ids[None], model.init_cache(1, BUCKET), features_BTD=features[None])
    assert relative(last, want[:, -1]) <= tol.GOLDEN_FP32
    assert cache.lengths_B.tolist() == [len(ids)]


@pytest.mark.parametrize("case", ["mm_one_image", "mm_two_images"])
def test_incremental_equals_one_shot(case):
    """Prefill in two pieces cut at every place, inside the images too; then token by token."""
    model = load()
    ids, features = expanded(model, case)
    want = Z[f"{case}/logits_float32"]
    images = np.flatnonzero(ids == model.config.media_token_id)
    inside = 0
    for cut in range(1, len(ids)):
        inside += cut in images and cut - 1 in images
        cache = model.init_cache(1, BUCKET)
        first, cache = model.prefill(ids[None, :cut], cache, features_BTD=features[None, :cut])
        assert relative(first, want[:, cut - 1]) <= tol.GOLDEN_FP32, cut
        last, cache = model.prefill(ids[None, cut:], cache, features_BTD=features[None, cut:])
        assert relative(last, want[:, -1]) <= tol.GOLDEN_FP32, cut
    assert inside >= 10
    after = int(images[-1]) + 1  # what follows the last image is decoded
    cache = model.init_cache(1, BUCKET)
    _, cache = model.prefill(ids[None, :after], cache, features_BTD=features[None, :after])
    for place in range(after, len(ids)):
        logits, cache = model.decode(ids[place : place + 1], cache)
        assert relative(logits, want[:, place]) <= tol.GOLDEN_FP32, place


def test_chunks_of_prefill(monkeypatch):
    """The chunk border of a long prompt falls inside an image."""
    model, case = load(), "mm_two_images"
    monkeypatch.setattr(runtime, "PREFILL_CHUNK", 7)
    ids, features = expanded(model, case)
    borders = set(range(7, len(ids), 7))
    media = model.config.media_token_id
    assert any(ids[b] == ids[b - 1] == media for b in borders)
    last, _ = model.prefill(ids[None], model.init_cache(1, BUCKET), features_BTD=features[None])
    assert relative(last, Z[f"{case}/logits_float32"][:, -1]) <= tol.GOLDEN_FP32
