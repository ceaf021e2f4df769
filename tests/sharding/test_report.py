"""Collectives read off a jaxpr, and off compiled HLO."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from sharding import collectives as c
from sharding.report import Collective, collectives, hlo_collectives, unlisted

SIZES = {"data": 2, "model": 4}
ABSTRACT = AbstractMesh((2, 4), ("data", "model"))


def shapes(mesh, *parts):
    return [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for shape, dtype, spec in parts
    ]


def step(mesh):
    """All kinds; the inner scan communicates three times."""

    def body(x, y):
        with jax.named_scope("kda"):
            x = c.all_gather(x, ("model",), 0)
            x = jax.jit(lambda x: c.reduce_scatter(x, ("model",), 0))(x)
        with jax.named_scope("experts"):
            z = c.all_to_all(x, ("data", "model"), 0, 1)
            with jax.named_scope("latent"):
                z = jax.checkpoint(lambda z: c.all_reduce(z, ("data",)))(z)

            def again(z, _):
                return c.all_reduce(z * 0.5, ("model", "data")), None

            z, _ = lax.scan(again, z, None, length=3)
        y = lax.ppermute(y, "model", [(i, (i + 1) % 4) for i in range(4)])
        return z, c.all_max(y, ("data",))

    spec = P(("data", "model"))
    return jax.shard_map(
        body, mesh=mesh, in_specs=(spec, spec), out_specs=(spec, spec), check_vma=False
    )


def operands(mesh):
    spec = P(("data", "model"))
    return shapes(mesh, ((64, 16), jnp.bfloat16, spec), ((8,), jnp.float32, spec))


def test_collectives_of_a_jaxpr():
    found = collectives(jax.make_jaxpr(step(ABSTRACT))(*operands(ABSTRACT)))
    seen = [(f.component, f.kind, f.axes, f.ranks, f.shape, f.times, f.bytes_sent) for f in found]
    assert seen == [
        # 32 x 16 bfloat16 gathered: 1,024 bytes, 3/4 of them sent.
        ("kda", "all-gather", ("model",), 4, (8, 16), 1, 768),
        ("kda", "reduce-scatter", ("model",), 4, (32, 16), 1, 768),
        ("experts", "all-to-all", ("data", "model"), 8, (8, 16), 1, 256 * 7 // 8),
        ("latent", "all-reduce", ("data",), 2, (1, 128), 1, 2 * 256 // 2),
        ("experts", "all-reduce", ("model", "data"), 8, (1, 128), 3, 2 * 256 * 7 // 8),
        ("other", "permute", ("model",), 4, (1,), 1, 4),
        ("other", "all-reduce-max", ("data",), 2, (1,), 1, 4),
    ]
    assert all(f.exact for f in found)
    assert found[4].total_bytes == 3 * found[4].bytes_sent


def test_equal_collectives_add_up_and_single_devices_do_not_communicate():
    def body(x):
        with jax.named_scope("depth"):
            for _ in range(5):
                x = c.all_reduce(x, ("model",))
        return c.all_reduce(x, ("one",))

    mesh = AbstractMesh((1, 4), ("one", "model"))
    traced = jax.make_jaxpr(
        jax.shard_map(body, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    )
    (found,) = collectives(traced(jnp.zeros((3,), jnp.float32)))
    assert (found.component, found.times, found.axes) == ("depth", 5, ("model",))


def test_branches_and_ragged_exchanges_are_worst_cases():
    def body(x, sizes):
        x = lax.cond(sizes[0] > 0, lambda x: lax.psum(x, "model"), lambda x: x, x)
        out = jnp.zeros((4 * x.shape[0], x.shape[1]), x.dtype)
        return lax.ragged_all_to_all(x, out, sizes, sizes, sizes, sizes, axis_name="model")

    mapped = jax.shard_map(body, mesh=ABSTRACT, in_specs=(P(), P()), out_specs=P(), check_vma=False)
    one, two = collectives(
        jax.make_jaxpr(mapped)(jnp.zeros((8, 16), jnp.bfloat16), jnp.zeros((4,), jnp.int32))
    )
    assert (one.kind, one.exact) == ("all-reduce", False)
    assert (two.kind, two.exact, two.bytes_sent) == ("ragged-all-to-all", False, 256)
    assert two.result == (32, 16)


def test_the_gradient_of_a_collective_keeps_its_component():
    def loss(x):
        with jax.named_scope("kda"):
            return jnp.sum(c.all_gather(x, ("model",), 0) ** 2)

    mapped = jax.shard_map(
        jax.grad(loss), mesh=ABSTRACT, in_specs=P("model"), out_specs=P("model"), check_vma=False
    )
    args = shapes(ABSTRACT, ((8, 4), jnp.float32, P("model")))
    found = collectives(jax.make_jaxpr(mapped)(*args))
    assert {(f.component, f.kind) for f in found} == {
        ("kda", "all-gather"),
        ("kda", "reduce-scatter"),
    }


def test_every_collective_of_a_compiled_program_is_listed():
    mesh = jax.make_mesh((2, 4), ("data", "model"))
    args = operands(mesh)
    listed = collectives(jax.make_jaxpr(step(mesh))(*args))
    found = hlo_collectives(jax.jit(step(mesh)).lower(*args).compile().as_text(), mesh)
    assert {(f.kind, f.axes) for f in found} >= {
        ("all-gather", ("model",)),
        ("reduce-scatter", ("model",)),
        ("all-to-all", ("data", "model")),
        ("all-reduce", ("data",)),
        ("collective-permute", ("model",)),
    }
    assert unlisted(found, listed) == []
    without = [f for f in listed if f.component != "kda"]
    assert {f.kind for f in unlisted(found, without)} == {"all-gather", "reduce-scatter"}


def test_an_all_gather_that_xla_inserts_is_found():
    """The compiler gathers a whole cache where shardings disagree; the jaxpr does not know."""
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    (cache,) = shapes(mesh, ((64, 32), jnp.float32, P("model")))
    gather = jax.jit(lambda x: x * 2, out_shardings=NamedSharding(mesh, P()))
    (found,) = hlo_collectives(gather.lower(cache).compile().as_text(), mesh)
    assert (found.kind, found.axes, found.bytes) == ("all-gather", ("model",), 64 * 32 * 4)
    assert unlisted([found], []) == [found]


LINE = '%r = {type} {op}(%p), channel_id=1, {groups}, metadata={{op_name="jit(f)/kda/x"}}'


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ("replica_groups={{0,1,2,3},{4,5,6,7}}", ("model",)),
        ("replica_groups={{0,4},{1,5},{2,6},{3,7}}", ("data",)),
        ("replica_groups={{4,0},{5,1},{6,2},{7,3}}", ("data",)),  # another order of members
        ("replica_groups={}", ("data", "model")),
        ("replica_groups=[2,4]<=[8]", ("model",)),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", ("data",)),
        ("replica_groups=[1,8]<=[8]", ("data", "model")),
        ("replica_groups=mesh['data'=2,'model'=4] {'model'}", ("model",)),
        ("replica_groups=mesh['data'=2,'model'=4] {'model','data'}", ("data", "model")),
        ("replica_groups=mesh['x'=8] {'x':(1)2}", ("data",)),
        ("replica_groups=mesh['x'=8] {'x':(2)4}", ("model",)),
        ("replica_groups=[4,2]<=[8]", None),  # halves of "model"
        ("source_target_pairs={{0,4},{4,0},{1,5}}", ("data",)),
        ("source_target_pairs={{0,1},{5,6}}", ("model",)),
        ("source_target_pairs={{0,5}}", ("data", "model")),
    ],
)
def test_groups_of_devices_become_axes(groups, axes):
    op = "collective-permute" if "pairs" in groups else "all-reduce"
    (found,) = hlo_collectives(LINE.format(type="f32[8]{0}", op=op, groups=groups), ABSTRACT)
    assert (found.kind, found.axes, found.op_name) == (op, axes, "jit(f)/kda/x")


def test_a_notation_that_is_not_known_is_refused():
    text = LINE.format(type="f32[8]{0}", op="all-reduce", groups="replica_groups=v9<0:8>")
    with pytest.raises(ValueError, match="unknown notation"):
        hlo_collectives(text, ABSTRACT)


@pytest.mark.parametrize(
    ("op", "type", "results"),
    [
        ("all-gather", "bf16[256,64]{1,0:T(8,128)(2,1)}", [("bf16", (256, 64))]),
        (
            "all-gather-start",
            "(bf16[64,64]{1,0:T(8,128)(2,1)}, bf16[256,64]{1,0:T(8,128)(2,1)S(1)})",
            [("bf16", (256, 64))],
        ),
        (
            "all-gather-start",
            "((f32[2]{0}, u8[3]{0}), (f32[8]{0}, u8[12]{0}))",
            [("f32", (8,)), ("u8", (12,))],
        ),
        ("all-reduce", "(f32[8]{0}, bf16[]{:T(256)})", [("f32", (8,)), ("bf16", ())]),
        ("all-reduce-start", "f32[8]{0}", [("f32", (8,))]),
        ("all-to-all", "(s8[2,4]{1,0}, s8[2,4]{1,0})", [("s8", (2, 4))] * 2),
        (
            "collective-permute-start",
            "(f8e4m3fn[8]{0}, f8e4m3fn[8]{0}, u32[]{:S(2)}, u32[]{:S(2)})",
            [("f8e4m3fn", (8,))],
        ),
        ("ragged-all-to-all", "bf16[64,8]{1,0}", [("bf16", (64, 8))]),
        (
            "ragged-all-to-all-start",
            "((bf16[16,8]{1,0}, bf16[64,8]{1,0}, s32[4]{0}, s32[4]{0}), bf16[64,8]{1,0})",
            [("bf16", (64, 8))],
        ),
    ],
)
def test_results_of_an_instruction(op, type, results):
    text = LINE.format(type=type, op=op, groups="replica_groups=[2,4]<=[8]")
    done = "%d = f32[8]{0} all-gather-done(%r)\n%f = f32[8] fusion(%all-gather), calls=%all-to-all"
    (found,) = hlo_collectives(f"{text}\n{done}", ABSTRACT)
    assert found.results == tuple(results)
    assert found.kind == op.removesuffix("-start")


def test_bytes_and_the_fused_reduce_scatter_of_a_tpu():
    inner = LINE.format(
        type="bf16[256,64]{1,0}", op="all-reduce", groups="replica_groups=[2,4]<=[8]"
    )
    text = f"%all-reduce-scatter.3 (input: bf16[256,64]) -> bf16[64,64] {{\n  {inner}\n}}\n"
    (found,) = hlo_collectives(text, ABSTRACT)
    assert (found.kind, found.bytes) == ("reduce-scatter", 256 * 64 * 2)


def test_what_a_tpu_makes_of_a_reduce_scatter():
    """Parts of 512 rows are padded to 520, the overhang is passed on; gathers must match."""
    groups = "replica_groups=[2,4]<=[8]"

    def one(op, type, groups=groups):
        return hlo_collectives(LINE.format(type=type, op=op, groups=groups), ABSTRACT)[0]

    listed = [
        Collective("kda", "reduce-scatter", ("model",), 4, (2048, 7), (512, 7), "float32", 1, 0)
    ]
    scatter = one("reduce-scatter", "f32[2080,7]{1,0}")
    permute = one("collective-permute", "f32[24,7]{1,0}", "source_target_pairs={{0,1},{5,6}}")
    assert unlisted([scatter, permute], listed) == []
    larger = one("reduce-scatter", "f32[4096,7]{1,0}")
    elsewhere = one("reduce-scatter", "f32[2080,7]{1,0}", "replica_groups=[4,2]<=[2,4]T(1,0)")
    gather = one("all-gather", "f32[2048,7]{1,0}")
    assert unlisted([larger, elsewhere, gather], listed) == [larger, elsewhere, gather]
