"""The same numbers on one device and on any layout, in every form of expert dispatch."""

import functools
import subprocess
import sys

import pytest
import spread

from k3jax.runtime import Model
from sharding.experts import FORMS


@functools.cache
def one_device(dsa: bool):
    module = spread.module(dsa)
    return module, spread.run(Model(module))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["dp2xtp4", "tp8", "ep8", "ep7"])
def test_layouts_of_eight(name, form):
    module, want = one_device(True)
    spread.compare(spread.run(spread.spread(module, spread.layout(name, form))), want)


@pytest.mark.parametrize("dsa", [True, False])
@pytest.mark.parametrize("name", ["striped-all", "striped-heads", "striped-batch"])
def test_striped_caches(name, dsa):
    module, want = one_device(dsa)
    spread.compare(spread.run(spread.spread(module, spread.layout(name))), want)


def test_k3():
    module, want = one_device(False)
    spread.compare(spread.run(spread.spread(module, spread.layout("dp2xtp4", "ragged"))), want)


@pytest.mark.slow
def test_layouts_of_64():
    cases = [f"{name}/{form}" for name in ("dp2xep28", "dp4xtp2xep8") for form in FORMS]
    cases.append("striped-64/gather")
    done = subprocess.run(
        [sys.executable, spread.__file__, *cases], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.split() == cases
