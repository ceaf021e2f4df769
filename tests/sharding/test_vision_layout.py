"""Images in a prompt give the same numbers on one device and on a layout."""

import dataclasses

import jax
import numpy as np
import pytest
import spread
import tiny
import tolerances as tol
from flax import nnx

import k3jax
from k3jax.layers.vision import VisionTower
from k3jax.runtime import Model
from sharding import resolve


@pytest.mark.parametrize("name", ["dp2xtp4", "striped-heads"])
def test_features_in_a_prompt(name):
    config = tiny.config(2, (2,), dsa=False, initializer_range=0.02)
    moe = dataclasses.replace(config.moe, num_experts=56)
    mla = dataclasses.replace(config.mla, num_heads=8)
    module = tiny.module(dataclasses.replace(config, moe=moe, mla=mla))
    ids = tiny.tokens(3, 16)
    ids[0, 2:9] = ids[1, 10:16] = ids[2, 5] = config.media_token_id
    rows = np.random.default_rng(0).normal(size=(3, 16, 64)).astype(np.float32) * 0.02
    lengths = (16, 14, 9)

    def run(model, rows):
        cache = model.init_cache(3, 64)
        logits, _ = model.prefill(ids, cache, lengths, features_BTD=rows)
        return np.asarray(logits)

    want = run(Model(module), rows)
    got = run(spread.spread(module, spread.layout(name)), rows)
    assert np.abs(got - want).max() <= tol.LAYOUT_FP32 * np.abs(want).max()
    assert np.abs(run(Model(module), 2 * rows) - want).max() > 1e-3 * np.abs(want).max()


def test_the_tower_is_whole_on_every_device():
    """Its axes are known to a layout, which splits none of them."""
    layout = spread.layout("tp8")
    config = k3jax.Config.preset("kimi-k3").vision
    assert config is not None
    _, state = nnx.split(VisionTower.abstract(config))
    for leaf in jax.tree.leaves(state, is_leaf=lambda v: isinstance(v, nnx.Variable)):
        assert not any(resolve.spec(layout, leaf))
