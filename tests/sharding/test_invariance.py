"""The same numbers on one device and on any layout, in every form of expert dispatch."""

import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import spread
from dsa_kernels import LATENTS, SELECTIONS

from k3jax import programs
from k3jax.errors import InputError
from k3jax.runtime import Model
from sharding import make_mesh, report
from sharding.experts import FORMS


@functools.cache
def one_device(dsa: bool):
    module = spread.module(dsa)
    return module, spread.run(Model(module))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["dp2xtp4", "tp8", "ep8", "ep7"])
def test_layouts_of_eight(name, form):
    """A pass without a cache in the first form only: the others differ in the dispatch alone."""
    module, want = one_device(True)
    model = spread.spread(module, spread.layout(name, form))
    spread.compare(spread.run(model, forward=form == FORMS[0]), want)


@pytest.mark.parametrize("dsa", [True, False])
@pytest.mark.parametrize("name", ["striped-all", "striped-heads", "striped-batch"])
def test_striped_caches(name, dsa):
    module, want = one_device(dsa)
    spread.compare(spread.run(spread.spread(module, spread.layout(name)), forward=dsa), want)


def test_striped_caches_through_kernels():
    """Stand-ins for kernels give partial results over a device's rows as kernels do."""
    module, want = one_device(True)
    with SELECTIONS["stand-in"].counted() as selected, LATENTS["stand-in"].counted() as attended:
        model = spread.spread(module, spread.layout("striped-heads"))
        spread.compare(spread.run(model, forward=False), want)
    assert selected
    assert attended


def test_k3():
    module, want = one_device(False)
    spread.compare(spread.run(spread.spread(module, spread.layout("dp2xtp4", "ragged"))), want)


@pytest.mark.parametrize("form", ["gather", "ragged"])
def test_copies_of_busy_experts(form):
    module, want = one_device(True)
    layout = spread.layout("dp2xtp4", form, extra_experts=8)
    loads = np.random.default_rng(0).pareto(1.0, (4, 56))
    model = spread.spread_copies(module, layout, loads)
    copies = [v.get_value() for v in programs.variables(model.module) if v.shape[-1:] == (56,)]
    assert max(int(c.max()) for c in copies if c.dtype == np.int32) > 2
    spread.compare(spread.run(model, forward=form == FORMS[0]), want)


def test_loads_of_another_shape_are_refused():
    module, _ = one_device(True)
    layout = spread.layout("dp2xtp4", extra_experts=8)
    with pytest.raises(InputError, match=r"\(3, 56\): expected \(4, 56\)"):
        spread.spread_copies(module, layout, np.ones((3, 56)))


@pytest.mark.slow
def test_layouts_of_64():
    cases = [f"{name}/{form}" for name in ("dp2xep28", "dp4xtp2xep8") for form in FORMS]
    cases.append("striped-64/gather")
    done = subprocess.run(
        [sys.executable, spread.__file__, *cases], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.split() == cases


@pytest.mark.parametrize("name", ["dp2xtp4", "ep8", "striped-all", "striped-heads"])
def test_a_compiled_decode_step_communicates_what_the_plan_lists(name):
    module, _ = one_device(True)
    layout = spread.layout(name, "dense")
    mesh = make_mesh(layout)
    step, arguments = programs.abstract_step(
        module.config, layout, mesh, "decode", batch=8, context=64, dtype=jnp.float32
    )
    listed = report.collectives(jax.make_jaxpr(step)(*arguments), dict(layout.mesh))
    found = report.hlo_collectives(jax.jit(step).lower(*arguments).compile().as_text(), mesh)
    assert found
    assert report.unlisted(found, listed) == []


def test_a_donated_cache_changes_no_bit():
    module, _ = one_device(True)
    layout = spread.layout("dp2xtp4")
    placed = spread.spread(module, layout)
    kept = Model(placed.module, layout=layout, mesh=placed.mesh, donate=False)
    want, got = (spread.run(m, forward=False) for m in (kept, placed))
    assert all(np.array_equal(got[name], want[name]) for name in want)
