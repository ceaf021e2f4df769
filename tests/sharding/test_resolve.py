"""Specs, shards, bytes, refusals and the table, on the arrays of real and small models."""

import dataclasses

import golden_layouts
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.sharding import PartitionSpec as P
from test_layout import free, written

from k3jax.config import Config
from k3jax.model import Transformer
from sharding import Layout, LayoutError, abstract_mesh, make_mesh, resolve
from sharding.resolve import Leaf

BASE = Layout.from_dict(written())
CPU = Layout.load("cpu-8")
LATENT = ("batch", "cache_sequence", "kv_cache")


def leaf(shape, *axes, dtype=jnp.bfloat16):
    return Leaf(shape, dtype, axes)


@pytest.mark.parametrize(
    ("shape", "axes", "spec", "local"),
    [
        ((12288, 7168), ("heads", "embed"), P("model", None), (1536, 7168)),
        ((22, 7168, 12288), ("layers", "embed", "heads"), P(None, None, "model"), (22, 7168, 1536)),
        ((896, 6144, 112), ("experts", "expert_mlp2", "expert_latent/32"),
         P(("data", "model"), None, None), (14, 6144, 112)),
        ((64, 96, 128, 128), ("batch", "head_count", "head_dim", "head_dim"),
         P("data", "model", None, None), (8, 12, 128, 128)),
        ((3, 64, 3, 12288), ("qkv", "batch", "conv", "heads"), P(None, "data", None, "model"),
         (3, 8, 3, 1536)),
        ((7168,), ("embed",), P(None), (7168,)),
        ((), (), P(), ()),
    ],
)  # fmt: skip
def test_spec_and_local_shape(shape, axes, spec, local):
    assert resolve.spec(BASE, Leaf(shape, jnp.bfloat16, axes)) == spec
    assert resolve.local_shape(BASE, Leaf(shape, jnp.bfloat16, axes)) == local


@pytest.mark.parametrize(
    ("stripes", "spec", "local"),
    [
        ([], P("data", None, None), (8, 1024, 576)),
        (["model"], P("data", "model", None), (8, 128, 576)),
        (["data"], P(None, "data", None), (64, 128, 576)),
        (["data", "model"], P(None, ("data", "model"), None), (64, 16, 576)),
    ],
)
def test_stripes_take_the_batch_axes(stripes, spec, local):
    layout = Layout.from_dict(written(rules={"cache_sequence": stripes}))
    latent = leaf((64, 1024, 576), *LATENT)
    assert resolve.spec(layout, latent) == spec
    assert resolve.local_shape(layout, latent) == local
    assert resolve.spec(layout, leaf((64,), "batch")) == P("data")


def test_weights_stored_split():
    layout = Layout.from_dict(written(rules={"embed": ["data"]}))
    assert resolve.spec(layout, leaf((12288, 7168), "heads", "embed")) == P("model", "data")


def test_bytes_are_what_devices_hold():
    """Every parameter and cache of nano, placed on eight devices."""
    mesh = make_mesh(CPU)
    leaves = {
        **golden_layouts.parameters("nano"),
        **golden_layouts.caches("nano", 4, 64),
    }
    resolve.check(CPU, leaves)
    split = 0
    for name, one in leaves.items():
        array = jax.device_put(np.zeros(one.shape, one.dtype), resolve.sharding(mesh, CPU, one))
        for shard in array.addressable_shards:
            assert shard.data.nbytes == resolve.bytes_per_device(CPU, one), name
            assert shard.data.shape == resolve.local_shape(CPU, one), name
        split += not array.sharding.is_fully_replicated
    assert split > 100


def test_a_sharding_needs_no_devices():
    sharding = resolve.sharding(abstract_mesh(BASE), BASE, leaf((12288, 7168), "heads", "embed"))
    assert sharding.shard_shape((12288, 7168)) == (1536, 7168)


DIVISORS = [1, 2, 4, 7, 8, 14, 16, 28, 32, 56, 64, 112, 128, 224, 448, 896]


def experts_over(n):
    return Layout.from_dict(
        free({"data": n}, batch=["data"], experts=["data"],
             **dict.fromkeys(("heads", "head_count", "mlp", "shared_mlp", "vocab"), ()))
    )  # fmt: skip


@pytest.mark.parametrize("n", DIVISORS)
def test_every_whole_number_of_experts(n):
    leaves = golden_layouts.parameters("kimi-k3.1-pro")
    resolve.check(experts_over(n), leaves)
    w2 = leaves["period.0.ffn.w2_codes"]
    assert resolve.local_shape(experts_over(n), w2) == (22, 896 // n, 3584, 1536)


@pytest.mark.parametrize("n", [n for n in range(1, 64) if n not in DIVISORS] + [256, 512, 1792])
def test_no_part_of_an_expert(n):
    leaves = golden_layouts.parameters("kimi-k3.1-pro")
    with pytest.raises(LayoutError) as caught:
        resolve.check(experts_over(n), {"w": leaves["period.0.ffn.w2_codes"]})
    assert f"w: axis 'experts' of size 896 is not divisible by data {n} = {n}" in str(caught.value)


def test_extra_experts_count():
    leaves = {"w": leaf((896, 6144, 1792), "experts", "expert_mlp2", "expert_latent/2")}
    leaves["n"] = leaf((7168,), "embed")
    layout = dataclasses.replace(experts_over(60), extra_experts=4)
    with pytest.raises(LayoutError, match="896"):
        resolve.check(layout, leaves)
    stored = resolve.stored(layout, leaves)
    resolve.check(layout, stored)
    assert resolve.local_shape(layout, stored["w"]) == (15, 6144, 1792)
    assert stored["n"] is leaves["n"]


@pytest.mark.parametrize(
    ("one", "words"),
    [
        (leaf((12, 64), "batch", "embed"), ["'batch'", "size 12", "data 8 = 8"]),
        (leaf((12288, 7168), "hedas", "embed"), ["unknown logical axis 'hedas'"]),
        (leaf((12288,), "heads", "embed"), ["do not name", "(12288,)"]),
        (leaf((64, 64), "heads", "mlp"), ["'model'", "'heads'", "'mlp'"]),
        (leaf((64, 8), "mlp/x", "embed"), ["'mlp/x'"]),
        (leaf((64, 12), "embed", "mlp/32"), ["size 12", "12 groups of 32", "model 8 = 8"]),
        # 192 bytes divide by 8, their 12 groups do not.
        (leaf((64, 192), "embed", "mlp/2"), ["size 192", "12 groups of 32", "cut"]),
        (leaf((64, 136), "embed", "mlp/2"), ["size 136", "8 groups", "cut"]),
    ],
)  # fmt: skip
def test_refusals_name_the_array(one, words):
    with pytest.raises(LayoutError) as caught:
        resolve.check(BASE, {"a.b": one})
    for word in ["layout mine", "a.b: ", *words]:
        assert word in str(caught.value)
    if "groups" not in str(words) and "size 12" not in words:
        with pytest.raises(LayoutError):
            resolve.spec(BASE, one)
    with pytest.raises(LayoutError):
        resolve.local_shape(BASE, one)


def test_whole_groups_are_accepted():
    resolve.check(BASE, {"codes": leaf((1056 * 16,), "mlp/2"), "scales": leaf((1056,), "mlp/32")})


def test_heads_stay_whole():
    """12,288 columns divide by 64 and by 512, 96 heads do not."""
    heads = {n: ["model"] for n in ("heads", "head_count")}
    rest = dict.fromkeys(("mlp", "shared_mlp", "vocab"), ())
    layout = Layout.from_dict(free({"data": 1, "model": 64}, **heads, **rest))
    q = leaf((12288, 7168), "heads", "embed")
    resolve.check(layout, {"q": q})
    beta = leaf((96, 7168), "head_count", "embed")
    with pytest.raises(LayoutError, match="96 heads: model 64 = 64 devices would cut through"):
        resolve.check(layout, {"q": q, "beta": beta})
    with pytest.raises(LayoutError, match="96 heads"):
        resolve.check(layout, {"q": q}, heads=[96])


def test_heads_that_no_array_counts():
    """Six heads of global attention beside eight of KDA: their columns divide by 4, not they."""
    config = tiny.config()
    leaves = _named(config)
    numbers = (config.kda.num_heads, config.mla.num_heads)
    layout = dataclasses.replace(
        CPU, rules=dict(CPU.rules) | {"experts": ("model",)}, mesh={"data": 2, "model": 4}
    )
    resolve.check(layout, leaves)
    with pytest.raises(LayoutError, match="6 heads: model 4 = 4") as caught:
        resolve.check(layout, leaves, heads=numbers)
    assert len(caught.value.problems) == 1


def _named(config):
    return resolve.named(Transformer.abstract(config))


def test_all_problems_at_once():
    leaves = {"a": leaf((9,), "mlp"), "b": leaf((9,), "batch"), "c": leaf((8,), "batch")}
    with pytest.raises(LayoutError) as caught:
        resolve.check(BASE, leaves)
    assert [p[0] for p in caught.value.problems] == ["a", "b"]


def test_layers_with_the_same_problem_stand_in_one_line():
    layout = Layout.from_dict(free({"data": 8, "model": 5}))
    with pytest.raises(LayoutError) as caught:
        resolve.check(layout, golden_layouts.parameters("kimi-k3"))
    assert len(caught.value.problems) < 40
    line = next(p for p in caught.value.problems if "attention.q_proj" in p)
    assert line == (
        "head.0.attention.q_proj and 5 like it: "
        "axis 'heads' of size 12288 is not divisible by model 5 = 5"
    )


def test_arrays_without_axes():
    with pytest.raises(LayoutError, match=r"a: axes \(\) do not name the dimensions of \(2,\)"):
        resolve.explain(BASE, {"a": np.zeros(2)})


def test_explain():
    leaves = {
        "head.0.attention.q_proj": leaf((12288, 7168), "heads", "embed"),
        "period.0.attention.q_proj": leaf((22, 12288, 7168), "layers", "heads", "embed"),
        "head.1.ffn.w2_scales": leaf(
            (896, 3584, 96), "experts", "expert_latent", "expert_mlp/32", dtype=jnp.uint8
        ),
        "final_norm": leaf((7168,), "embed"),
    }
    lines = [" ".join(line.split()) for line in resolve.explain(BASE, leaves).splitlines()]
    assert lines == [
        "mine: 64 devices (data 8 x model 8) of v5p",
        "attention.q_proj[heads_model, embed] 23 x bfloat16 12288x7168 -> 1536x7168 506.46 MB",
        "ffn.w2_scales[experts_{data,model}, expert_latent, expert_mlp/32] 1 x uint8 "
        "896x3584x96 -> 14x3584x96 4.82 MB",
        "final_norm[embed] 1 x bfloat16 7168 0.01 MB",
        "511.29 MB a device",
    ]
    with pytest.raises(LayoutError, match="x: unknown"):
        resolve.explain(BASE, {"x": leaf((8,), "hedas")})
    assert resolve.explain(BASE, {}).endswith("\n0.00 MB a device")


def test_explain_a_model():
    """93 layers in a page; a module, its state's leaves and a handle read the same."""
    module = Transformer.abstract(Config.preset("kimi-k3"))
    text = Layout.load("v5p-64-ep64").explain(module)
    assert len(text.splitlines()) < 60
    row = next(line for line in text.splitlines() if line.startswith("ffn.w13_codes"))
    assert " 92 x " in row
    assert "experts_{data,model}" in row

    class Handle:
        pass

    handle = Handle()
    handle.module = module
    assert Layout.load("v5p-64-ep64").explain(handle) == text
    assert BASE.explain({"a": {"b": leaf((8,), "embed")}}).splitlines()[1].startswith("a.b[embed]")
