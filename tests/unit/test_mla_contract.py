"""Every implementation of latent attention under one contract."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dsa_kernels import LATENTS, stacked
from mla_contract import KINDS, LatentContract, call, drawn, exact_form, where_of

from k3jax.ops.rows import Rows


@pytest.fixture(params=LATENTS.values(), ids=LATENTS.keys())
def implementation(request):
    return request.param


class TestLatent(LatentContract):
    pass


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("page", [None, 7])
def test_gradient_of_a_stack(kind, page):
    """Through a kernel, to the rows of one layer of a stack; the other layers' is zero."""
    kernel = LATENTS["stand-in"]
    q, cache, *weights = drawn(kernel, 2, 5, 63)
    view, where = stacked(Rows.of(cache), page), jnp.asarray(where_of(kind, 2, 5, 63), jnp.int32)
    view = dataclasses.replace(view, stack=jnp.nan_to_num(view.stack))

    def gradient(implementation):
        def loss(stack):
            rows = dataclasses.replace(view, stack=stack)
            return jnp.square(call(implementation, kind)(q, rows, *weights, where)).sum()

        with implementation.running():
            return np.asarray(jax.jit(jax.grad(loss))(view.stack))

    got, want = gradient(kernel), gradient(exact_form(kernel))
    assert not got[[0, 2]].any()
    assert np.abs(got - want).max() <= kernel.limit * np.abs(want).max()
    assert np.abs(want[1]).max() > 0
