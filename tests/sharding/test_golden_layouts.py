"""Every shipped layout against its reviewed file, and against the models it is for."""

import json
from pathlib import Path

import golden_layouts
import pytest

from sharding import AXES, Layout, resolve

# Bytes of memory of one JAX device: half a chip for tpu7x.
MEMORY = {
    "v5p": 95e9, "v5e": 16e9, "v6e": 32e9, "tpu7x": 96e9, "h200": 141e9, "b200": 180e9,
}  # fmt: skip


@pytest.mark.parametrize("name", Layout.shipped())
def test_matches_the_golden_file(name):
    path = golden_layouts.GOLDEN / f"{name}.json"
    stale = f"{path.name} is out of date; review what {golden_layouts.COMMAND} changes"
    assert path.is_file(), stale
    assert path.read_text() == golden_layouts.render(name), stale


def test_no_golden_file_without_a_layout():
    assert {path.stem for path in golden_layouts.GOLDEN.glob("*.json")} == set(Layout.shipped())


@pytest.mark.parametrize("name", Layout.shipped())
def test_golden_files_add_up(name):
    """Read as data: shards times devices hold every element at least once, and the sum is right."""
    file = json.loads((golden_layouts.GOLDEN / f"{name}.json").read_text())
    devices, total = Layout.load(name).num_devices, 0
    for line in file["arrays"]:
        copies = devices
        for size, local in zip(line["shape"], line["local_shape"], strict=True):
            assert size % local == 0, line
            copies //= size // local
        assert copies >= 1, line
        total += line["bytes_per_device"] * len(line["in"].split(" "))
    assert total == file["bytes_per_device"]


@pytest.mark.parametrize("name", [n for n in Layout.shipped() if n not in ("single", "cpu-8")])
def test_the_whole_model_fits_with_a_tenth_of_the_memory_to_spare(name):
    layout = Layout.load(name)
    arrays = golden_layouts.leaves(name).values()
    held = sum(resolve.bytes_per_device(layout, leaf) for leaf in arrays)
    fits = held < (0.95 if "tight" in name else 0.9) * MEMORY[layout.chip]
    assert fits == (name not in ("h200-2", "h200-8")), f"{held / 1e9:.1f} GB"


@pytest.mark.parametrize("model", ["kimi-k3", "kimi-k3.1-pro"])
@pytest.mark.parametrize("name", Layout.shipped())
def test_resolves_both_models(name, model):
    layout = Layout.load(name)
    resolve.check(layout, golden_layouts.parameters(model), heads=(96,))


@pytest.mark.parametrize("name", ["single", "cpu-8"])
def test_small_layouts_hold_nano(name):
    resolve.check(Layout.load(name), golden_layouts.parameters("nano"))


def test_the_document_is_up_to_date():
    text = (Path(__file__).parents[2] / "docs" / "layouts.md").read_text()
    rows = {
        line.split(" | ")[0].strip("| `"): line for line in text.splitlines() if line[:1] == "|"
    }
    for axis, meaning in AXES.items():
        assert meaning in rows[axis]
    for name in Layout.shipped():
        file = json.loads((golden_layouts.GOLDEN / f"{name}.json").read_text())
        assert f" {file['bytes_per_device'] / 1e9:.1f} | " in rows[name]
        assert " ".join(Layout.load(name).why.split()) in rows[name]
    example = (Path(__file__).parents[2] / "configs/layouts/v5p-64-long.yaml").read_text()
    assert example in text
