"""The report: from a preset, from a folder, from a folder that would be refused."""

import io
import json

import pytest
from checkpoint_files import GOLDEN, copy, edit_config
from rich.console import Console

from k3jax.checkpoint.inspect import inspect, render, size


def printed(report, **options):
    stream = io.StringIO()
    render(report, Console(file=stream, width=120), **options)
    return stream.getvalue()


def test_preset_without_weights():
    report = inspect("kimi-k3")
    assert report.summary["bytes"] == 1_560_860_324_864
    assert report.summary["tensors"] == 497_220
    assert sum(report.bytes_by_component.values()) == 1_560_860_324_864
    assert report.refused == ()
    assert len(report.parameters) == 266
    text = printed(report)
    for word in (
        "1,560,860,324,864",
        "69 KDA, 24 global",
        "period.3.ffn.w13_codes",
        "22 x",
    ):
        assert word in text
    assert json.loads(json.dumps(report.as_dict()))["summary"] == report.summary


@pytest.mark.parametrize("layers", [None, 2])
def test_folder(layers):
    report = inspect(GOLDEN / "k31_tiny", layers=layers)
    index = json.loads((GOLDEN / "k31_tiny" / "model.safetensors.index.json").read_text())
    if layers is None:
        assert sum(report.bytes_by_component.values()) == index["metadata"]["total_size"]
    assert report.refused == ()
    state = "present" if layers is None else "left out"
    assert f"vision: {state} (12 tensors)" in printed(report)


def test_refused_folder(tmp_path):
    copy("k3_tiny", tmp_path)
    (tmp_path / "model-00002-of-000003.safetensors").unlink()
    report = inspect(tmp_path)
    assert len(report.refused) == 1
    assert "model-00002-of-000003.safetensors: the shard is missing" in printed(report)


def test_unknown_keys_and_refused_config(tmp_path):
    copy("k3_tiny", tmp_path)
    edit_config(tmp_path, lambda c: c["text_config"].update(mystery=[1]))
    assert "unknown keys text_config.mystery" in printed(inspect(tmp_path))
    values = json.loads((tmp_path / "config.json").read_text())
    values["text_config"]["moe_layer_freq"] = 2
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert "text_config.moe_layer_freq = 2" in printed(inspect(tmp_path))


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (1_560_860_324_864, "1.561 TB"),
        (10**16, "1e+04 TB"),
    ],
)
def test_size(nbytes, text):
    assert size(nbytes) == text
