"""Saving and loading give the same bits; a failed save changes nothing."""

import json
import os

import jax
import ml_dtypes
import numpy as np
import pytest
from checkpoint_files import GOLDEN, INDEX, abstract, assert_equal, read_all
from safetensors import safe_open

from k3jax.checkpoint import load, names, save, saving, tree
from k3jax.config import Config
from k3jax.errors import CheckpointError


def load_it(directory, config, dtype=np.float32, form=None):
    return load(directory, abstract(config, dtype, form), config)


def snapshot(directory):
    return {p.name: p.read_bytes() for p in sorted(directory.iterdir()) if p.is_file()}


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("name", ["k3_tiny", "k31_tiny"])
def test_round_trip(name, dtype, tmp_path):
    config = Config.from_hf(GOLDEN / name)
    params = load_it(GOLDEN / name, config, dtype)
    save(tmp_path / "new", params, config, max_shard_bytes=900_000, min_shards=2)
    assert Config.from_hf(tmp_path / "new") == config
    assert_equal(load_it(tmp_path / "new", config, dtype), params)
    files = read_all(tmp_path / "new")
    assert len(files) >= 3
    for tensors in files.values():
        assert sum(len(raw) for _, _, raw in tensors.values()) <= 900_000
    index = json.loads((tmp_path / "new" / INDEX).read_text())
    held = {n: f for f, tensors in files.items() for n in tensors}
    assert index["weight_map"] == held
    total = sum(len(v[2]) for tensors in files.values() for v in tensors.values())
    assert index["metadata"]["total_size"] == total


def test_an_independent_reader_agrees(tmp_path):
    config = Config.from_hf(GOLDEN / "k31_tiny")
    params = load_it(GOLDEN / "k31_tiny", config)
    save(tmp_path / "new", params, config, min_shards=2)
    flat, table = tree.flatten(params), names.tensors(config)
    seen = 0
    for path in (tmp_path / "new").glob("*.safetensors"):
        with safe_open(path, "numpy") as file:
            for name in file.keys():  # noqa: SIM118
                spec = table[name]
                value = file.get_tensor(name)
                assert value.shape == spec.shape
                place = np.asarray(flat[spec.target])[spec.index].reshape(-1)
                assert np.array_equal(value.reshape(-1)[: place.size], place)
                seen += 1
    assert seen == sum(spec.target is not None for spec in table.values())


def test_packed_tensors_keep_their_bytes_and_vision_is_carried_over(tmp_path):
    config = Config.from_hf(GOLDEN / "k31_tiny")
    params = load_it(GOLDEN / "k31_tiny", config, ml_dtypes.bfloat16)
    save(tmp_path / "new", params, config, vision_from=GOLDEN / "k31_tiny")
    old = {n: v for t in read_all(GOLDEN / "k31_tiny").values() for n, v in t.items()}
    new = {n: v for t in read_all(tmp_path / "new").values() for n, v in t.items()}
    assert old.keys() == new.keys()
    for name in old:
        if old[name][0] in ("U8", new[name][0]) and not name.endswith("A_log"):
            assert old[name][2] == new[name][2], name
    assert_equal(load_it(tmp_path / "new", config, ml_dtypes.bfloat16), params)


def test_plain_experts_round_trip(tmp_path):
    config = Config.from_hf(GOLDEN / "k3_tiny")
    params = load_it(GOLDEN / "k3_tiny", config, form="dense")
    save(tmp_path / "new", params, config)
    plain = Config.from_hf(tmp_path / "new")
    assert not plain.mxfp4_experts
    assert_equal(load_it(tmp_path / "new", plain), params)


@pytest.mark.parametrize("least", [1, 2, 7, 40])
def test_at_least_so_many_shards(least, tmp_path):
    config = Config.from_hf(GOLDEN / "vision_tiny")
    params = load_it(GOLDEN / "vision_tiny", config)
    save(tmp_path / "new", params, config, min_shards=least)
    assert len(list((tmp_path / "new").glob("*.safetensors"))) >= least
    assert_equal(load_it(tmp_path / "new", config), params)


@pytest.mark.parametrize("failing", ["write", "_write_json", "_swap"])
def test_a_failed_save_leaves_the_old_one(failing, tmp_path, monkeypatch):
    config = Config.from_hf(GOLDEN / "vision_tiny")
    params = load_it(GOLDEN / "vision_tiny", config)
    target = tmp_path / "model"
    save(target, params, config)
    (target / "README.md").write_text("card")
    before = snapshot(target)

    def fail(*args):
        raise OSError("disk full")

    owner = saving.safetensors if failing == "write" else saving
    with monkeypatch.context() as patch:
        patch.setattr(owner, failing, fail)
        with pytest.raises(OSError, match="disk full"):
            save(target, params, config, min_shards=2)
    assert snapshot(target) == before
    assert os.listdir(tmp_path) == ["model"]
    changed = jax.tree.map(lambda leaf: leaf, params)
    changed["final_norm"] = changed["final_norm"] * np.float32(2)
    save(target, changed, config, min_shards=2)
    assert (target / "README.md").read_text() == "card"
    assert len(list(target.glob("*.safetensors"))) == 2
    assert_equal(load_it(target, config), changed)
    assert os.listdir(tmp_path) == ["model"]


def test_parameters_that_do_not_fit_are_refused_together(tmp_path):
    config = Config.from_hf(GOLDEN / "vision_tiny")
    params = load_it(GOLDEN / "vision_tiny", config)
    del params["lm_head"]
    params["embed"] = params["embed"][:5]
    params["final_norm"] = params["final_norm"].astype(np.int32)
    with pytest.raises(CheckpointError) as error:
        save(tmp_path / "new", params, config)
    for word in ("lm_head", "embed: shape is [5, 64]", "final_norm: dtype is int32"):
        assert word in str(error.value)
    assert not (tmp_path / "new").exists()
