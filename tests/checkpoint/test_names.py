"""The table of names against the published index and against itself."""

import hashlib
import json
import math

import numpy as np
import pytest
from checkpoint_files import GOLDEN

from k3jax.checkpoint import names
from k3jax.config import Config

SHA256 = "cf9c59e9b9d9595e03f8dd6667c15e49cf8b1a76fa28f2f865f022a81c5e65f1"


def test_k3_has_the_published_names_and_bytes():
    table = names.tensors(Config.preset("kimi-k3"))
    assert len(table) == 497_220
    assert hashlib.sha256("\n".join(sorted(table)).encode()).hexdigest() == SHA256
    assert sum(spec.nbytes for spec in table.values()) == 1_560_860_324_864
    expert = table["language_model.model.layers.5.block_sparse_moe.experts.895.w3.weight_packed"]
    assert (expert.shape, str(expert.dtype)) == ((3072, 1792), "uint8")
    assert expert.target == ("period", 1, "ffn", "w13_codes")
    assert expert.index == (0, 895, slice(3072, 6144))


def test_k31_adds_the_indexers():
    table = names.tensors(Config.preset("kimi-k3.1-pro"))
    own = {name for name, spec in table.items() if spec.component == "indexer"}
    assert (len(table), len(own)) == (497_340, 120)
    assert hashlib.sha256("\n".join(sorted(set(table) - own)).encode()).hexdigest() == SHA256
    assert sorted({names.layer_of(name) for name in own}) == [*range(3, 92, 4), 92]


def test_parameter_counts():
    count = names.count_parameters(Config.preset("kimi-k3"))
    assert round(count.total / 1e12, 4) == 2.7795
    assert round(count.active / 1e9, 2) == 104.19
    assert round(count.by_component["vision"] / 1e6, 2) == 401.21
    assert round(count.by_component["projector"] / 1e6, 2) == 46.14
    indexers = names.count_parameters(Config.preset("kimi-k3.1-pro")).by_component["indexer"]
    assert indexers == 24 * 7_438_592


@pytest.mark.parametrize("form", ["mxfp4", "dense"])
@pytest.mark.parametrize("name", ["k3_tiny", "k31_tiny", "vision_tiny"])
def test_tensors_tile_the_parameters(name, form):
    config = Config.from_hf(GOLDEN / name)
    counters = {
        path: np.zeros(spec.shape, np.int8) for path, spec in names.parameters(config, form).items()
    }
    for tensor, spec in names.tensors(config, form).items():
        if spec.target is None:
            assert names.is_vision(tensor)
            continue
        place = counters[spec.target][spec.index]
        ones_gone = tuple(size for size in spec.shape if size != 1)
        padded = tensor.endswith("A_log")
        assert padded or tuple(size for size in place.shape if size != 1) == ones_gone
        place += 1
    assert all((counter == 1).all() for counter in counters.values())


@pytest.mark.parametrize("name", ["k3_tiny", "k31_tiny", "vision_tiny"])
def test_tiny_names(name):
    index = json.loads((GOLDEN / name / "model.safetensors.index.json").read_text())
    assert set(names.tensors(Config.from_hf(GOLDEN / name))) == set(index["weight_map"])


def test_other_spellings():
    want = "language_model.model.layers.7.self_attention_res_proj.weight"
    for name in (
        want,
        "model.layers.7.self_attention_res_proj.weight",
        "language_model.layers.7.self_attention_res.proj_weight",
        "model.layers.7.self_attention_res.proj_weight",
    ):
        assert names.canonical(name) == want
    assert names.canonical("lm_head.weight") == "language_model.lm_head.weight"
    assert names.canonical("mm_projector.proj.0.weight") == "mm_projector.proj.0.weight"
    for name in names.tensors(Config.from_hf(GOLDEN / "k31_tiny")):
        assert names.canonical(name) == name


def test_stored_length_of_a_log():
    assert [names.padded_heads(heads) for heads in (1, 2, 3, 96, 128)] == [1, 2, 4, 128, 128]
    assert math.log2(names.padded_heads(97)) == 7
