"""The benchmark of a period on a CPU at toy sizes: its numbers, its parts, not its times."""

import json
from unittest.mock import MagicMock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from benchmarks.harness import ceilings, profile
from benchmarks.period import __main__ as bench
from benchmarks.period import cases, ours
from k3jax.config import Config
from k3jax.errors import InputError
from k3jax.model import Transformer
from k3jax.plan.memory import weights

TOY = cases.TOYS[0]
FULL = {case.name: case for case in cases.CASES}


@pytest.fixture(scope="module")
def compiled():
    return ours.Workload(TOY, ours.Store()).compile("auto")


def test_a_row_and_its_parts(compiled, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(ours.Workload, "compile", lambda self, name: compiled)
    out = tmp_path / "rows.json"
    options = ("--small", "--repeats", "2", "--lap-ms", "1", "--rows", "^B2 S64$")
    assert bench.main([*options, "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    (row,) = found["rows"]
    assert row["finite"]
    assert len(row["hit"]) == 4
    assert all(3 <= hit <= 6 for hit in row["hit"])  # two tokens, three experts each
    parts = TOY.floors(found["ceilings"], sum(row["hit"]))
    assert row["parts"] == pytest.approx(parts)
    assert tuple(parts) == cases.PARTS
    assert row["floor_ms"] == pytest.approx(sum(parts.values()))
    assert row["share"] == pytest.approx(row["floor_ms"] / row["wall_ms"]["median"])
    for op in ("experts", "kda_decode", "mla", "attention_residuals"):
        assert op in row["chosen"]
    text = capsys.readouterr().out
    assert "experts hit by layer: " in text
    assert "  kda: floor " in text
    assert "embedding, output mix and head are not part of it" in text


def test_a_step_writes_its_cache_in_place_and_keeps_its_length(compiled):
    step, _ = compiled
    workload = ours.Workload(TOY, ours.Store())
    workload.make()
    program = workload.program("auto", step)
    before = [np.asarray(x) for x in jax.tree.leaves(program.arguments[2])]
    assert step.memory_analysis().alias_size_in_bytes == sum(x.nbytes for x in before)
    program.launch()
    after = [np.asarray(x) for x in jax.tree.leaves(program.arguments[2])]
    lengths, *arrays = zip(before, after, strict=True)
    np.testing.assert_array_equal(*lengths)
    assert lengths[0].tolist() == [63, 63]
    for x, y in arrays:  # states and tails as a whole, of latents the last row
        assert (x != y).any()
        if x.shape[-2] == TOY.context:
            np.testing.assert_array_equal(x[..., :-1, :], y[..., :-1, :])
    ((after, ids),) = program.out
    assert after.shape == (2, 1, TOY.config.hidden_size)
    assert ids.shape == (4, 2, 1, 3)


def test_kernels_of_the_step_are_told_by_their_scopes(compiled):
    step, _ = compiled
    known = profile.scopes(step.as_text())
    assert {*cases.PARTS, profile.OTHER} == set(known.fusions.values())


HLO = """HloModule jit_program, is_scheduled=true

%fused_computation.3 (p: f32[2]) -> f32[2] {
  ROOT %multiply.1 = f32[2]{0} multiply(%p, %p), META="jit(f)/kda/mul"}
}

%body (p: (s32[], f32[2])) -> (s32[], f32[2]) {
  %custom-call.9 = f32[2]{0} custom-call(%p), TARGET="mosaic_gpu_v2", META="while/mla/x"}
  %c.1 = (f32[2], /*index=1*/s8[4]{0}) custom-call(%p), TARGET="__cublas$gemm", META="shared/dot"}
  ROOT %tuple.1 = (s32[], f32[2]{0}) tuple(%i, %c.1)
}

%command_buffer (p: f32[2]) -> f32[2] {
  ROOT %custom-call.7 = f32[2]{0} custom-call(%p), TARGET="mosaic_gpu_v2", META="experts/x"}
}

ENTRY %main.5 (p: f32[2]) -> f32[2] {
  %custom-call.1 = f32[2]{0} custom-call(%p), TARGET="mosaic_gpu_v2", META="jit(f)/depth/x"}
  %loop_multiply_fusion.3 = f32[2]{0} fusion(%p), kind=kLoop, calls=%fused_computation.3
  %while.1 = (s32[], f32[2]{0}) while(%t), body=%body, backend_config={TRIPS":{"n":"2"}}
  ROOT %call.1 = f32[2]{0} call(%x), to_apply=%command_buffer
}
"""
for short, written in (
    ("META", "metadata={op_name"),
    ("TARGET", "custom_call_target"),
    ("TRIPS", '"known_trip_count'),
):
    HLO = HLO.replace(short, written)


def test_launches_are_matched_with_custom_calls_in_their_order():
    known = profile.scopes(HLO)
    assert known.fusions["loop_multiply_fusion_3"] == "kda"  # from what it holds
    assert known.custom == {
        "Mosaic": ["depth", "mla", "mla", "experts"],
        "library": ["shared", "shared"],
    }
    one = [("body_mosaic_gpu_kernel", 1.0), ("loop_multiply_fusion_3", 0.5)]
    one += [("body_mosaic_gpu_kernel", 2.0), ("nvjet_hsh", 0.25)] * 2
    one += [("body_mosaic_gpu_kernel", 8.0), ("memset", 0.125)]

    class Program:
        launched = 0

        def direct(self):
            self.launched += 1

        def wait(self):
            pass

        @property
        def compiled(self):
            return self

        def as_text(self):
            return HLO

    def record(run):
        run()
        return [(name, 9.0) for name, _ in one] + one * (program.launched - 1)

    program = Program()
    found = profile.profile(record, program)
    assert [(x.part, x.name, x.launches, x.milliseconds) for x in found] == [
        ("experts", "body_mosaic_gpu_kernel", 1, 8.0),
        ("mla", "body_mosaic_gpu_kernel", 2, 4.0),
        ("depth", "body_mosaic_gpu_kernel", 1, 1.0),
        ("kda", "loop_multiply_fusion_3", 1, 0.5),
        ("shared", "nvjet_hsh", 2, 0.5),
        ("other", "memset", 1, 0.125),
    ]
    # One launch too many: nobody knows which of them belongs where.
    parts = {x.part for x in profile.spent([*one, one[0]], known)}
    assert parts == {"other", "kda", "shared"}


def test_one_period_of_the_real_model():
    case, full = FULL["B64 S8192"], Config.preset("kimi-k3")
    config = case.config
    assert config.schedule.expand() == full.layers[88:92]
    assert (case.first_layer, config.num_blocks) == (88, 8)
    by_part: dict[str, int] = {}
    for w in weights(config):
        by_part[w.component] = by_part.get(w.component, 0) + cases._size(w.leaf)
    assert by_part["experts"] == 4 * 896 * 3 * 3584 * 3072 * 17 // 32 == 4 * 896 * case.expert_bytes
    assert sum(by_part.values()) == pytest.approx(67.5e9, rel=0.005)
    depth = jax.eval_shape(ours.Workload(case, ours.Store())._depth)
    assert depth.bank_NBTD.shape == (8, 64, 1, 7168)
    assert int(ours.Workload(TOY, ours.Store())._depth().count) == 8  # nine sources
    two = FULL["B16 S8192 2 periods of 448 experts"]
    assert two.config.schedule.num_periods == 2
    assert (two.first_layer, two.config.moe.num_experts) == (84, 448)


def test_floors_at_full_size():
    rates = ceilings.H200
    one = FULL["B1 S8192"]
    assert one.uniform_hits == pytest.approx(4 * 16)
    assert one.floors(rates)["experts"] == pytest.approx(0.263, abs=1e-3)
    assert sum(one.floors(rates).values()) == pytest.approx(1.361, abs=2e-3)
    assert FULL["B64 S8192"].floors(rates)["experts"] == pytest.approx(10.09, abs=0.01)
    fewer = FULL["B64 S8192"].floors(rates, hit=4 * 600)["experts"]
    moved = 4 * 64 * 16 * 2 * (2 * 3584 + 3 * 3072)  # latents in and out, activations
    assert fewer == pytest.approx(1e3 * (2400 * 17547264 + moved) / 4.28e12)
    # absorbed attention of 96 heads over a long context computes nearly as long as it reads
    mla = FULL["B64 S131072"].parts()["mla"]
    assert mla.bytes / 4.28e12 == pytest.approx(mla.operations / 790e12, rel=0.06)


def test_parameters_by_their_names():
    config, leaves = TOY.config, ours.Store().get(TOY.config)
    state = nnx.split(Transformer.abstract(config))[1]
    named = dict(zip(ours.named(state), leaves, strict=True))
    std = {name: float(np.asarray(x, np.float32).std()) for name, x in named.items()}
    assert std["period.0.attention.q_proj"] == pytest.approx(config.initializer_range, rel=0.1)
    assert np.asarray(named["period.3.ffn.latent_norm"], np.float32).mean() == pytest.approx(
        1, abs=0.05
    )
    assert std["period.1.ffn.router_bias"] == 0
    scales = np.asarray(named["period.2.ffn.w13_scales"])
    assert (scales.min(), scales.max()) == (ours.LOW, ours.HIGH)
    assert named["period.2.ffn.w13_codes"].dtype == jnp.uint8
    assert std["period.2.attention.k_conv"] == pytest.approx(0.29, rel=0.1)
    assert all(np.isfinite(value) for value in std.values())


def test_what_does_not_fit_is_left_out(monkeypatch):
    class Device:
        def memory_stats(self):
            return {"bytes_limit": 75e9}

    monkeypatch.setattr(jax, "devices", lambda: [Device()])
    period, run = bench.Period(), MagicMock()
    assert period.left_out(run, FULL["B1 S8192"]) is None
    assert period.left_out(run, FULL["B64 S131072"]) == "80 GB and the device has 75"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--implementation", "xla"], "--implementation xla: layers choose by themselves"),
        (["--peers", "folder"], "--peers folder: nobody else has such a period"),
    ],
)
def test_bad_options_are_one_line(options, said):
    with pytest.raises(InputError) as caught:
        bench.main(["--small", *options])
    assert str(caught.value) == said
