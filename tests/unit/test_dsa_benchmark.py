"""The benchmark of DSA on a CPU at toy sizes: its numbers and its table, not its times."""

import json
from dataclasses import replace
from unittest.mock import MagicMock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from benchmarks.dsa import __main__ as bench
from benchmarks.dsa import accuracy, cases, core, ours, peers, report
from benchmarks.harness import ceilings, timing
from k3jax.errors import InputError
from k3jax.ops import dsa
from k3jax.ops.choice import Kernel
from k3jax.ops.mla import latent, reference
from k3jax.ops.rows import Rows

QUICK = ("--small", "--repeats", "2", "--lap-ms", "1")
ANYWHERE = Kernel(lambda kind: True, lambda *arguments: None)
TOY = {case.name: case for case in cases.TOYS}


def run(tmp_path, *options):
    out = tmp_path / "rows.json"
    code = bench.main([*QUICK, "--json", str(out), *options])
    return code, json.loads(out.read_text())


def test_rows_as_a_table_and_as_json(tmp_path, capsys):
    code, found = run(tmp_path, "--rows", "select T|attend|both|dense")
    text = capsys.readouterr().out
    assert code == 0
    assert [(row["case"], row["implementation"]) for row in found["rows"]] == [
        ("select T3 S64", "auto"),
        ("select T3 S64", "xla"),
        ("attend T3 S64", "auto"),
        ("both T3 S64", "auto"),
        ("dense T3 S64", "auto"),
    ]
    rates = found["ceilings"]
    for row in found["rows"]:
        assert row["finite"]
        assert len(row["wall_ms"]["laps"]) == 2
        moving = 1e3 * row["bytes"] / rates["bytes_per_second"]
        computing = 1e3 * row["operations"] / rates["operations_per_second"]
        assert row["floor_ms"] == pytest.approx(max(moving, computing), rel=1e-12)
        own = row["errors"]["ours"]
        if row["case"].startswith("select"):
            assert own["agreement"] == 1
            assert own["differing"] == 0
        else:
            assert own["error"] < 5e-3  # one rounding of the weights to bf16: 2e-3
    assert "both T3 S64 auto: ours relative error" in text
    assert "attention: xla (no kernel for cpu)" in text


def test_index_keys_in_eight_bits(tmp_path):
    code, found = run(tmp_path, "--rows", "^(select|layer) fp8")
    assert code == 0
    assert all(row["finite"] for row in found["rows"])
    select = next(row for row in found["rows"] if row["case"].startswith("select"))
    assert select["errors"]["ours of the same codes"]["agreement"] == 1


def test_a_layer_runs_and_its_cache_stays_in_place(tmp_path):
    code, found = run(tmp_path, "--rows", "layer T")
    assert code == 0
    (row,) = found["rows"]
    assert row["finite"]
    assert row["chosen"].startswith("dsa.select: streamed (no kernel for cpu); 64 keys, topk 16")
    case = TOY["layer T1 S64"]
    cache = case.keys * (case.row_bytes + case.key_bytes)
    workload = ours.Workload(case, 1, 2)
    (compiled, calls), _ = workload.compile("auto")
    assert calls == 2
    assert compiled.memory_analysis().alias_size_in_bytes == cache


def reversed_selection(q_BTHK, rows, w_BTH, positions_BT, topk):
    """The worst rows instead of the best."""
    return dsa.streamed(q_BTHK, rows, -w_BTH, positions_BT, topk)


def doubled(*arguments, **options):
    o, lse = core.attention(*arguments, **options)
    return 2 * o, lse


def broken(*arguments, **options):
    raise NotImplementedError("no such\nunit")


def test_a_wrong_selection_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(dsa.SELECT, "wrong", reversed_selection)
    monkeypatch.setitem(dsa.SELECT_KERNELS, "wrong", ANYWHERE)
    _, found = run(tmp_path, "--rows", "select T", "--quick")
    (row,) = found["rows"]
    assert row["errors"]["ours"]["agreement"] < 0.5
    assert any(note.startswith("WRONG selection: {'agreement'") for note in row["notes"])
    assert row["chosen"].startswith("dsa.select: wrong (for cpu)")


def test_a_wrong_attention_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(latent.LATENT, "wrong", doubled)
    monkeypatch.setitem(latent.KERNELS, "wrong", ANYWHERE)
    _, found = run(tmp_path, "--rows", "attend", "--implementation", "wrong", "xla")
    wrong, right = found["rows"]
    assert wrong["errors"]["ours"]["error"] == pytest.approx(1, abs=0.01)
    assert "WRONG attention: relative error 1.00e+00" in wrong["notes"]
    assert not any("WRONG" in note for note in right["notes"])
    assert wrong["calls"] == 4  # a kernel's calls; the portable form has one or two
    assert right["calls"] == 2


def test_a_row_that_fails_says_so_and_the_next_one_runs(tmp_path, monkeypatch):
    monkeypatch.setitem(latent.LATENT, "broken", broken)
    monkeypatch.setitem(latent.KERNELS, "broken", ANYWHERE)
    options = ("--rows", "attend|select T", "--implementation", "broken", "xla")
    code, found = run(tmp_path, *options, "--no-errors")
    assert code == 1
    by = {(row["case"], row["implementation"]): row for row in found["rows"]}
    assert by["attend T3 S64", "broken"]["failed"] == "NotImplementedError: no such"
    assert by["attend T3 S64", "xla"]["finite"]
    assert by["attend T3 S64", "xla"]["errors"] == {}
    assert "'broken' is not one of" in by["select T3 S64", "broken"]["failed"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--implementation", "fast"], "--implementation fast: one of auto, xla"),
        (["--rows", "T47"], "--rows T47: none of select T3 S64;"),
        (["--without", "("], "--without (: not a regular expression"),
        (["--peers", "no/such/folder"], "--peers no/such/folder: no wheels"),
    ],
)
def test_bad_options_are_one_line(options, said):
    with pytest.raises(InputError) as caught:
        bench.main(["--small", *options])
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)


def test_from_the_command_line():
    from k3jax.cli import main

    with pytest.raises(SystemExit, match="dsa: --rows nothing: none of select T1 S1048576;"):
        main(["bench", "--op", "dsa", "--", "--rows", "nothing"])


def test_floors_at_full_size():
    by_name = {case.name: case for case in cases.CASES}
    assert len(by_name) == len(cases.CASES)
    rates = ceilings.H200
    million = 1_048_576
    # 268 MB of keys; queries, weights and a position; 2,048 positions
    one = by_name["select T1 S1048576"]
    assert one.moved_bytes == million * 256 + 32 * (256 + 4) + 4 + 2048 * 4
    assert one.floor(rates) == (pytest.approx(0.0627, abs=1e-4), "bytes")
    assert by_name["select fp8 T1 S1048576"].floor(rates)[0] == pytest.approx(0.0323, abs=1e-4)
    many = by_name["select T128 S1048576"]
    assert many.operations == 2 * 32 * 128 * sum(range(million - 127, million + 1))
    assert many.floor(rates) == (pytest.approx(1.392, abs=1e-3), "operations")
    assert by_name["select fp8 T128 S1048576"].floor(rates)[0] == pytest.approx(0.818, abs=1e-3)
    rows = by_name["attend T128 S1048576"]
    ends = 128 * (96 * (1152 + 513 * 4) + 2048 * 4)
    assert rows.moved_bytes == 128 * 2048 * 1152 + ends
    assert by_name["attend T128 S131072"].moved_bytes == 131_072 * 1152 + ends  # all of them
    assert by_name["attend T1 S131072"].operations == 2 * 96 * 2048 * (576 + 512)
    both, dense = by_name["both T1 S1048576"], by_name["dense T1 S1048576"]
    assert both.moved_bytes == one.moved_bytes + by_name["attend T1 S1048576"].moved_bytes - 16_384
    assert dense.floor(rates) == (pytest.approx(0.2823, abs=1e-4), "bytes")
    square = by_name["dense T4096 S4096"]
    assert square.operations == 2 * 96 * (576 + 512) * 4096 * 4097 // 2
    layer = by_name["layer T1 S1048576"]
    assert layer.floor(rates)[0] == pytest.approx(0.1753, abs=1e-3)  # index keys alone: 0.0627
    mixed = by_name["both fp8 T1 S1048576"]
    slow = rates | {"bytes_per_second": 1e30}
    parts = (rates["operations_per_second"], rates["fp8_operations_per_second"])
    sums = [o / r for o, r in zip(mixed.operations_by_rate, parts, strict=True)]
    assert mixed.floor(slow) == (pytest.approx(1e3 * sum(sums)), "operations")


def size(tree):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


@pytest.mark.parametrize("name", ["select T3 S64", "select fp8 T3 S64", "attend T3 S64",
                                  "dense T3 S64"])  # fmt: skip
def test_bytes_are_those_of_the_arrays(name):
    case = TOY[name]
    (cache, *_), (x, *_), _ = ours.Workload(case, 1, 1).shapes()
    outputs = 4 * case.tokens * (case.topk if case.kind == "select" else case.heads * 17)
    used = {n: a for n, a in x.items() if n != "positions" or case.kind != "attend"}
    rows = size(cache)
    if case.kind == "attend":
        rows = min(case.tokens * case.topk, case.keys) * case.row_bytes
    assert case.moved_bytes == rows + size(used) + outputs


def test_bytes_of_a_layer_are_those_of_its_arrays():
    case = TOY["layer T1 S64"]
    shared, inputs, (cache,) = ours.Workload(case, 1, 1).shapes()
    assert isinstance(shared, nnx.State)
    matrices, small = cases.layer_weights(case)
    assert size(shared) == 2 * matrices + 4 * small
    assert size(cache) == case.keys * (case.row_bytes + case.key_bytes)
    moved = size(shared) + case.keys * case.key_bytes + case.topk * case.row_bytes
    assert case.moved_bytes == moved + case.row_bytes + case.key_bytes + 2 * size(inputs)


def test_what_turns_exceeds_the_cache():
    for case in cases.CASES:
        sets, calls = cases.rotation(case)
        assert calls % sets == 0
        if case.tokens >= 1024 or case.kind == "layer":
            continue
        if case.kind == "attend":
            assert calls * case.tokens * case.topk * case.row_bytes >= 3 * cases.L2_BYTES
        read = case.keys * (case.key_bytes if case.selects else case.row_bytes)
        assert sets * read >= 3 * cases.L2_BYTES
    assert cases.rotation(cases.Case("select", 1, cases.SHORT))[0] == 6


def test_selections_return_no_row_before_all_had_their_turn():
    case = replace(TOY["attend T3 S64"], tokens=2)
    drawn = ours.selections(case, 2, 6)
    for turn in (0, 1):
        rows = [at.reshape(-1) for at in drawn[turn::2]]
        assert sorted(np.concatenate(rows[:2])) == list(range(64))  # two calls of two queries
    for at in drawn:
        assert at.shape == (1, 2, 16)
        assert (np.diff(at, axis=-1) > 0).all()
    assert not np.array_equal(drawn[0], drawn[1])


def test_calls_take_caches_in_turn():
    case = TOY["select T3 S64"]
    workload = ours.Workload(case, 2, 4)
    workload.make()
    compiled, _ = workload.compile("xla")
    program = workload.program("xla", compiled)
    program.launch()
    assert len(program.out) == 2
    for i, got in enumerate(program.out):
        want = ours.select(case, "xla", workload.shared[i], workload.inputs[i])
        np.testing.assert_array_equal(got, want)
    assert not np.array_equal(program.out[0], program.out[1])


def test_the_core_is_attention():
    rng = np.random.default_rng(0)
    q = rng.standard_normal((1, 5, 3, 12)).astype(np.float32)
    rows = rng.standard_normal((1, 40, 12)).astype(np.float32)
    at = np.stack([rng.permutation(40)[:6] for _ in range(5)])[None].astype(np.int32)
    at[0, 0, 4:] = -1
    positions = np.array([[0, 7, 39, 20, 3]], np.int32)
    eye = np.broadcast_to(np.eye(8), (3, 8, 8))
    view = Rows.of(jnp.asarray(rows))
    for where, seen in (
        (("indices", jnp.asarray(at)), [[i[i >= 0] for i in at[0]]]),
        (("positions", jnp.asarray(positions)), [[np.arange(p + 1) for p in positions[0]]]),
    ):
        o, lse = core.attention(jnp.asarray(q), view, where, scale=0.3, width=8)
        # identities take a latent of width 8 and a shared part of 4 to themselves
        want = reference.attend_rows(q, rows, eye, eye, seen, 0.3)
        np.testing.assert_allclose(o, want, rtol=1e-5, atol=1e-6)
        for t, i in enumerate(seen[0]):
            scores = 0.3 * np.einsum("hc,sc->hs", q[0, t], rows[0, i])
            want = np.log(np.exp(scores).sum(-1))
            np.testing.assert_allclose(lse[0, t], want, rtol=1e-5)


def test_codes_of_index_keys():
    keys = 30 * jax.random.normal(jax.random.key(0), (1, 50, 16), jnp.float32)
    made = ours.quantised(keys.astype(jnp.bfloat16))
    assert made["codes"].dtype == jnp.float8_e4m3fn
    back = made["codes"].astype(jnp.float32) * made["factors"]
    largest = jnp.abs(keys).max(-1, keepdims=True)
    # 3 bits of mantissa round by 1/16 of a number, small ones by 1/2 of 2^-9 of 448
    limit = jnp.maximum(jnp.abs(keys) / 15, largest / 448 / 512)
    assert (jnp.abs(back - keys) <= limit).all()
    assert jnp.abs(made["codes"].astype(jnp.float32)).max(-1) == pytest.approx(448)


def test_a_selection_is_compared_as_a_set():
    scores = np.array([[5.0, 4.0, 3.0, 2.999, 1.0], [1.0, 2.0, 3.0, 4.0, 5.0]], np.float32)
    found = accuracy.selection(np.array([[3, 1, 0], [4, 2, 3]]), scores, 3)
    assert found["agreement"] == pytest.approx(5 / 6)
    assert found["least"] == pytest.approx(2 / 3)
    assert found["differing"] == 1
    assert found["gap"] == pytest.approx(0.001 / 3, rel=1e-3)
    twice = accuracy.selection(np.array([[0, 0, 1], [4, 3, 2]]), scores, 3)
    assert twice["gap"] == np.inf


def spread(value):
    return timing.spread([value])


def row(name, ms, implementation="auto", **more):
    filled = {"kernel_ms": spread(ms), "wall_ms": spread(ms), "ratios": {}, "peers": {}}
    return {"case": name, "implementation": implementation, "errors": {}, **filled, **more}


def test_what_was_asked_for_is_told_with_yes_or_no():
    ratios = {
        peers.SCORES: {"kernel": spread(0.5), "wall": spread(0.6)},
        peers.TOPK: {"kernel": spread(1.2), "wall": spread(0.9)},
    }
    rows = [
        row("select T128 S1048576", 2.0, ratios=ratios),
        row("select fp8 T1 S1048576", 2.0, ratios={peers.SCORES: ratios[peers.TOPK]}),
        row("both T1 S1048576", 0.1),
        row("dense T1 S1048576", 0.4),
        row("dense T1 S1048576", 9.0, "xla"),
        {"case": "attend T128 S1048576", "implementation": "auto", "failed": "no"},
    ]
    assert report.asked({"rows": rows}) == [
        "select fp8 T1 S1048576 auto / DeepGEMM + topk: kernels 1.2 (1.2..1.2), "
        "wall 0.9 (0.9..0.9); asked for at most 1.3: yes",
        "select T128 S1048576 auto / torch.topk: kernels 1.2 (1.2..1.2), "
        "wall 0.9 (0.9..0.9); asked for at most 1: NO",
        "select T128 S1048576 auto / DeepGEMM + topk: kernels 0.5 (0.5..0.5), wall 0.6 (0.6..0.6)",
        "dense T1 S1048576 / both T1 S1048576 auto: 4 times, asked for at least 5: NO",
    ]
    chunk = row("both T4096 S1048576", 50.0, temporaries=5 * 2**30, device_peak=2**31)
    assert report.memory({"rows": [chunk]}) == [
        "both T4096 S1048576 auto: 5120 MiB; asked for under 4 GiB: NO; device peak so far 2.0 GiB"
    ]


class FakeSide:
    """Takes no time and gives what the reference gives."""

    calls = 2

    def __init__(self, name, part=False, fails=False):
        self.name, self.part, self.fails = name, part, fails
        self.error, self.note, self.graph, self.results = None, "", None, ()

    def launch(self):
        if self.fails:
            raise RuntimeError("no image for\nthis device")

    direct = launch

    def wait(self):
        pass


def test_a_part_of_the_work_is_shown_and_is_not_the_peer(monkeypatch, tmp_path, capsys):
    class FakePeers:
        notes = ()

        def __init__(self, site, without):
            self.without = without

        def warm(self):
            return "compiled"

        def sides(self, case, workload):
            slow = FakeSide(peers.SCORES)
            slow.wait = lambda: sum(range(2_000_000))
            return [slow, FakeSide(peers.TOPK, part=True), FakeSide("absent", fails=True)]

        def versions(self):
            return {"deep_gemm": "0"}

        def free(self):
            pass

    monkeypatch.setattr(peers, "unpack", lambda folder: folder)
    monkeypatch.setattr(peers, "Peers", FakePeers)
    code, found = run(tmp_path, "--quick", "--peers", "folder", "--rows", "select T")
    (made,) = found["rows"]
    assert code == 0
    assert made["peer"] == peers.SCORES
    assert made["ratios"][peers.TOPK]["wall"]["median"] > made["wall_ratio"]["median"]
    assert made["peers"]["absent"] == {"failed": "RuntimeError: no image for"}
    text = capsys.readouterr().out
    assert f"select T3 S64 auto beside {peers.TOPK}: kernels - ms" in text
    assert "beside absent: FAILED: RuntimeError: no image for" in text
    assert found["warm"] == "compiled"


def test_a_peer_that_is_not_there_fails_alone_and_others_can_be_left_out():
    made = object.__new__(peers.Peers)
    made.torch, made.without, made.missing = MagicMock(), "fp8", {"FlashMLA": "OSError: gone"}
    made.deep_gemm, made.processors = MagicMock(), 132
    sides = made.sides(TOY["attend T3 S64"], MagicMock())
    assert [side.name for side in sides] == [peers.SPARSE]
    laps = timing.measure([*sides, FakeSide("other")], 2, timing.Kernels())
    assert sides[0].error == "RuntimeError: FlashMLA is not there: OSError: gone"
    assert list(laps) == ["other"]
    by_name = {case.name: case for case in cases.CASES}
    assert made.sides(by_name["dense T4096 S4096"], MagicMock()) == []  # a decode kernel
    chosen = made.sides(by_name["select T1024 S1048576"], MagicMock(calls=20))
    assert [(side.name, side.part, side.wanted) for side in chosen] == [
        (peers.SCORES, False, False),
        (peers.TOPK, True, False),
    ]
    assert chosen[1].calls == 8
