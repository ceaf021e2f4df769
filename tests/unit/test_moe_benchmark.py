"""The benchmark of the routed experts on a CPU at toy sizes: its numbers, not its times."""

import json
from unittest.mock import MagicMock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.harness import ceilings, fill, timing
from benchmarks.moe import __main__ as bench
from benchmarks.moe import accuracy, cases, marlin, ours, peers, report
from k3jax.errors import InputError
from k3jax.ops import grouped_matmul
from k3jax.ops.choice import Kernel
from k3jax.ops.grouped_matmul import reference

QUICK = ("--small", "--repeats", "2", "--lap-ms", "1")
TOY = {case.name: case for case in cases.TOYS}
FULL = {case.name: case for case in cases.CASES}


def run(tmp_path, *options):
    out = tmp_path / "rows.json"
    code = bench.main([*QUICK, "--json", str(out), *options])
    return code, json.loads(out.read_text())


def doubled(*arguments, **options):
    return 2 * grouped_matmul.IMPLEMENTATIONS["tiles"](*arguments, **options)


def test_rows_as_a_table_and_as_json(tmp_path, capsys, monkeypatch):
    anywhere = Kernel(lambda kind: True, lambda *arguments: None)
    monkeypatch.setitem(grouped_matmul.IMPLEMENTATIONS, "wrong", doubled)
    monkeypatch.setitem(grouped_matmul.KERNELS, "wrong", anywhere)
    options = ("--rows", "T1 uniform|zipf", "--implementation", "auto", "tiles")
    code, found = run(tmp_path, *options)
    assert code == 0
    rows = found["rows"]
    assert [row["case"] for row in rows] == ["T1 uniform", "T1 uniform", "T5 zipf", "T5 zipf"]
    for row in rows:
        case, rates = TOY[row["case"]], found["ceilings"]
        assert row["finite"]
        assert row["hit"] == case.hit
        assert row["temporaries_share"] == row["temporaries"] / case.packed_bytes > 0
        moving = 1e3 * row["bytes"] / rates["bytes_per_second"]
        computing = 1e3 * row["operations"] / rates["operations_per_second"]
        assert row["floor_ms"] == pytest.approx(max(moving, computing), rel=1e-12)
    for row in rows[1::2]:
        assert row["chosen"].endswith("-> tiles (asked for)")
        assert 5e-4 < row["errors"]["ours"]["error"] < accuracy.ERROR  # bf16, not float32
        assert not any("WRONG" in note for note in row["notes"])
    for row in rows[::2]:
        assert row["chosen"].endswith("-> wrong (for cpu)")
        assert row["errors"]["ours"]["error"] == pytest.approx(1, abs=0.02)
        assert "WRONG: relative error of ours is" in " ".join(row["notes"])
    assert "T1 uniform tiles: ours " in capsys.readouterr().out
    assert bench.MoE().late(TOY["T1 uniform"], "tiles")
    assert not bench.MoE().late(TOY["T1 uniform"], "auto")  # a kernel, not tuned on the device


def test_the_reference_is_that_of_the_op():
    case = TOY["T5 zipf"]
    workload = ours.Workload(case)
    workload.make()
    z, ids, weights = workload.inputs[0]
    at = accuracy.sample(case)
    want = reference.experts(
        np.asarray(z[at]).astype(np.float64),
        ids[at],
        weights[at],
        *workload.shared,
        situ_beta=ours.BETA,
        situ_linear_beta=ours.LINEAR_BETA,
    )
    np.testing.assert_allclose(accuracy.expected(case, workload, 0), want, rtol=2e-5, atol=2e-5)
    others = [
        accuracy.expected(case, workload, 0, *options)
        for options in (
            (accuracy.swiglu_one, False),
            (accuracy.swiglu, False),
            (accuracy.situ, True),
        )
    ]
    apart = [np.linalg.norm(other - want) / np.linalg.norm(want) for other in others]
    assert apart[0] > 0.3  # up + 1 and up
    assert 1e-3 < apart[1] < 0.3  # bounds of 4 and 25, beside gates of 0.2
    assert 0.01 < apart[2] < accuracy.APART


def test_eight_bit_numbers():
    x = jnp.concatenate([jnp.linspace(-448, 448, 32), jnp.full(32, 449.0), jnp.zeros(32)])
    got = np.asarray(accuracy.eight_bits(x.astype(jnp.float32)))
    assert (got[0], got[31]) == (-448, 448)  # 448 is a code of scale 1
    assert (got[32:64] == 448).all()  # scale 2: 449 is 224.5 twice, between 224 and 240
    assert (got[64:] == 0).all()
    np.testing.assert_allclose(got[:32], x[:32], rtol=1 / 16)


@pytest.mark.parametrize("name", TOY)
def test_draws(name):
    case = TOY[name]
    assert len(case.draws) == case.calls
    for ids, weights in case.draws:
        assert (np.diff(np.sort(ids, 1), axis=1) > 0).all()
        assert ids.min() >= 0
        assert ids.max() < case.experts
        np.testing.assert_allclose(weights.sum(1), 1, rtol=1e-6)
        if case.routing == "hot expert":
            assert (ids == case.experts // 2).any(1).all()
    assert TOY["T5 hot expert"].most == 5
    assert FULL["T64 zipf"].most > 3 * FULL["T64 uniform"].most
    assert FULL["T64 hot expert"].most == 64


def test_floors_at_full_size():
    """Against the figures of gpu-baselines for the experts that these draws hit."""
    assert len(FULL) == len(cases.CASES) == 20
    one = FULL["T1 uniform"]
    assert one.packed_bytes == 896 * 3 * 3584 * 3072 * 17 // 32
    assert one.hit == 16
    assert one.moved_bytes == 16 * one.packed_bytes // 896 + 4 * 3584 + 8 * 16
    for tokens, want, tolerance, binds in (
        (1, 0.0656, 1e-4, "bytes"),
        (16, 0.92, 0.03, "bytes"),
        (64, 2.49, 0.08, "bytes"),
        (512, 3.67, 0.02, "bytes"),
        (4096, 5.48, 0.01, "operations"),
    ):
        got, side = FULL[f"T{tokens} uniform"].floor(ceilings.H200)
        assert (got, side) == (pytest.approx(want, abs=tolerance), binds)
    assert FULL["T4096 uniform W4A8"].floor(ceilings.H200)[0] < 4.2  # bytes again
    assert FULL["T512 hot expert"].hit > 890


def size(tree):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def test_bytes_are_those_of_the_arrays():
    case = TOY["T5 zipf"]
    weights, inputs, _ = ours.Workload(case).shapes()
    assert case.packed_bytes == size(weights)
    z = inputs[0][0]
    assert case.moved_bytes == round(case.hit * case.expert_bytes) + size(inputs) + size(z)


def test_filled_arrays():
    codes = np.asarray(fill.codes((7, 300, 200), 1))
    counts = np.bincount(codes.reshape(-1), minlength=256)
    assert counts.min() > 0.8 * counts.mean()
    assert not (codes[0] == codes[1]).all(1).any()
    assert abs(np.corrcoef(codes[0, :-1].reshape(-1), codes[0, 1:].reshape(-1))[0, 1]) < 0.02
    scales = np.asarray(fill.scales((500, 20), 1, 118, 122))
    assert set(scales.reshape(-1)) == {118, 119, 120, 121, 122}
    z = np.asarray(fill.uniform((300, 200), 2, jnp.float32, 0.5, 3.0))
    assert (z.mean(), z.std()) == (pytest.approx(3, abs=0.02), pytest.approx(0.5, rel=0.02))


def test_codes_in_the_order_of_marlin():
    """The B operand of a product of 16 x 8: lane 4 (n % 8) + (k % 8) / 2 holds k % 2 and k / 8."""
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, (2, 128, 16), np.uint8)  # N 128, K 32
    nibbles = np.stack([codes & 15, codes >> 4], -1).reshape(2, 128, 32)
    want = np.zeros((2, 2, 256), np.uint32)
    for n in range(128):
        for k in range(32):
            lane = 4 * (n % 8) + (k % 8) // 2
            number = 4 * (n % 16 // 8) + 2 * (k % 16 // 8) + k % 2
            place = [0, 2, 4, 6, 1, 3, 5, 7].index(number)
            word = n // 64 * 128 + 4 * lane + n % 64 // 16
            want[:, k // 16, word] |= nibbles[:, n, k].astype(np.uint32) << np.uint32(4 * place)
    np.testing.assert_array_equal(marlin.repacked(codes), want.view(np.int32))
    scales = rng.integers(0, 256, (2, 128, 3), np.uint8)
    got = np.asarray(marlin.reordered(scales))
    for at in range(128):
        inner = at % 4
        pair = at - inner + [0, 2, 1, 3][inner]
        n = at // 64 * 64 + pair % 8 * 8 + pair % 64 // 8
        np.testing.assert_array_equal(got[:, :, at], scales[:, n])


def spread(value):
    return timing.spread([value])


def test_what_was_asked_for_is_told_with_yes_or_no():
    ratio = {"kernel": spread(0.8), "wall": spread(1.3)}
    common = {"implementation": "auto", "ratios": {peers.OGS: ratio}, "peers": {}}
    rows = [
        {"case": "T64 uniform", "kernel_ms": spread(5.0), **common},
        {"case": "T4096 uniform", "kernel_ms": None, "wall_ms": spread(8.0), **common},
        {"case": "T64 zipf", "kernel_ms": spread(5.0), **common},
        {"case": "T1 uniform", "implementation": "auto", "failed": "no"},
    ]
    told = "kernels 0.8 (0.8..0.8), wall 1.3 (1.3..1.3); asked for at most 1.2: yes; aim"
    assert report.asked({"rows": rows}) == [
        "T64 uniform auto: 5 ms; asked for at most 1.2 x 3.92 = 4.7 ms: NO",
        f"T64 uniform auto / triton_kernels: {told} 0.75: no",
        "T4096 uniform auto: 8 ms; asked for at most 1.2 x 14.5 = 17.4 ms: yes",
        f"T4096 uniform auto / triton_kernels: {told} 0.6: no",
    ]
    row = {"temporaries": 2**20, "temporaries_share": 0.05} | rows[0]
    assert report.memory({"rows": [row]}) == [
        "T64 uniform auto: 1 MiB, 5.00% of the packed weights; asked for under 3%: NO"
    ]


def test_a_peer_that_is_not_there_fails_alone():
    made = object.__new__(peers.Peers)
    made.torch, made.missing, made.converted = MagicMock(), {}, {}
    gone = {peers.OGS: "no module", peers.MARLIN: "no library"}
    made.missing = dict(gone)
    case = TOY["T5 zipf"]
    sides = made.sides(case, MagicMock())
    assert timing.measure(sides, 2, timing.Kernels()) == {}
    assert {side.name: side.error for side in sides} == {
        name: f"RuntimeError: {name} is not there: {why}" for name, why in gone.items()
    }
    assert made.sides(TOY["T5 uniform W4A8"], MagicMock()) == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--implementation", "fast"], "--implementation fast: one of auto, tiles"),
        (["--rows", "T47"], "--rows T47: none of T1 uniform; T5 zipf;"),
        (["--peers", "no/such/folder"], "--peers no/such/folder: no wheels"),
    ],
)
def test_bad_options_are_one_line(options, said):
    with pytest.raises(InputError) as caught:
        bench.main(["--small", *options])
    assert str(caught.value).startswith(said)
