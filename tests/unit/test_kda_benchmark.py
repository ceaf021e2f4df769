"""The benchmark of KDA on a CPU at toy sizes: its numbers and its table, not its times."""

import io
import json
import subprocess
import sys
import tarfile
import zipfile
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from benchmarks.harness import peers as harness_peers
from benchmarks.harness import table, timing
from benchmarks.kda import __main__ as bench
from benchmarks.kda import accuracy, cases, ours, peers
from k3jax.errors import InputError
from k3jax.ops.kda import gated

QUICK = ("--small", "--repeats", "2", "--lap-ms", "1")


def run(tmp_path, *options):
    out = tmp_path / "rows.json"
    code = bench.main([*QUICK, "--json", str(out), *options])
    return code, json.loads(out.read_text())


def test_rows_as_a_table_and_as_json(tmp_path, capsys):
    code, found = run(tmp_path, "--implementation", "xla", "--no-errors", "--rows", "T48|lengths")
    text = capsys.readouterr().out
    assert code == 0
    assert [row["case"] for row in found["rows"]] == [
        "prefill B1 T48 H2",
        "prefill 3 lengths, 27 tokens H2",
    ]
    rates = found["ceilings"]
    for row in found["rows"]:
        assert row["finite"]
        assert row["implementation"] == "xla"
        assert len(row["wall_ms"]["laps"]) == 2
        assert row["wall_ms"]["low"] <= row["wall_ms"]["median"] <= row["wall_ms"]["high"]
        assert row["kernel_ms"] is None  # no CUPTI here, and the report says so
        moving = 1e3 * row["bytes"] / rates["bytes_per_second"]
        computing = 1e3 * row["operations"] / rates["operations_per_second"]
        assert row["floor_ms"] == max(moving, computing)
        assert row["binds"] == ("bytes" if moving >= computing else "operations")
        assert row["share"] == pytest.approx(row["floor_ms"] / row["wall_ms"]["median"])
        line = "  ".join(table.cells(row))
        assert row["case"] in line
        assert line.split("  ")[0] in text
    assert "Mosaic GPU" in found["kernel_times"]
    assert found["about"]["device"] == "cpu"
    assert text.count("ours/peer wall") == 1


def test_decode_and_layer_rows(tmp_path):
    code, found = run(tmp_path, "--quick", "--no-errors", "--rows", "decode")
    assert code == 0
    decode, layer = found["rows"]
    assert decode["case"] == "decode B3 H2"
    assert decode["chosen"].startswith("kda_decode: xla (")
    assert decode["calls"] == 4
    assert decode["sets"] == 2
    assert layer["case"] == "layer decode B2 H2"
    assert layer["finite"]


def test_errors_against_float64(tmp_path, capsys):
    code, found = run(tmp_path, "--implementation", "xla", "--rows", "B2 T32")
    assert code == 0
    prefill, decode = found["errors"]
    assert prefill["o"] < 4e-3  # one rounding to bf16: 1.7e-3
    assert prefill["state"] < 1e-6
    assert decode["o"] < 6e-3  # two roundings: 3.2e-3
    assert decode["state"] < 4e-3
    assert "error prefill B1 T40 H2: xla o" in capsys.readouterr().out


def wrong(*inputs):
    o, state = gated._xla(*inputs)
    return (o * 1.05).astype(o.dtype), state


def nan(*inputs):
    o, state = gated._xla(*inputs)
    return o * jnp.nan, state


def broken(*inputs):
    raise NotImplementedError("no such\nunit")


@pytest.mark.parametrize(("name", "form"), [("broken", broken), ("nan", nan)])
def test_a_row_that_fails_says_so_and_the_next_one_runs(tmp_path, monkeypatch, capsys, name, form):
    monkeypatch.setitem(gated.IMPLEMENTATIONS, name, form)
    code, found = run(tmp_path, "--implementation", name, "xla", "--no-errors", "--rows", "T48")
    assert code == 1
    first, second = found["rows"]
    assert second["finite"]
    if name == "broken":
        assert first["failed"] == "NotImplementedError: no such"
        assert "FAILED: NotImplementedError: no such\n" in capsys.readouterr().out
    else:
        assert not first["finite"]
        assert "NOT FINITE" in first["notes"]


def test_a_wrong_form_has_a_large_error(monkeypatch):
    monkeypatch.setitem(gated.IMPLEMENTATIONS, "wrong", wrong)
    (row,) = accuracy.rows(accuracy.TOYS[0], ["wrong"], None, False)
    assert row["o"] > 0.04


def test_error_at_most_flashkdas(monkeypatch):
    errors = {peers.FLASHKDA: {"o": 5.7e-3, "state": 5.0e-3}}
    monkeypatch.setattr(accuracy, "_peers", lambda *_: errors)
    monkeypatch.setitem(gated.IMPLEMENTATIONS, "wrong", wrong)
    rows = accuracy.rows(accuracy.TOYS[0], ["xla", "wrong"], SimpleNamespace(), False)
    assert [row["at_most_flashkda"] for row in rows] == [True, False]
    text = accuracy.text(rows)
    assert text.count("FlashKDA o 5.70e-03") == 2
    assert text.endswith("at most FlashKDA's: NO")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--implementation", "fast"], "--implementation fast: one of auto, xla"),
        (["--rows", "T47"], "--rows T47: none of prefill B1 T48 H2;"),
        (["--rows", "("], "--rows (: not a regular expression"),
        (["--repeats", "0"], "--repeats 0: not positive"),
        (["--lap-ms", "-1"], "--lap-ms -1.0: not positive"),
        (["--peers", "no/such/folder"], "--peers no/such/folder: no wheels"),
        (["--json", "no/such/folder/rows.json"], "--json no/such/folder/rows.json: no such folder"),
    ],
)
def test_bad_options_are_one_line(options, said):
    with pytest.raises(InputError) as caught:
        bench.main(["--small", *options])
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)


def test_from_the_command_line(capsys):
    command = [sys.executable, "-m", "benchmarks.kda", "--rows", "nothing"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("kda: --rows nothing: none of prefill B1 T4096 H96;")
    assert done.stderr.count("\n") == 1
    from k3jax.cli import main  # needs packages that a GPU machine may lack; the rest does not

    with pytest.raises(SystemExit, match="kda: --rows nothing"):
        main(["bench", "--op", "kda", "--", "--rows", "nothing"])


def test_floors_at_full_size():
    by_name = {case.name: case for case in cases.CASES}
    assert len(by_name) == len(cases.CASES)
    rates = (4.28e12, 790e12)
    # q, k, v, z, o and b of a token and head are 1,282 bytes
    case = by_name["prefill B1 T65536 H96"]
    assert case.moved_bytes == 65_536 * 96 * 1282 + 96 * 128 * 128 * 4
    assert case.floor(*rates) == (pytest.approx(1.886, abs=1e-3), "bytes")
    assert case.operations == 65_536 * 96 * (2 * 16 * 5 * 128 + 6 * 128 * 128)
    assert case.floor(4.28e12, 100e12)[1] == "operations"
    packed = by_name["prefill 6 lengths, 8192 tokens H96"]
    assert packed.real_tokens == 8192
    assert packed.moved_bytes == 8192 * 96 * 1282 + 2 * 6 * 96 * 128 * 128 * 4
    decode = by_name["decode B64 H96"]
    state, tails, rows = 4 * 64 * 96 * 128**2, 2 * 3 * 64 * 3 * 12_288, 2 * 64 * (6 * 12_288 + 96)
    parameters = 4 * (3 * 12_288 * 4 + 12_288 + 96 + 128)
    assert decode.moved_bytes == 2 * state + 2 * tails + rows + parameters
    assert decode.floor(*rates) == (pytest.approx(0.1971, abs=1e-4), "bytes")  # state 0.1882
    layer = by_name["layer decode B64 H96"]
    assert layer.floor(*rates) == (pytest.approx(0.4026, abs=1e-3), "bytes")  # weights 0.207


def test_bytes_of_a_layer_are_those_of_its_arrays():
    case = next(case for case in cases.TOYS if case.kind == "layer")
    workload = ours.Workload(case, 1, 1)
    shared, inputs, states = workload.shapes()
    size = lambda tree: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))  # noqa: E731
    assert isinstance(shared, nnx.State)
    assert case.moved_bytes == size(shared) + 2 * size(inputs) + 2 * size(states)


def test_bytes_of_a_decode_step_are_those_of_its_arrays():
    case = next(case for case in cases.TOYS if case.kind == "decode")
    shapes = ours.Workload(case, 1, 1).shapes()
    size = lambda tree: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))  # noqa: E731
    shared, (x,), states = shapes
    output = size(x["gate"])
    assert case.moved_bytes == size(shared) + size(x) + output + 2 * size(states)


def test_sets_of_a_decode_row_exceed_the_cache():
    for case in cases.CASES:
        if case.kind == "prefill":
            continue
        sets, calls = cases.rotation(case)
        assert sets * case.state_bytes > 2 * cases.L2_BYTES
        assert calls % sets == 0
    assert cases.rotation(cases.Case("decode", 1)) == (30, 120)


def test_a_chain_of_calls_is_the_calls_in_a_row_and_its_states_are_in_place():
    case = next(case for case in cases.TOYS if case.kind == "decode")
    workload = ours.Workload(case, 2, 4)
    workload.make()
    compiled, _ = workload.compile("xla")
    program = workload.program("xla", compiled)
    program.launch()
    states, outputs = workload.states(), []
    step = jax.jit(partial(ours.decode_step, "xla"))
    for i in range(4):
        o, states[i % 2] = step(workload.shared, workload.inputs[i % 2], states[i % 2])
        outputs.append(o)
    for got, want in zip(
        jax.tree.leaves((program.out, program.arguments[2])),
        jax.tree.leaves((outputs, states)),
        strict=True,
    ):
        np.testing.assert_array_equal(
            np.asarray(got, np.float32), np.asarray(want, np.float32)
        )  # the same operations in the same order
    header = compiled.as_text().splitlines()[0]
    assert header.count("may-alias") + header.count("must-alias") == 4  # two states, two tails


class FakeSide:
    """Takes no time, and says when it was called."""

    calls = 2

    def __init__(self, name, log, fails=False):
        self.name, self.log, self.fails, self.error = name, log, fails, None

    def launch(self):
        if self.fails:
            raise RuntimeError("out of\nmemory")
        self.log.append(f"launch {self.name}")

    def direct(self):
        self.log.append(f"direct {self.name}")

    def wait(self):
        self.log.append(f"wait {self.name}")


class FakeKernels(timing.Kernels):
    """Each launch runs one kernel of 3 ms, and the first one of each recording takes 100."""

    def __init__(self, log):
        self.missing, self.problems, self.log = None, 0, log

    def record(self, run):
        before = len(self.log)
        run()
        launches = sum(text.startswith("direct") for text in self.log[before:])
        return [("scan", 100.0)] + [("scan", 3.0)] * (launches - 1)


def test_laps_alternate_and_a_failing_side_is_left_out():
    log = []
    sides = [FakeSide("a", log), FakeSide("x", log, fails=True), FakeSide("b", log)]
    laps = timing.measure(sides, 3, FakeKernels(log), lap_ms=1e-9)
    assert sides[1].error == "RuntimeError: out of"
    assert list(laps) == ["a", "b"]
    waits = [text[-1] for text in log if text.startswith("wait")]
    assert "".join(waits) == "aaabbb" + "ab" * 3 + "ab" * 3  # warm, wall, kernels
    assert len(laps["a"].wall) == 3
    assert laps["a"].kernel == [1.5] * 3  # two calls a launch; the first launch is not counted
    assert laps["a"].kernels == {"scan": (0.5, 1.5)}


def test_without_kernel_times_the_wall_laps_stand():
    log = []
    kernels = FakeKernels(log)
    kernels.record = lambda run: []
    laps = timing.measure([FakeSide("a", log)], 3, kernels)
    assert laps["a"].problem == "RuntimeError: CUPTI recorded no kernel"
    assert laps["a"].kernel == []
    assert len(laps["a"].wall) == 3


def test_a_ratio_is_taken_within_each_pair():
    found = timing.ratio([1.0, 4.0, 9.0], [2.0, 4.0, 3.0])
    assert found == {"median": 1.0, "low": 0.5, "high": 3.0, "laps": [0.5, 1.0, 3.0]}
    assert timing.ratio([], [1.0]) is None
    assert table.spread(found) == "1 (0.5..3)"


def test_a_row_with_peers_names_the_quickest(monkeypatch, tmp_path):
    class FakePeers:
        notes = ()

        def __init__(self, site):
            self.log = []

        def sides(self, case, workload, triton):
            made = [FakeSide(name, self.log) for name in ("slow", "quick", "absent")]
            made[0].wait = lambda: sum(range(2_000_000))
            made[2].fails = True
            for side in made:
                side.note, side.graph, side.part = "", None, False
            return made

        def versions(self):
            return {"fla": "0"}

        def free(self):
            pass

    monkeypatch.setattr(peers, "unpack", lambda folder: folder)
    monkeypatch.setattr(peers, "Peers", FakePeers)
    options = ("--quick", "--no-errors", "--peers", "folder", "--rows", "T48")
    code, found = run(tmp_path, *options)
    (row,) = found["rows"]
    assert code == 0
    assert row["peer"] == "quick"
    assert row["peers"]["absent"] == {"failed": "RuntimeError: out of"}
    assert "absent FAILED: RuntimeError: out of" in row["notes"]
    own, quick = row["wall_ms"]["laps"], row["peers"]["quick"]["wall_ms"]["laps"]
    assert row["wall_ratio"]["laps"] == [a / b for a, b in zip(own, quick, strict=True)]
    assert found["about"]["versions"]["fla"] == "0"


def test_the_difference_from_flashkda_is_taken_at_the_end():
    rng = np.random.default_rng(0)
    o = jnp.asarray(rng.standard_normal((1, 300, 2, 4)), jnp.bfloat16)
    state = jnp.asarray(rng.standard_normal((1, 2, 4, 4)), jnp.float32)

    class Tensor:
        def __init__(self, array):
            self.array = np.asarray(array, np.float32)

        def __getitem__(self, at):
            return Tensor(self.array[at])

        def float(self):
            return self

        cpu = float

        def numpy(self):
            return self.array

    doubled = 2 * np.asarray(o, np.float64)[:, 44:]
    other = Tensor(np.concatenate([np.full((1, 44, 2, 4), 9.0), doubled], 1))
    flash = SimpleNamespace(results=(other, Tensor(state), None))
    found = bench._difference(cases.TOYS[0], SimpleNamespace(out=(o, state)), flash)
    assert found == {"o": 0.5, "state": 0.0}


def test_peers_are_unpacked_once(tmp_path, monkeypatch):
    monkeypatch.setattr(harness_peers.tempfile, "tempdir", str(tmp_path / "temporary"))
    whl = tmp_path / "peers" / "whl"
    whl.mkdir(parents=True)
    with zipfile.ZipFile(whl / "fla_core-1-py3-none-any.whl", "w") as archive:
        archive.writestr("fla/__init__.py", "x = 1\n")
    with tarfile.open(whl / "peers_main.tar.xz", "w:xz") as archive:
        for name in (peers.LIBRARY, "other.so"):
            member = tarfile.TarInfo(name)
            member.size = 3
            archive.addfile(member, io.BytesIO(b"elf"))
    site = peers.unpack(str(tmp_path / "peers"))
    assert (site / "fla" / "__init__.py").read_text() == "x = 1\n"
    assert (site / peers.LIBRARY).read_bytes() == b"elf"
    assert not (site / "other.so").exists()
    (site / "fla" / "__init__.py").write_text("x = 2\n")
    assert peers.unpack(str(whl)) == site
    assert (site / "fla" / "__init__.py").read_text() == "x = 2\n"
