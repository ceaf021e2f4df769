"""Layers against what their parts say: which weight acts where."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tolerances as tol
from flax import nnx

from k3jax.layers.feed_forward import LatentMoE
from k3jax.layers.norms import rms_norm
from k3jax.layers.params import Maker, linear
from k3jax.layers.tokens import Tokens
from k3jax.ops import routing
from k3jax.ops.grouped_matmul import experts
from sharding.parallel import SINGLE

TOKENS = Tokens.of(jnp.broadcast_to(jnp.arange(9, dtype=jnp.int32), (2, 9)), SINGLE)


@pytest.fixture(scope="module")
def x():
    return jax.random.normal(jax.random.key(0), (2, 9, 64))


def layer(form: str) -> LatentMoE:
    return LatentMoE(tiny.config(), Maker(nnx.Rngs(3), jnp.float32, 0.1), form)


def close(got, want):
    assert np.abs(got - want).max() <= tol.LAYER_FP32 * np.abs(want).max()


@pytest.mark.parametrize("form", ["mxfp4", "dense"])
def test_without_routed_experts_the_shared_ones_remain_in_full(form, x):
    moe = layer(form)
    moe.latent_up.set_value(jnp.zeros_like(moe.latent_up[...]))
    close(moe(x, TOKENS)[0], moe.shared(x, TOKENS))


@pytest.mark.parametrize("form", ["mxfp4", "dense"])
def test_without_shared_experts_the_norm_of_the_sum_remains(form, x):
    moe = layer(form)
    config = moe.config
    moe.shared.down_proj.set_value(jnp.zeros_like(moe.shared.down_proj[...]))
    rows = x.reshape(-1, 64)
    ids, weights = routing.route(rows, moe.router[...], moe.router_bias[...], 4)
    total = experts(
        linear(rows, moe.latent_down),
        ids,
        weights,
        moe._weights("w13"),
        moe._weights("w2"),
        situ_beta=config.situ_beta,
        situ_linear_beta=config.situ_linear_beta,
    )
    normed = rms_norm(total, moe.latent_norm[...], config.rms_norm_eps)
    close(moe(x, TOKENS)[0].reshape(-1, 64), linear(normed, moe.latent_up))


def test_the_bias_chooses_and_does_not_weigh(x):
    """A constant added to every bias changes no bit; the norm hides the scale of the weights."""
    moe = layer("mxfp4")
    before, aux = moe(x, TOKENS)
    moe.router_bias.set_value(moe.router_bias[...] + 1.0)
    after, other = moe(x, TOKENS)
    assert np.array_equal(aux["expert_ids"], other["expert_ids"])
    assert np.array_equal(before, after)


def test_each_global_layer_has_an_indexer_of_its_own():
    """An indexer of zeros ties every score, so its layer takes the lowest positions; the layers
    before it keep their selections to the last one."""
    module = tiny.module(tiny.config())
    ids = tiny.tokens(1, 40)
    topk = module.config.dsa.topk
    graphdef, state = nnx.split(module)

    @jax.jit
    def run(state):
        return nnx.merge(graphdef, state)(ids, collect=("index",))[1]["selected"][:, 0]

    normal = np.asarray(run(state))
    lowest = np.where(np.arange(topk) <= np.arange(40)[:, None], np.arange(topk), -1)
    assert len(normal) == 2
    assert not np.array_equal(normal[0], lowest)
    for zeroed in (0, 1):
        group, i, period = module.config.schedule.locate([2, 4][zeroed])
        changed = nnx.clone(module)
        weight = getattr(changed, group)[i].attention.indexer.weights_proj
        weight.set_value(weight[...].at[period].set(0.0))
        selected = np.asarray(run(nnx.split(changed)[1]))
        assert np.array_equal(selected[zeroed], lowest)
        assert np.array_equal(selected[:zeroed], normal[:zeroed])
