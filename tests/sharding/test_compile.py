"""Compilation for TPU topologies without a TPU, on a program small enough to take a second."""

import importlib.util
import os

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from sharding import Layout, LayoutError
from sharding import collectives as c
from sharding.compile import ENVIRONMENT, compile_step, topology_mesh
from sharding.report import collectives, unlisted


@pytest.fixture(scope="module")
def mesh():
    pytest.importorskip("libtpu", reason="needs the extra aot, whose wheel is for Linux")
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    return topology_mesh(Layout.load("v5p-64-ep64"))


def step(mesh):
    both = ("data", "model")

    def body(x_ND, w_DF, cache_BS):
        with jax.named_scope("kda"):
            y = c.all_gather(x_ND, ("model",), 0) @ w_DF
            y = c.reduce_scatter(y, ("model",), 0)
        with jax.named_scope("experts"):
            y = c.all_to_all(c.all_to_all(y, both, 1, 0), both, 0, 1)
            y = c.reduce_scatter(c.all_gather(y, both, 0) * 2, both, 0)
        return y, cache_BS + 1

    token = P(both)
    return jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(token, P(), token),
        out_specs=(token, token),
        check_vma=False,
    )


def arguments(mesh):
    def array(shape, dtype, spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    token = P(("data", "model"))
    return (
        array((512, 1024), jnp.bfloat16, token),
        array((1024, 1024), jnp.bfloat16, P()),
        array((64, 2**20), jnp.float32, token),
    )


def test_what_the_compiler_says(mesh):
    args = arguments(mesh)
    compiled = compile_step(step(mesh), args, mesh, state=2)
    # 8 tokens, the weight, and the cache, which is updated in place.
    cache = 4 * 2**20
    assert compiled.argument_bytes == pytest.approx(2 * 8 * 1024 + 2 * 1024**2 + cache, rel=0.01)
    assert compiled.alias_bytes == pytest.approx(cache, rel=0.01)
    assert compiled.temporary_bytes < 8e6
    assert compiled.total_bytes < compiled.argument_bytes + 20e6
    assert compiled.seconds > 0
    assert compiled.host_peak_bytes > 50e6
    found = list(compiled.collectives)
    assert {f.axes for f in found} == {("model",), ("data", "model")}
    assert unlisted(found, collectives(jax.make_jaxpr(step(mesh))(*args))) == []
    assert all(f.bytes < cache for f in found)


def test_a_cache_of_uneven_rows_is_not_copied(mesh):
    """Rows of 576 take 640 values, and a row is written in place."""
    spec = P("data")

    def write(row_BC, cache_BSC):
        return row_BC * 2, cache_BSC.at[:, 7].set(row_BC)

    args = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape in ((64, 576), (64, 4096, 576))
    ]
    compiled = compile_step(write, args, mesh, state=1)
    assert compiled.alias_bytes == 8 * 4096 * 640 * 2
    assert compiled.temporary_bytes < 1e6


def test_a_step_that_does_not_fit_is_refused(mesh):
    shape = jax.ShapeDtypeStruct(
        (64 * 2**36,), jnp.float32, sharding=NamedSharding(mesh, P(("data", "model")))
    )
    with pytest.raises(LayoutError, match="does not fit"):
        compile_step(lambda x: x + 1, (shape,), mesh)


def test_layouts_that_cannot_be_compiled(monkeypatch):
    with pytest.raises(LayoutError, match=r"layout b200-64: .*\n.*chip 'b200' has no TPU topology"):
        topology_mesh(Layout.load("b200-64"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(LayoutError, match=r"needs libtpu: pip install 'k3jax\[aot\]'"):
        topology_mesh(Layout.load("v5p-64-ep64"))


def test_a_scan_over_weights_copies_none_on_tpu7x(mesh):
    """``mesh`` has loaded libtpu."""
    mesh = topology_mesh(Layout.load("tpu7x-64-ep128"))

    def step(x_ND, w_LDD):
        return jax.lax.scan(lambda x, w: (x @ w, None), x_ND, w_LDD)[0]

    whole = NamedSharding(mesh, P())
    args = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=whole)
        for shape in ((8, 7168), (22, 7168, 7168))
    ]
    assert compile_step(step, args, mesh).temporary_bytes < 1e8
