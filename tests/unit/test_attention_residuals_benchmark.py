"""The benchmark of Attention Residuals on a CPU at toy sizes: its numbers, not its times."""

import json
from unittest.mock import MagicMock

import jax
import pytest

from benchmarks.attention_residuals import __main__ as bench
from benchmarks.attention_residuals import accuracy, cases, ours, peers, report
from benchmarks.harness import ceilings, timing
from k3jax.errors import InputError
from k3jax.ops import attention_residuals
from k3jax.ops.choice import Kernel

QUICK = ("--small", "--repeats", "2", "--lap-ms", "1")
TOY = {case.name: case for case in cases.TOYS}
FULL = {case.name: case for case in cases.CASES}


def run(tmp_path):
    out = tmp_path / "rows.json"
    code = bench.main([*QUICK, "--json", str(out)])
    return code, json.loads(out.read_text())


def one_source(bank, partial, *arguments, **options):
    return partial


def test_rows_as_a_table_and_as_json(tmp_path, monkeypatch):
    anywhere = Kernel(lambda kind: True, lambda *arguments: None)
    monkeypatch.setitem(attention_residuals.IMPLEMENTATIONS, "wrong", one_source)
    monkeypatch.setitem(attention_residuals.KERNELS, "wrong", anywhere)
    code, found = run(tmp_path)
    assert code == 0
    wrong, right, direct, phases = found["rows"]
    assert (wrong["implementation"], right["implementation"]) == ("auto", "xla")
    assert wrong["chosen"] == "attention_residuals (3, 2, 3, 64) -> wrong (for cpu)"
    assert wrong["errors"]["ours"]["error"] > 0.5
    assert any(note.startswith("WRONG: relative error of ours") for note in wrong["notes"])
    rates = found["ceilings"]
    for row in (right, phases):
        assert row["finite"]
        assert 5e-4 < row["errors"]["ours"]["error"] < accuracy.ERROR  # bf16, not float32
        assert not any("WRONG" in note for note in row["notes"])
        moving = 1e3 * row["bytes"] / rates["bytes_per_second"]
        computing = 1e3 * row["operations"] / rates["operations_per_second"]
        assert row["floor_ms"] == pytest.approx(max(moving, computing), rel=1e-12)
    assert direct["errors"]["ours"]["error"] > 0.5  # by the same kernel
    assert phases["implementation"] == "auto"
    assert bench.BLOCK_NOTE in phases["notes"]


def size(tree):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


@pytest.mark.parametrize("name", TOY)
def test_bytes_are_those_of_the_arrays(name):
    case = TOY[name]
    shared, x = jax.eval_shape(lambda: (ours.parameters(case), ours.sources(case, 0)))
    vectors = size([shared[name] for name in ("norm", "query", "out_norm")])
    assert case.moved_bytes == size(x) + size(x["partial"]) + vectors


def test_floors_at_full_size():
    assert len(FULL) == len(cases.CASES)
    large = FULL["read B1 T4096"]
    assert large.floor(*list(ceilings.H200.values())[:2]) == (
        pytest.approx(0.137, abs=1e-3),
        "bytes",
    )
    sets, calls = cases.rotation(large, 24, 48)
    assert sets * large.moved_bytes > 3 * cases.L2_BYTES
    assert calls >= 1
    sets, calls = cases.rotation(FULL["read B64 T1"], 24, 48)
    assert sets * FULL["read B64 T1"].moved_bytes > 3 * cases.L2_BYTES
    assert calls % sets == 0
    direct, phases = FULL["direct B64 T1"], FULL["two-phase B64 T1"]
    assert direct.moved_bytes == phases.moved_bytes == 2 * 7168 * (8 * 64 + 24 * (2 * 64 + 3))


def spread(value):
    return timing.spread([value])


def test_what_was_asked_for_is_told_with_yes_or_no():
    ratios = {
        peers.READ: {"kernel": spread(0.5), "wall": spread(0.6)},
        peers.MIX: {"kernel": None, "wall": spread(1.2)},
    }
    common = {"implementation": "auto", "ratios": ratios}
    rows = [
        {"case": report.LARGE, "kernel_ms": spread(0.2), **common},
        {"case": report.DIRECT, "kernel_ms": spread(0.2), **common},
        {"case": report.PHASES, "kernel_ms": spread(0.1), **common},
    ]
    assert report.asked({"rows": rows}) == [
        "read B1 T4096 auto: 0.2 ms; asked for at most 1.0 x 0.264 ms: yes",
        "read B1 T4096 auto / FLA with the norm: kernels 0.5 (0.5..0.5), wall 0.6 (0.6..0.6); "
        "asked for at most 1.0: yes; aim 0.6: yes",
        "read B1 T4096 auto / FLA without a norm: kernels -, wall 1.2 (1.2..1.2); "
        "asked for at most 1.0: NO; aim 0.6: no",
        "two-phase B64 T1 / direct B64 T1: 0.5 of the time",
    ]


def test_a_peer_that_is_not_there_fails_alone():
    made = object.__new__(peers.Peers)
    made.torch, made.fused = MagicMock(), {}
    made.missing = {"FLA": "no module", "FLA Gluon": "no gluon"}
    sides = made.sides(TOY["read B2 T3"], MagicMock())
    assert timing.measure(sides, 2, timing.Kernels()) == {}
    assert [(side.name, side.error, side.part) for side in sides] == [
        (peers.READ, "RuntimeError: FLA is not there: no module", False),
        (peers.GLUON, "RuntimeError: FLA Gluon is not there: no gluon", False),
        (peers.MIX, "RuntimeError: FLA is not there: no module", True),
    ]
    assert made.sides(TOY["direct B2 T1"], MagicMock()) == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--implementation", "fast"], "--implementation fast: one of auto, xla"),
        (["--rows", "T47"], "--rows T47: none of read B2 T3;"),
    ],
)
def test_bad_options_are_one_line(options, said):
    with pytest.raises(InputError) as caught:
        bench.main(["--small", *options])
    assert str(caught.value).startswith(said)
