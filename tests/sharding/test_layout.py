"""Reading layouts, and refusing what cannot be run."""

import copy
import dataclasses

import pytest
import yaml

from sharding import AXES, Layout, LayoutError
from sharding.axes import split

E, HEADS = 896, 96


def written(**changes):
    """A legal layout as a mapping: data 8 x model 8, experts over both."""
    rules = {
        "batch": ["data"], "heads": ["model"], "head_count": ["model"], "mlp": ["model"],
        "shared_mlp": ["model"], "vocab": ["model"], "experts": ["data", "model"],
    }  # fmt: skip
    rules |= changes.pop("rules", {})
    base = {
        "name": "mine", "why": "A test.", "chip": "v5p", "topology": "v5p:4x4x4",
        "mesh": {"data": 8, "model": 8}, "rules": rules,
        "replicated": [a for a in AXES if a not in rules],
        "dispatch": {"prefill": "ragged", "decode": "gather"},
    }  # fmt: skip
    return base | changes


def free(mesh, **rules):
    """On a mesh of one's own."""
    return written(mesh=mesh, topology=None, rules=rules)


def without(d, key):
    return {k: v for k, v in d.items() if k != key}


REFUSED = {
    "unknown mesh axis": (written(rules={"mlp": ["modle"]}), ["'mlp'", "'modle'", "data, model"]),
    "mesh axis twice in a rule": (
        written(rules={"experts": ["data", "data"]}), ["'experts'", "'data' stands twice"]),
    "not in mesh order": (
        written(rules={"experts": ["model", "data"]}), ["'experts'", "['data', 'model']"]),
    "size 0": (written(mesh={"data": 0, "model": 8}), ["'data'", "is 0", "at least 1"]),
    "negative size": (written(mesh={"data": -8, "model": 8}), ["'data'", "is -8"]),
    "float size": (written(mesh={"data": 8.0, "model": 8}), ["'data'", "8.0", "whole number"]),
    "text size": (written(mesh={"data": "8", "model": 8}), ["'data'", "'8'"]),
    "bool size": (written(mesh={"data": True, "model": 8}), ["'data'", "True"]),
    "no mesh": (written(mesh={}), ["mesh is {}"]),
    "mesh axis without a name": (written(mesh={8: 8, "model": 8}), ["mesh axis 8"]),
    "missing rule": (
        written(replicated=[a for a in AXES if a not in ("batch", "heads", "conv")][:-1]),
        ["no rule", "'conv'", "'token'"]),
    "unknown logical axis": (written(rules={"hedas": []}), ["unknown logical axis 'hedas'"]),
    "two rules": (
        written(replicated=[*written()["replicated"], "mlp"]), ["'mlp' has two rules"]),
    "rule is text": (written(rules={"mlp": "model"}), ["'mlp'", "'model'", "list"]),
    "idle axis": (
        free({"data": 8, "spare": 2, "model": 8}), ["'spare'", "size 2", "idle"]),
    "batch and heads overlap": (
        written(rules={"batch": ["data", "model"]}), ["'model'", "size 8", "disjoint"]),
    "head_count unlike heads": (
        written(rules={"head_count": []}), ["'head_count'", "'heads' over [model (8)]"]),
    "mlp over batch": (written(rules={"mlp": ["data"]}), ["'mlp' over [data (8)]", "model (8)"]),
    "vocab over both": (
        written(rules={"vocab": ["data", "model"]}), ["'vocab' over [data (8), model (8)]"]),
    "latent over batch": (written(rules={"latent": ["data"]}), ["'latent' over [data (8)]"]),
    "shared_mlp over batch": (written(rules={"shared_mlp": ["data"]}), ["'shared_mlp'"]),
    "embed over tensor": (
        written(rules={"embed": ["model"]}), ["'embed' over [model (8)]", "[data (8)]"]),
    "cache over part of batch": (
        free({"a": 2, "b": 4, "model": 8}, batch=["a", "b"], experts=["a", "b"],
             cache_sequence=["a"]),
        ["'cache_sequence' over [a (2)]", "[a (2), b (4)]"]),
    "an expert is cut": (
        written(rules={"expert_mlp": ["model"]}), ["'expert_mlp' over [model (8)]", "whole"]),
    "layers split": (written(rules={"layers": ["data"]}), ["'layers'", "data (8)"]),
    "slices do not divide": (
        written(slices=3, topology=None), ["3 slices", "'data' of size 8"]),
    "slices 0": (written(slices=0), ["slices is 0"]),
    "topology too small": (
        written(topology="v5p:4x4x2"), ["v5p:4x4x2", "32 chips", "data 8 x model 8", "64"]),
    "slices count": (
        written(slices=2), ["2 slices x 64 chips", "= 128 devices", "needs 64"]),
    "cores count": (
        written(chip="tpu7x", topology="tpu7x:4x4x4"), ["64 chips of 2 devices = 128", "needs 64"]),
    "topology of another chip": (written(topology="v6e:8x8"), ["v6e:8x8", "v5p:AxBxC"]),
    "topology of another rank": (written(topology="v5p:8x8"), ["v5p:8x8", "v5p:AxBxC"]),
    "topology is a number": (written(topology=64), ["topology 64"]),
    "topology of a GPU": (
        written(chip="h200", topology="h200:8x8"), ["h200:8x8", "'h200' has none"]),
    "unknown chip": (written(chip="v7"), ["'v7'", "v5p, v5e"]),
    "unknown dispatch": (
        written(dispatch={"prefill": "raged", "decode": "gather"}), ["prefill", "'raged'"]),
    "ragged on a GPU": (
        written(chip="h200", topology=None, dispatch={"prefill": "ragged", "decode": "gather"}),
        ["prefill is 'ragged'", "wrong numbers", "'h200'"]),
    "missing phase": (written(dispatch={"prefill": "ragged"}), ["decode is missing"]),
    "unknown phase": (
        written(dispatch={"prefill": "dense", "decode": "dense", "train": "dense"}), ["'train'"]),
    "dispatch is text": (written(dispatch="ragged"), ["dispatch is 'ragged'"]),
    "unknown key": (written(rule={}), ["unknown key 'rule'"]),
    "missing key": (without(written(), "why"), ["'why' is missing"]),
    "empty reason": (written(why=" "), ["why is ' '"]),
    "negative extra experts": (written(extra_experts=-1), ["extra_experts is -1"]),
    "boolean extra experts": (written(extra_experts=True), ["extra_experts is True"]),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name_and_number(case):
    d, words = REFUSED[case]
    with pytest.raises(LayoutError) as caught:
        Layout.from_dict(d)
    assert str(caught.value).startswith("layout mine: ")
    for word in words:
        assert word in str(caught.value)


def test_all_problems_at_once():
    d = written(chip="v7", slices=0, rule={}, rules={"mlp": ["x"], "vocab": ["data", "data"]})
    with pytest.raises(LayoutError) as caught:
        Layout.from_dict(d)
    assert len(caught.value.problems) == 5
    assert "5 problems" in str(caught.value)


def test_axes_of_size_one_do_not_count():
    """The same rules run on fewer devices."""
    layout = Layout.from_dict(free({"data": 1, "model": 8}, cache_sequence=["data", "model"]))
    assert layout.batch == ()
    assert layout.tensor == layout.cache_sequence == ("model",)
    assert layout.experts == ("model",)
    Layout.from_dict(free({"data": 8, "spare": 1, "model": 8}))


@pytest.mark.parametrize("cache", [[], ["data"], ["model"], ["data", "model"]])
def test_legal_cache_stripes(cache):
    assert Layout.from_dict(written(rules={"cache_sequence": cache})).cache_sequence == tuple(cache)


def test_roles_and_sizes():
    layout = Layout.from_dict(
        free({"replica": 2, "data": 4, "model": 8}, batch=["replica", "data"])
    )
    assert (layout.batch, layout.tensor) == (("replica", "data"), ("model",))
    assert layout.experts == ("data", "model")
    assert layout.cache_sequence == ()
    assert layout.num_devices == 64
    assert (layout.size(layout.experts), layout.size(())) == (32, 1)
    with pytest.raises(LayoutError, match="'hedas'"):
        layout.over("hedas")


def test_values_compare_and_hash():
    one, two = Layout.from_dict(written()), Layout.from_dict(copy.deepcopy(written()))
    assert one == two
    assert hash(one) == hash(two)
    assert one != "mine"
    assert Layout.from_dict(one.to_dict()) == one
    swapped = written(mesh={"model": 8, "data": 8}, rules={"experts": ["model", "data"]})
    assert Layout.from_dict(swapped) != one  # the order of the mesh decides who neighbours whom
    assert copy.deepcopy(one) == one
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.name = "other"
    with pytest.raises(LayoutError, match="64 chips"):
        dataclasses.replace(one, mesh={"data": 4, "model": 8})


def test_files(tmp_path):
    path = tmp_path / "own.yaml"

    def refuse(text, *words):
        path.write_text(text)
        with pytest.raises(LayoutError) as caught:
            Layout.load(path)
        assert all(word in str(caught.value) for word in ("own", *words)), str(caught.value)

    refuse("", "empty")
    refuse("- v5p\n", "list", "mapping")
    refuse("mesh: {data: [\n", "not yaml", "line")
    refuse("chip: v5p\nchip: v6e\n", "'chip' stands twice", "line 2")
    refuse("rules:\n  mlp: [data]\n  mlp: [model]\n", "'mlp' stands twice", "line 3")
    path.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(LayoutError, match="not yaml"):
        Layout.load(path)
    for missing in (tmp_path / "none.yaml", tmp_path, "v5p-63"):
        with pytest.raises(LayoutError, match="v5p-64-ep64") as caught:
            Layout.load(missing)
        assert str(missing) in str(caught.value)
    path.write_text(yaml.safe_dump(without(written(), "name")))
    assert Layout.load(path) == Layout.from_dict(written(name="own"))
    path.write_text(yaml.safe_dump(Layout.from_dict(written()).to_dict(), sort_keys=False))
    assert Layout.load(path) == Layout.from_dict(written())


@pytest.mark.parametrize("name", Layout.shipped())
def test_shipped(name):
    layout = Layout.load(name)
    assert layout.name == name
    assert len(layout.why.strip().splitlines()) == 2
    assert E % layout.size(layout.experts) == 0
    assert HEADS % layout.size(layout.tensor) == 0
    assert Layout.from_dict(layout.to_dict()) == layout
    assert layout.dispatch["prefill"] == ("ragged" if layout.topology else "dense")
    assert layout.dispatch["decode"] == ("dense" if layout.chip == "cpu" else "gather")


def test_packed_axes():
    assert split("mlp") == ("mlp", 1)
    assert split("expert_mlp/32") == ("expert_mlp", 32)
    for wrong in ("mlp/", "mlp/0", "mlp/two", "mlp/-2"):
        with pytest.raises(ValueError, match=wrong):
            split(wrong)
