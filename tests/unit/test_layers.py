"""Layers against what their parts say: which weight acts where."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tolerances as tol
from flax import nnx

from k3jax.cache.state import GlobalCache
from k3jax.layers.feed_forward import LatentMoE
from k3jax.layers.global_attention import GlobalAttention
from k3jax.layers.norms import rms_norm
from k3jax.layers.params import Maker, linear
from k3jax.layers.tokens import Tokens
from k3jax.ops import routing
from k3jax.ops.grouped_matmul import experts
from sharding.parallel import SINGLE

SAME_ROWS = 1e-6  # gathered against read in place, relative to the largest; measured 2.1e-7
TOKENS = Tokens.of(jnp.broadcast_to(jnp.arange(9, dtype=jnp.int32), (2, 9)), SINGLE)


@pytest.fixture(scope="module")
def x():
    return jax.random.normal(jax.random.key(0), (2, 9, 64))


def layer(form: str, activations: str | None = None) -> LatentMoE:
    config = tiny.config()
    moe = dataclasses.replace(config.moe, expert_activations=activations)
    config = dataclasses.replace(config, moe=moe)
    return LatentMoE(config, Maker(nnx.Rngs(3), jnp.float32, 0.1), form)


def close(got, want):
    assert np.abs(got - want).max() <= tol.LAYER_FP32 * np.abs(want).max()


@pytest.mark.parametrize("form", ["mxfp4", "dense"])
def test_without_routed_experts_the_shared_ones_remain_in_full(form, x):
    moe = layer(form)
    moe.latent_up.set_value(jnp.zeros_like(moe.latent_up[...]))
    close(moe(x, TOKENS)[0], moe.shared(x, TOKENS))


@pytest.mark.parametrize(
    ("form", "activations"), [("mxfp4", None), ("dense", None), ("mxfp4", "mxfp8")]
)
def test_without_shared_experts_the_norm_of_the_sum_remains(form, activations, x):
    moe = layer(form, activations)
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
        activations=activations,
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


@pytest.mark.parametrize("form", ["mxfp4", "dense"])
def test_routing_never_changes_the_bias(form, x):
    """However uneven the load. A layer that balanced itself while it routes would change its state
    or its second answer, and an optimizer reaches what is a `nnx.Param`."""
    moe = layer(form)
    moe.router_bias.set_value(jnp.linspace(-0.01, 0.01, 28))
    moe.router.set_value(moe.router[...].at[3].set(x[0, 0]))
    before = jax.tree.map(np.array, nnx.state(moe))
    out, aux = moe(x, TOKENS)
    counts = np.bincount(aux["expert_ids"].ravel(), minlength=28)
    assert counts.max() > 3 * counts.mean()
    again, _ = moe(x, TOKENS)
    np.testing.assert_array_equal(out, again)
    jax.tree.map(np.testing.assert_array_equal, before, nnx.state(moe))
    trained = dict(nnx.to_flat_state(nnx.state(moe, nnx.Param)))
    assert ("router",) in trained
    assert ("router_bias",) not in trained


def global_layers():
    """(a layer with an indexer, the same layer without one)."""
    config = tiny.config()
    plain = dataclasses.replace(config, dsa=None)
    make = functools.partial(Maker, dtype=jnp.float32, std=0.1)
    sparse, dense = (GlobalAttention(c, make(nnx.Rngs(0))) for c in (config, plain))
    shared = [x for x in nnx.to_flat_state(nnx.state(sparse)) if x[0][0] != "indexer"]
    nnx.update(dense, nnx.from_flat_state(shared))
    return sparse, dense


@pytest.mark.parametrize("capacity", [8, 16, 17, 64])
def test_a_context_within_topk_is_dense_attention(capacity):
    """Bit for bit where the cache holds no more than topk rows; where it could hold more, another
    sum over the same rows, and nothing of it depends on the indexer."""
    sparse, dense = global_layers()
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    width, topk = sparse.config.mla.cache_width, sparse.config.dsa.topk
    rows, keys = normal(2, capacity, width), normal(2, capacity, sparse.config.dsa.head_dim)

    def run(layer, x, keys, start):
        positions = jnp.broadcast_to(start + jnp.arange(x.shape[1], dtype=jnp.int32), x.shape[:2])
        cache = GlobalCache(rows, keys if layer.config.dsa else None)
        out, cache, _ = jax.jit(layer)(x, cache, Tokens.of(positions, SINGLE))
        return np.asarray(out), np.asarray(cache.latent_BSC)

    for start, length in ((0, 7), (0, 16), (7, 1), (15, 1)):
        if start + length > min(capacity, topk):
            continue
        x = normal(2, length, sparse.config.hidden_size)
        got, want = (run(layer, x, keys, start) for layer in (sparse, dense))
        assert got[1].tobytes() == want[1].tobytes()
        if capacity <= topk:
            assert got[0].tobytes() == want[0].tobytes()
        else:
            assert np.abs(got[0] - want[0]).max() <= SAME_ROWS * np.abs(want[0]).max()
            assert got[0].tobytes() == run(sparse, x, -keys, start)[0].tobytes()


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
