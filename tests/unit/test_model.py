"""The decoder as a whole: schedules, padding, caches, buckets, gradients."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tolerances as tol
from flax import nnx

from k3jax.cache.state import empty
from k3jax.errors import InputError
from k3jax.layers.norms import rms_norm
from k3jax.layers.tokens import Tokens
from k3jax.model import positions
from k3jax.ops.attention_residuals import reference
from k3jax.runtime import Model, bucket
from sharding.parallel import SINGLE


def model(dsa: bool = True) -> Model:
    return _model(dsa)


@functools.cache  # `f()` and `f(True)` would be two entries, and every program compiled twice
def _model(dsa: bool) -> Model:
    return Model(tiny.module(tiny.config(dsa=dsa)))


def relative(got, want) -> float:
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert np.isfinite(got).all()
    return float(np.abs(got - want).max() / np.abs(want).max())


@nnx.jit
def attend(layer, x, tokens):
    return layer.attention(x, None, tokens)[0]


@nnx.jit
def feed_forward(layer, x, tokens):
    y = layer.ffn(x, tokens)
    return y if layer.spec.ffn == "dense" else y[0]


def by_the_rules(module, ids):
    """Layers one by one with the depth mix written from the rules, float64 for the mixes."""
    config = module.config
    x = module.embed_tokens(ids)
    where = positions(jnp.zeros((1,), jnp.int32), ids.shape[1], None)
    layers = [tiny.layer_module(module, i) for i in range(config.num_layers)]

    def mix(read, sources):
        norm, query = (np.asarray(a[...], np.float64) for a in (read.norm, read.query))
        stacked = np.stack([np.asarray(s, np.float64) for s in sources])[:, 0]
        rows = [
            reference.mix_token(stacked[:, t], norm, query, config.rms_norm_eps)
            for t in range(stacked.shape[1])
        ]
        return jnp.asarray(np.stack(rows)[None], jnp.float32)

    def norm(x, weight):
        eps, cast = config.rms_norm_eps, config.norm_weight_after_cast
        return rms_norm(x, weight[...], eps, weight_after_cast=cast)

    bank, partial, tokens = [], x, Tokens.of(where, SINGLE)
    for i, layer in enumerate(layers):
        read = mix(layer.attention_res, [*bank, partial]) if bank else partial
        if i % config.attn_res_block_size == 0:
            bank.append(partial)
            partial = None
        normed = norm(read, layer.input_norm)
        a = attend(layer, normed, tokens)
        partial = a if partial is None else partial + a
        normed = norm(mix(layer.ffn_res, [*bank, partial]), layer.post_attention_norm)
        partial = partial + feed_forward(layer, normed, tokens)
    return module.logits(norm(mix(module.output_res, [*bank, partial]), module.final_norm))


@pytest.mark.parametrize(
    ("num_layers", "global_layers", "block"),
    [
        (1, (), 4),
        (5, (4, 5), 4),
        (9, (4, 8, 9), 4),
        (13, (4, 8, 12, 13), 3),
        (7, (2, 3, 7), 5),  # no period that repeats
        (12, (2, 4, 6, 8, 10, 12), 5),  # a period of two
    ],
)
def test_any_schedule_and_block_size(num_layers, global_layers, block):
    """The scanned model equals its layers run one by one over plain lists."""
    config = tiny.config(num_layers, global_layers, block=block)
    module = tiny.module(config)
    ids = tiny.tokens(1, 21)
    assert config.num_blocks == -(-num_layers // block)
    got = nnx.jit(lambda m, ids: m(ids))(module, ids)
    assert relative(got, by_the_rules(module, ids)) <= tol.MODEL_FP32


@pytest.mark.parametrize("dsa", [False, True])
def test_rows_of_unequal_length_equal_their_solo_runs(dsa):
    m, lengths = model(dsa), np.array([1, 30, 17, 2], np.int32)
    ids = tiny.tokens(4, 30)
    logits, cache = m.prefill(ids, m.init_cache(4, 60), lengths)
    step = tiny.tokens(1, 4, seed=3)[0]
    after, cache = m.decode(step, cache)
    assert cache.lengths_B.tolist() == (lengths + 1).tolist()
    for b, n in enumerate(lengths):
        solo, one = m.prefill(ids[b : b + 1, :n], m.init_cache(1, 60))
        assert relative(logits[b], solo[0]) <= tol.MODEL_FP32
        solo, _ = m.decode(step[b : b + 1], one)
        assert relative(after[b], solo[0]) <= tol.MODEL_FP32


@pytest.mark.parametrize("dsa", [False, True])
def test_padding_changes_nothing(dsa):
    """Whatever stands after a row's length, its logits and final state are the same bits."""
    module = model(dsa).module
    lengths = jnp.array([5, 23, 1], jnp.int32)
    clean = module.embed_tokens(tiny.tokens(3, 32))
    pad = (jnp.arange(32) >= lengths[:, None])[..., None]
    noise = 50 * jax.random.normal(jax.random.key(5), clean.shape)

    @jax.jit
    def run(x):
        cache = empty(module.config, 3, 64, jnp.float32)
        where = positions(cache.lengths_B, 32, lengths)
        depth, cache, _ = module.backbone(x, where, cache)
        return module.logits(module.final_hidden(depth)), cache

    logits, cache = run(jnp.where(pad, 0.0, clean))
    valid = ~np.asarray(pad[..., 0])
    assert np.isfinite(np.asarray(logits)[valid]).all()
    for junk in (noise, jnp.nan):
        dirty_logits, dirty_cache = run(jnp.where(pad, junk, clean))
        assert np.array_equal(np.asarray(logits)[valid], np.asarray(dirty_logits)[valid])
        for a, b in zip(jax.tree.leaves(cache), jax.tree.leaves(dirty_cache), strict=True):
            assert np.array_equal(a, b)


def test_unused_cache_rows_may_hold_anything():
    """Caches filled with 0, 0x3e bytes and NaN before the first token give the same bits."""
    m = model()
    ids = tiny.tokens(2, 20)
    results = []
    for fill in (0.0, float(np.frombuffer(b"\x3e" * 4, np.float32)[0]), np.nan):
        cache = m.init_cache(2, 60)
        arrays = cache.arrays

        def stain(c, fill=fill):
            if not hasattr(c, "latent_BSC"):
                return c
            return jax.tree.map(lambda a: jnp.full_like(a, fill), c)

        stained = type(arrays)(
            arrays.lengths_B,
            *(tuple(stain(c) for c in g) for g in (arrays.head, arrays.period, arrays.tail)),
        )
        cache._arrays = stained
        logits, cache = m.prefill(ids, cache, [20, 7])
        steps = [logits]
        for t in range(4):
            logits, cache = m.decode(tiny.tokens(1, 2, seed=t)[0], cache)
            steps.append(logits)
        results.append(np.stack(steps))
    assert np.isfinite(results[0]).all()
    assert np.array_equal(results[0], results[1])
    assert np.array_equal(results[0], results[2])


def test_donation_changes_no_bits_and_a_used_cache_is_refused():
    ids = tiny.tokens(2, 18)
    rows = []
    for m in (model(), Model(model().module, donate=False)):
        first = m.init_cache(2, 40)
        logits, cache = m.prefill(ids, first)
        again, _ = m.decode(ids[:, 0], cache)
        rows.append((logits, again))
        with pytest.raises(InputError, match="consumed"):
            m.decode(ids[:, 0], cache)
        with pytest.raises(InputError, match="consumed"):
            m.prefill(ids, first)
    for a, b in zip(*rows, strict=True):
        assert np.array_equal(a, b)


def test_one_compilation_a_bucket_and_none_after_warm_up():
    # One layer: how often it compiles does not depend on how much.
    m = Model(tiny.module(tiny.config(1, (1,))))
    assert [bucket(n, 16) for n in (1, 16, 17, 64, 65)] == [16, 16, 32, 64, 128]
    for length in (16, 32, 64):
        _, cache = m.prefill(tiny.tokens(2, length), m.init_cache(2, 128))
        m.decode(tiny.tokens(1, 2)[0], cache)
    warm = m.compilations
    assert warm == 3 + 1  # three prefill buckets, one decode program
    rng = np.random.default_rng(0)
    for _ in range(40):
        length = int(rng.integers(1, 65))
        lengths = rng.integers(0, length + 1, 2)
        _, cache = m.prefill(
            tiny.tokens(2, length), m.init_cache(2, int(rng.integers(65, 129))), lengths
        )
        m.decode(tiny.tokens(1, 2)[0], cache)
    assert m.compilations == warm


def _join(path) -> str:
    return "/".join(map(str, path))


def smooth(dsa: bool):
    """A model without decisions, which would jump: every expert and position is chosen."""
    config = tiny.config(dsa=dsa)
    moe = dataclasses.replace(config.moe, num_experts=4, num_experts_per_token=4)
    index = dataclasses.replace(config.dsa, topk=32) if dsa else None
    return dataclasses.replace(config, moe=moe, dsa=index)


@pytest.mark.parametrize(("experts", "dsa"), [("dense", True), ("mxfp4", False)])
def test_gradient_through_the_whole_model(experts, dsa):
    """Finite everywhere, right for every parameter, and the same when layers are recomputed."""
    module = tiny.module(smooth(dsa), experts=experts)
    ids, targets = tiny.tokens(2, 24), tiny.tokens(2, 24, seed=1)
    graphdef, params, rest = nnx.split(module, nnx.Param, ...)

    def loss(params, remat=False):
        m = nnx.merge(graphdef, params, rest)
        m.remat = remat
        logp = jax.nn.log_softmax(m(ids))
        return -jnp.mean(jnp.take_along_axis(logp, targets[..., None], -1))

    grads = jax.jit(jax.grad(loss))(params)
    again = jax.jit(jax.grad(lambda p: loss(p, True)))(params)
    value = jax.jit(loss)
    inert = set()
    flat = {_join(path): g[...] for path, g in nnx.to_flat_state(grads)}
    for (name, g), r in zip(flat.items(), jax.tree.leaves(again), strict=True):
        norm = float(jnp.linalg.norm(g))
        assert np.isfinite(norm), name
        if norm < 1e-5:  # rounding; the smallest of the others is 1e-2
            inert.add(name)
            continue
        assert relative(r, g) <= tol.GRADIENT_REMAT, name

        def moved(step, name=name, g=g, norm=norm):
            pairs = nnx.to_flat_state(params)
            return nnx.from_flat_state(
                (path, v.replace(v[...] + step * g / norm) if _join(path) == name else v)
                for path, v in pairs
            )

        step = min(3e-3, 1e-2 / norm)
        near, far = (float(value(moved(h)) - value(moved(-h))) for h in (step, 2 * step))
        slope = (8 * near - far) / (12 * step)  # without the error of second order
        limit = tol.GRADIENT_SLOPE
        assert slope == pytest.approx(norm, rel=limit, abs=tol.GRADIENT_NOISE), name
    # Layer 0 reads the embedding alone, so its attention-side mix is inert; the selection of DSA
    # takes no gradient.
    assert inert == {n for n in flat if "indexer" in n or n.startswith("head/0/attention_res")}


def test_a_token_cannot_see_the_future():
    m = model()
    ids = tiny.tokens(1, 40)
    other = ids.copy()
    other[:, 25:] = tiny.tokens(1, 15, seed=9)
    assert np.array_equal(m(ids)[:, :25], m(other)[:, :25])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m(np.array([[0, 96]], np.int32)), r"token id 96 at \(0, 1\): outside 0\.\.95"),
        (lambda m: m(np.array([[-1]], np.int32)), "token id -1"),
        (lambda m: m(np.zeros((1, 0), np.int32)), "non-empty"),
        (lambda m: m(np.zeros((1, 3), np.float32)), "float32"),
        (lambda m: m(np.zeros((3,), np.int32)), r"shape \(3,\)"),
        (lambda m: m.init_cache(1, 5000), "5000"),
        (lambda m: m.init_cache(0, 50), "batch=0"),
        (
            lambda m: m.prefill(tiny.tokens(1, 70), m.init_cache(1, 60)),
            "70 more exceed its length 64",
        ),
        (lambda m: m.prefill(tiny.tokens(2, 3), m.init_cache(1, 60)), "2 rows"),
        (lambda m: m.prefill(tiny.tokens(1, 3), m.init_cache(1, 60), [4]), r"\[4\]"),
        (lambda m: m.forward(tiny.tokens(1, 3), collect=("colour",)), "colour"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(InputError, match=message):
        call(model())


def test_an_id_on_the_device_outside_the_vocabulary_gives_nan():
    m = model()
    for bad in (96, -1):
        _, cache = m.prefill(tiny.tokens(1, 3), m.init_cache(1, 60))
        logits, _ = m.decode(jnp.array([bad], jnp.int32), cache)
        assert np.isnan(logits).all()
