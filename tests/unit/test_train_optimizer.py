"""Muon, the rate schedule, quantised training and the indexer's loss, on small cases."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.config import Config
from k3jax.errors import ConfigError
from k3jax.train import optimizer, qat
from k3jax.train.indexer_loss import indexer_loss
from k3jax.train.settings import OptimizerSettings, load_settings

# Measured: singular values after Newton-Schulz 0.68..1.13 for well-conditioned blocks.
SINGULAR = (0.6, 1.25)


class TestMuon:
    def test_orthogonalize(self):
        m = jnp.asarray(np.random.default_rng(0).normal(size=(3, 16, 40)), jnp.float32)
        values = np.linalg.svd(np.asarray(optimizer.orthogonalize(m)), compute_uv=False)
        assert SINGULAR[0] < values.min()
        assert values.max() < SINGULAR[1]
        assert not np.asarray(optimizer.orthogonalize(jnp.zeros((1, 4, 4)))).any()

    def test_each_head_on_its_own(self):
        """A head with a gradient a thousand times larger leaves the others' update as it was."""
        config = Config.from_hf(load_settings("configs/train/nano.yaml").model)
        rng = np.random.default_rng(0)
        g = rng.normal(size=(config.kda.width, 24))
        big = g.copy()
        big[: config.kda.head_dim] *= 1000
        muon = optimizer.per_head_muon(0.9, config)

        def step(gradient):
            tree = {"head": {0: {"attention": {"q_proj": jnp.asarray(gradient, jnp.float32)}}}}
            updates, _ = muon.update(tree, muon.init(tree))
            return np.asarray(updates["head"][0]["attention"]["q_proj"])

        np.testing.assert_allclose(step(g), step(big), atol=1e-4)
        blocks = step(g).reshape(config.kda.num_heads, config.kda.head_dim, 24)
        values = np.linalg.svd(blocks, compute_uv=False) / (0.2 * config.kda.head_dim**0.5)
        assert SINGULAR[0] < values.min()
        assert values.max() < SINGULAR[1]

    def test_grouping_changes_nothing(self):
        rng = np.random.default_rng(3)
        tree = {
            n: jnp.asarray(rng.normal(size=s), jnp.float32)
            for n, s in {"a": (6, 10), "b": (10, 6), "c": (2, 3, 6, 10)}.items()
        }
        muon = optimizer.per_head_muon(0.9)
        together, _ = muon.update(tree, muon.init(tree))
        for name, value in tree.items():
            alone, _ = muon.update({name: value}, muon.init({name: value}))
            np.testing.assert_allclose(together[name], alone[name], atol=1e-5)

    def test_labels(self):
        leaf = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)  # noqa: E731
        expected = {
            ("embed", leaf(9, 4)): "embedding",
            ("head/0/attention/q_proj", leaf(8, 4)): "matrix",
            ("head/0/attention/q_conv", leaf(8, 4)): "vector",
            ("head/0/attention/A_log", leaf(4)): "vector",
            ("period/1/input_norm", leaf(2, 8)): "vector",
            ("period/1/ffn/w13", leaf(2, 3, 8, 4)): "matrix",
            ("period/1/ffn/router_bias", leaf(2, 8)): "frozen",
            ("tail/0/attention_res/query", leaf(8)): "vector",
        }
        for (name, value), want in expected.items():
            assert optimizer.label(name, value) == want, name

    @pytest.mark.parametrize("name", ["muon", "adamw"])
    def test_toy_regression(self, name):
        """A two-layer tanh teacher: the loss falls to a fiftieth in 150 steps."""
        rng = np.random.default_rng(0)
        x = jnp.asarray(rng.normal(size=(64, 8)), jnp.float32)
        teacher = [jnp.asarray(rng.normal(size=s), jnp.float32) * 0.5 for s in ((16, 8), (4, 16))]
        forward = lambda p: jnp.tanh(x @ p["w1"].T) @ p["w2"].T + p["b"]  # noqa: E731
        y = forward({"w1": teacher[0], "w2": teacher[1], "b": jnp.ones(4)})
        params = {
            "w1": jnp.asarray(rng.normal(size=(16, 8)), jnp.float32) * 0.1,
            "w2": jnp.asarray(rng.normal(size=(4, 16)), jnp.float32) * 0.1,
            "b": jnp.zeros(4),
            "router_bias": jnp.ones(3),
        }
        settings = OptimizerSettings(0.05, name=name, warmup_steps=5, weight_decay=0.0)
        transform = optimizer.make_optimizer(settings, 150)
        loss = lambda p: jnp.mean(jnp.square(forward(p) - y))  # noqa: E731

        @jax.jit
        def step(params, state):
            updates, state = transform.update(jax.grad(loss)(params), state, params)
            return jax.tree.map(jnp.add, params, updates), state

        first, state = float(loss(params)), transform.init(params)
        for _ in range(150):
            params, state = step(params, state)
        assert float(loss(params)) < first / 50  # measured 1/89 and below
        np.testing.assert_array_equal(params["router_bias"], 1.0)

    def test_schedule(self):
        settings = OptimizerSettings(1.0, warmup_steps=10, decay_fraction=0.5, final_fraction=0.1)
        rate = optimizer.schedule(settings, 100)
        values = [float(rate(i)) for i in (0, 9, 30, 50, 75, 100, 200)]
        np.testing.assert_allclose(values, [0.1, 1, 1, 1, 0.55, 0.1, 0.1], atol=1e-6)

    def test_settings_are_checked(self):
        with pytest.raises(ConfigError, match=r"optimizer\.name: 'sgd'"):
            OptimizerSettings(1.0, name="sgd")
        with pytest.raises(ConfigError, match="decay_fraction: 0"):
            OptimizerSettings(1.0, decay_fraction=0)


class TestQAT:
    def test_only_experts_are_quantised(self):
        params = {"w13": jnp.full((2, 4), 0.3), "router": jnp.full((2, 4), 0.3), "A": jnp.ones(2)}
        dtypes = {
            "w13": jnp.dtype("bfloat16"),
            "router": jnp.dtype("bfloat16"),
            "A": jnp.dtype("float32"),
        }
        done = qat.forward_params({"ffn": params}, {"ffn": dtypes}, lambda w: w + 1)["ffn"]
        assert done["A"].dtype == jnp.float32
        np.testing.assert_array_equal(done["w13"], jnp.full((2, 4), 1.3, jnp.bfloat16))
        np.testing.assert_array_equal(done["router"], jnp.full((2, 4), 0.3, jnp.bfloat16))

    def test_values_survive_packing_and_gradient_passes(self):
        mxfp4 = pytest.importorskip("k3jax.quantization.mxfp4")
        w = jnp.asarray(np.random.default_rng(0).normal(size=(2, 4, 64)), jnp.float32)
        seen = qat.forward_params({"w2": w}, {"w2": jnp.dtype("bfloat16")}, mxfp4.fake_quantize)
        stored = mxfp4.pack(w).unpack(jnp.bfloat16)
        np.testing.assert_array_equal(seen["w2"], stored)
        grad = jax.grad(lambda w: jnp.sum(mxfp4.fake_quantize(w) * 2.0))(w)
        np.testing.assert_array_equal(grad, 2.0)


class TestIndexerLoss:
    def naive(self, scores, probs, valid):
        total, rows = 0.0, 0
        for b, t in np.ndindex(*scores.shape[:2]):
            keys = np.flatnonzero(valid[b, t])
            if len(keys) < 2:
                continue
            q = np.exp(scores[b, t, keys] - scores[b, t, keys].max())
            q, p = q / q.sum(), probs[b, t, keys] / probs[b, t, keys].sum()
            total += float(np.sum(p * (np.log(p) - np.log(q))))
            rows += 1
        return total / rows

    def test_against_a_loop(self):
        rng = np.random.default_rng(0)
        scores, probs = rng.normal(size=(2, 6, 6)) * 5, rng.uniform(0.01, 1, (2, 6, 6))
        valid = np.tril(np.ones((6, 6), bool)) & (rng.uniform(size=(2, 6, 6)) < 0.8)
        valid[1, 5] = False  # a pad row
        arguments = [jnp.asarray(a, jnp.float32) for a in (scores, probs)]
        loss = indexer_loss(*arguments, jnp.asarray(valid))
        np.testing.assert_allclose(loss, self.naive(scores, probs, valid), rtol=1e-5)
        grads = jax.grad(indexer_loss, (0, 1))(*arguments, jnp.asarray(valid))
        assert np.isfinite(grads[0]).all()
        assert not np.asarray(grads[0])[~valid].any()
        assert not np.asarray(grads[1]).any()

    def test_zero_at_the_target(self):
        valid = jnp.tril(jnp.ones((1, 5, 5), bool))
        scores = jnp.asarray(np.random.default_rng(1).normal(size=(1, 5, 5)), jnp.float32)
        probs = 3 * jax.nn.softmax(jnp.where(valid, scores, -jnp.inf), axis=-1)
        assert abs(float(indexer_loss(scores, probs, valid))) < 1e-6
        # Garbage outside the valid keys changes nothing.
        dirty = jnp.where(valid, scores, jnp.nan)
        assert float(indexer_loss(dirty, probs, valid)) < 1e-6
