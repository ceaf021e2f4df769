"""The plan: bytes, operations and times against numbers worked out otherwise."""

import json
import math
import sys
from dataclasses import replace

import jax
import pytest

from k3jax import plan
from k3jax.cli import main
from k3jax.config import Config
from k3jax.errors import InputError
from k3jax.plan import costs, estimate, hardware, memory
from k3jax.plan.memory import Step
from sharding import Layout, LayoutError, abstract_mesh
from sharding.report import Collective

K3, K31 = Config.preset("kimi-k3"), Config.preset("kimi-k3.1-pro")
SINGLE, V5P = Layout.load("single"), Layout.load("v5p-64-ep64")
EXPERT = 3 * 3072 * 3584 // 2 + 3 * 3072 * 3584 // 32  # bytes: codes and scales


def totals(config, layout, step):
    return memory.per_device(config, layout, step)[0]


def test_published_figures():
    k3, k31 = plan.figures(K3), plan.figures(K31)
    assert k3["cache_per_token"] == 27 * 1024
    assert k31["cache_per_token"] == 33 * 1024
    for f in (k3, k31):
        assert round(f["kda_state_bfloat16"] / 2**20) == 207
        assert round(f["kda_state_float32"] / 2**20) == 414
        assert f["block_vectors_per_token"] == 126 * 1024
        assert f["dense_latents_at_million"] == pytest.approx(27.6e9, rel=0.002)
    assert k31["index_keys_at_million"] == pytest.approx(3e9, rel=0.03)
    assert k31["selected_latents_at_million"] == pytest.approx(56.6e6, rel=0.001)
    assert "index_keys_at_million" not in k3


def test_index_keys_in_eight_bits():
    """128 codes and a factor of 4 bytes a token and layer, in place of 256 bytes."""
    small = replace(K31.dsa, index_key_dtype="float8_e4m3fn")
    config = replace(K31, dsa=small)
    assert plan.figures(config)["cache_per_token"] == (2 * 576 + 132) * 24
    step = Step("decode", 2, 1, 2**17)
    held, wide = totals(config, SINGLE, step), totals(K31, SINGLE, step)
    assert wide.pop("index keys") == 2 * 2**17 * 24 * 256
    assert held.pop("index keys") == 2 * 2**17 * 24 * 132
    assert held == wide
    read, read_wide = (costs.work(c, SINGLE, step)["indexer"].bytes for c in (config, K31))
    assert read_wide - read == 2 * (2**17 + 1) * 24 * (256 - 132)


def test_weights_of_one_device_are_the_published_checkpoint():
    held = totals(K3, SINGLE, Step("decode", 1, 1, 1))
    caches = ("KDA state", "conv tails", "latents", "block vectors", "workspace")
    weights = sum(n for kind, n in held.items() if kind not in caches)
    vision = 2 * (401.21e6 + 46.14e6)
    assert weights == pytest.approx(1_560_860_324_864 - vision, rel=1e-5)
    assert held["routed experts"] == 92 * 896 * EXPERT
    assert held["KDA state"] == plan.figures(K3)["kda_state_float32"]


def test_memory_of_a_layout():
    held, arguments = memory.per_device(K31, V5P, Step("decode", 64, 1, 131072))
    assert held["routed experts"] == 92 * 14 * EXPERT
    assert held["KDA state"] == plan.figures(K31)["kda_state_float32"]  # 8 sequences / 8
    assert held["block vectors"] == 126 * 1024  # one owned token
    assert arguments == sum(held.values()) - held["block vectors"] - held["workspace"] + 2 * 8 * 4


def test_striped_caches_and_owned_tokens():
    long = Layout.load("v5p-64-long")
    held = totals(K31, long, Step("decode", 8, 1, 2**20))
    assert held["latents"] == 8 * 2**20 // 64 * 24 * 640 * 2
    # A GPU pads nothing; eight sequences of a group are striped over its eight devices.
    held = totals(K31, Layout.load("h200-16"), Step("decode", 16, 1, 131072))
    assert held["latents"] + held["index keys"] == 131072 * 33 * 1024
    chunk = totals(K31, V5P, Step("prefill", 8, 4096, 131072))
    assert chunk["block vectors"] == 512 * 126 * 1024
    assert chunk["workspace"] > 100 * totals(K31, V5P, Step("decode", 8, 1, 131072))["workspace"]


def test_every_parameter_has_a_component():
    components = {w.component for w in memory.weights(K31)}
    assert components <= set(memory.WEIGHTS)
    by_name = {w.name: w.component for w in memory.weights(K31)}
    assert by_name["period.3.attention.indexer.wk"] == "indexer"
    assert by_name["period.0.ffn.w13_scales"] == "experts"
    assert by_name["head.0.ffn.gate_proj"] == "dense"
    assert by_name["tail.0.ffn.shared.up_proj"] == "shared"
    assert by_name["period.0.ffn.latent_norm"] == "latent"
    assert by_name["head.0.input_norm"] == "depth"


def test_operations_of_a_token_are_twice_the_active_parameters():
    work = costs.work(K31, SINGLE, Step("decode", 1, 1, 1))
    active = 104.19e9 + 0.1785e9  # K3's, and the indexers
    state = 69 * 96 * 7 * 128 * 128 / 2
    assert sum(w.operations for w in work.values()) / 2 == pytest.approx(active + state, rel=2e-3)


def test_experts_that_are_read():
    def read(batch):
        return costs.work(K31, V5P, Step("decode", batch, 1, 1024))["experts"].bytes

    held = 92 * 14 * EXPERT
    one = costs.work(K31, SINGLE, Step("decode", 1, 1, 1024))["experts"].bytes
    assert one == pytest.approx(92 * 16 * EXPERT, rel=0.003)  # exactly the chosen ones
    assert read(64) == pytest.approx(held * (1 - (1 - 16 / 896) ** 64), rel=0.01)
    assert held < read(4096) < 1.2 * held  # all of them, and activations


@pytest.mark.parametrize("component", ["kda", "mla", "experts", "shared", "latent", "head"])
@pytest.mark.parametrize("tokens", [1, 256])
def test_devices_share_the_operations(component, tokens):
    step = Step("decode" if tokens == 1 else "prefill", 64, tokens, 131072)
    one = costs.work(K31, SINGLE, step)[component].operations
    many = 64 * costs.work(K31, V5P, step)[component].operations
    # What is not split by heads (decay rank, depth mix before the head) is done on each device.
    assert one * 0.999 <= many <= one * 1.06


def test_context_costs():
    def done(config, context, component, tokens=1):
        kind = "decode" if tokens == 1 else "prefill"
        return costs.work(config, SINGLE, Step(kind, 1, tokens, context)).get(component)

    # Dense: absorbed, 24 layers of 96 heads and 2 * (576 + 512) operations a row.
    more = done(K3, 20000, "mla").operations - done(K3, 10000, "mla").operations
    assert more == 24 * 96 * 2176 * 10000
    more = done(K3, 20000, "mla").bytes - done(K3, 10000, "mla").bytes
    assert more == 24 * 1152 * 10000
    # Sparse: 2,048 rows whatever the context; the indexer grows.
    assert done(K31, 20000, "mla") == done(K31, 10000, "mla")
    more = done(K31, 20000, "indexer").operations - done(K31, 10000, "indexer").operations
    assert more == 24 * 32 * 259 * 10000
    # A long chunk makes keys and values of a row once for all its tokens.
    absorbed = 24 * 96 * 2176 * 4096 * (8192 - 2047)
    grown = done(K3, 8192, "mla", 4096).operations - done(K3, 4096, "mla", 4096).operations
    assert 0 < grown < absorbed


def test_links_within_and_between_domains():
    v5p, h200 = hardware.CHIPS["v5p"], hardware.CHIPS["h200"]
    assert hardware.link_rate(v5p, V5P, ("data", "model")) == 600e9
    gpus = Layout.load("h200-16")
    assert hardware.link_rate(h200, gpus, ("model",)) == 450e9
    assert hardware.link_rate(h200, gpus, ("data",)) == 50e9
    slices = Layout.load("v5p-2x64-ep64")
    assert hardware.link_rate(v5p, slices, ("data", "model")) == 600e9
    assert hardware.link_rate(v5p, slices, ("replica",)) == 50e9 / 8


def test_a_roofline():
    chip = hardware.Chip(1e9, 100.0, 1000.0, 10.0, 1.0)
    sent = Collective("kda", "all-gather", ("model",), 8, (1,), (8,), "int8", 3, 7)
    found = estimate.times(chip, V5P, {"kda": costs.Work(500.0, 20.0)}, [sent])
    assert found == {"kda": estimate.Time(0.5, 0.2, 2.1)}
    assert found["kda"].total == pytest.approx(2.6)


def test_numbers_out_of_range_are_refused_together():
    with pytest.raises(InputError) as error:
        plan.step_of(K31, V5P, "prefill", 0, 2**20 + 1, 0)
    message = str(error.value)
    assert "batch=0" in message
    assert "context=1048577: 1 to 1048576 (max_position_embeddings)" in message
    assert "chunk=0" in message
    with pytest.raises(InputError, match=r"context=0.*"):
        plan.step_of(K31, V5P, "decode", 1, 0, 4096)
    with pytest.raises(InputError, match=r"chunk=4096: 1 to the context, 100"):
        plan.step_of(K31, V5P, "prefill", 1, 100, 4096)


def test_batch_and_context_are_padded_and_it_is_said():
    step, notes = plan.step_of(K31, Layout.load("v5p-64-long"), "decode", 3, 1000, 4096)
    assert step == Step("decode", 8, 1, 1024)
    assert "batch 3 is padded to 8: sequences are split over data 8" in notes[0]
    assert "context 1000 is padded to 1024" in notes[1]
    assert plan.step_of(K31, V5P, "decode", 64, 1000, 4096)[1] == ()


def test_a_layout_that_the_model_does_not_divide_is_refused():
    odd = Layout.from_dict(V5P.to_dict() | {"mesh": {"data": 9, "model": 7}, "topology": None})
    with pytest.raises(LayoutError, match="96 heads"):
        plan.plan("K3.1", K31, odd, batch=9)


def test_what_fits_comes_first_and_the_reason_is_given():
    plans = [plan.plan("m", K31, Layout.load(n)) for n in ("h200-8", "v5p-64-ep64", "b200-64")]
    ranked = plan.compare([plan.Refused("odd", "no"), *plans])
    assert [getattr(p, "name", None) or p.layout.name for p in ranked[2:]] == ["h200-8", "odd"]
    assert ranked[0].seconds <= ranked[1].seconds
    worst = ranked[2]
    assert worst.fits is False
    assert "does not fit by this plan: " in worst.verdict()
    assert "141.00 GB a device" in worst.verdict()
    assert "the largest are latents" in worst.verdict()
    assert ranked[0].fits
    assert "left" in ranked[0].verdict()
    assert replace(worst, capacity=None).fits is None


def test_the_command(capsys):
    assert main(["plan", "--layout", "v5p-64-ep64"]) == 0
    out = capsys.readouterr().out
    for text in ("kimi-k3.1-pro on v5p-64-ep64", "33 KiB", "207 MiB", "126 KiB", "27.65 GB"):
        assert text in out
    assert "fits by this plan" in out
    assert "estimate:" in out


def test_the_command_as_json_and_as_a_picture(capsys, tmp_path):
    picture = tmp_path / "plan.png"
    command = ["plan", "--compare", "h200-8", "v5p-64-ep64", "--json", "--plot", str(picture)]
    assert main([*command, "--step", "prefill", "--chunk", "512", "--batch", "8"]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert (first["layout"], first["fits"]) == ("v5p-64-ep64", True)
    assert (second["layout"], second["fits"]) == ("h200-8", False)
    assert first["step"] == {"kind": "prefill", "batch": 8, "tokens": 512, "context": 131072}
    assert sum(first["memory_bytes"].values()) == first["total_bytes"]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_command_ranks_layouts(capsys):
    names = ["v5p-64-ep64", "single", "h200-8"]
    assert main(["plan", "--layout", "b200-64", "--compare", *names]) == 0
    out = capsys.readouterr().out
    assert out.index(" b200-64 ") < out.index(" h200-8 ")
    assert "h200-8 does not fit by this plan" in out
    assert "no figures for chip 'cpu'" in out


def test_exit_status_1_when_nothing_fits(capsys):
    assert main(["plan", "--layout", "h200-8"]) == 1
    assert "does not fit" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "nothing to plan: give --layout or --compare"),
        (["--layout", "nowhere"], "nowhere: 1 problem"),
        (["--layout", "v5p-64-ep64", "--model", "kimi-k9"], "'kimi-k9' is not a folder"),
        (["--layout", "v5p-64-ep64", "--context", "0"], "context=0: 1 to 1048576"),
        (["--layout", "v5p-64-ep64", "--step", "prefill", "--chunk", "0"], "chunk=0"),
        (["--layout", "b200-64", "--compile"], "chip 'b200' has no TPU topology"),
        (["--layout", "v5p-64-ep64", "--plot", "plan.xyz"], "plot 'plan.xyz'"),
        (["--layout", "v5p-64-ep64", "--plot", "nowhere/plan.png"], "nowhere/plan.png"),
    ],
)
def test_mistakes_are_one_line(options, message, capsys):
    assert main(["plan", *options]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("k3jax: error: ")
    assert message in captured.err
    assert "Traceback" not in captured.err


def test_without_matplotlib(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["plan", "--layout", "v5p-64-ep64", "--plot", "plan.png"]) == 1
    assert "pip install 'k3jax[plot]'" in capsys.readouterr().err


def test_rows_of_a_tpu_cache_are_padded():
    held = totals(K31, V5P, Step("decode", 64, 1, 131072))
    assert held["latents"] == 24 * 8 * 131072 * 640 * 2
    assert held["index keys"] == 24 * 8 * 131072 * 128 * 2
    tails = 69 * 3 * 8 * 4 * 12288 // 8 * 2  # three rows in tiles of four
    assert held["conv tails"] == tails + 8 * 4


@pytest.mark.parametrize("kind", ["decode", "prefill"])
@pytest.mark.parametrize("name", ["h200-16", "b200-64-dp", "cpu-8"])
def test_argument_bytes_are_those_of_the_program(name, kind):
    layout = Layout.load(name)
    step, _ = plan.step_of(K31, layout, kind, 16, 4096, 512)
    _, arguments = memory.per_device(K31, layout, step)
    _, abstract = plan._program(K31, layout, step, abstract_mesh(layout))
    shards = [
        math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize
        for a in jax.tree.leaves(abstract)
    ]
    assert arguments == sum(shards)


def test_block_vectors_travel_once():
    """Attention Residuals run on owned tokens: each sublayer gathers one vector a token and
    scatters one back, in place of an all-reduce of everything."""
    step, _ = plan.step_of(K31, V5P, "decode", 64, 131072, 1)
    found = plan._traced(K31, V5P, step)
    assert not [c for c in found if c.component == "depth"]
    kda = [c for c in found if c.component == "kda"]
    assert [(c.kind, c.axes, c.times) for c in kda] == [
        ("all-gather", ("model",), 69),
        ("reduce-scatter", ("model",), 69),
    ]
    assert kda[0].bytes_sent == 7 * 7168 * 2
    # No gather of a cache: nothing that is gathered is as large as one sequence's index keys.
    largest = max(math.prod(c.result) for c in found if c.kind == "all-gather")
    assert largest < 131072 * 128 / 8


def test_no_communication_on_a_single_device():
    step, _ = plan.step_of(K31, SINGLE, "prefill", 1, 4096, 512)
    assert plan._traced(K31, SINGLE, step) == ()


def test_the_tower_and_image_tokens_are_counted():
    plain = plan.plan("k", K31, V5P, context=1024)
    seeing = plan.plan("k", K31, V5P, context=1024, vision=True, images=[(1024, 1024)])
    tower = 2 * (401_214_464 + 46_144_512)
    assert seeing.memory["vision tower"] == tower
    assert seeing.bytes == plain.bytes + tower
    assert seeing.arguments == plain.arguments  # the tower runs in programs of its own
    assert "an image of 1024 x 1024 is 1,369 tokens of a sequence" in seeing.notes


def test_images_are_refused_by_name(capsys):
    assert main(["plan", "--layout", "single", "--image", "10"]) == 1
    assert "--image 10: expected WIDTHxHEIGHT" in capsys.readouterr().err


def test_bench_names_what_there_is(capsys):
    assert main(["bench", "--op", "nope"]) == 1
    assert "--op nope: one of attention_residuals, dispatch, dsa, " in capsys.readouterr().err
