"""The benchmark of several GPUs, on eight host devices at toy sizes: its numbers, not its times."""

import json

import pytest

from benchmarks.multi_device import __main__ as bench
from benchmarks.multi_device import layers


def run(tmp_path, sections):
    out = tmp_path / "rows.json"
    code = bench.main(["--small", "--sections", sections, "--out", str(out)])
    return code, json.loads(out.read_text())


def test_attention_equals_one_device_and_a_failure_stops_nothing_else(tmp_path, monkeypatch):
    def broken(bench):
        raise RuntimeError("no such\nlink")

    monkeypatch.setattr(bench.links, "links", broken)
    code, found = run(tmp_path, "links,attention")
    assert code == 1  # for the failure
    (failed,) = found["failed"]
    assert (failed["section"], failed["error"]) == ("links", "RuntimeError: no such link")
    assert "broken" in failed["trace"]
    assert len(found["rows"]) == 5
    for row in found["rows"]:
        assert row["ok"], row
        assert row["mb_sent"] > 0
        assert row["wire_ms"] is None  # no rates without the links
        assert row["plan_ms"] > 0
        assert row.get("same_selection", 1) == 1


def test_a_wrong_result_is_not_ok(tmp_path, monkeypatch):
    right = layers._tokens

    def other_inputs(side, config, count, dtype):
        x = right(side, config, count, dtype)
        return x if side.devices == 1 else x * 1.001

    monkeypatch.setattr(layers, "_tokens", other_inputs)
    code, found = run(tmp_path, "striped")
    assert code == 1
    assert [row["ok"] for row in found["rows"]] == [False, False]


@pytest.mark.slow
def test_every_section(tmp_path):
    code, found = run(tmp_path, ",".join(bench.NAMES))
    assert found["failed"] == []
    assert code == 0
    assert {row["section"] for row in found["rows"]} == {
        "links", "dispatch", "attention", "striped", "moe", "slice", "float32",
    }  # fmt: skip
    assert len(found["devices"]) == 8
