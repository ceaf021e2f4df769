"""Latent attention: one contract that every implementation is run through."""

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.ops import mla as mla_op
from k3jax.ops.mla import blocks, mla, reference

FP32 = 1e-5  # max|d| / max|float64|; measured 1.4e-6 (4,096 keys), between forms 1.6e-6
BF16 = 1e-2  # the same with bfloat16 inputs; measured 4.9e-3
BF16_COSINE = 0.9999
BLOCKING = 1e-6  # between block sizes and chunk sizes; measured 6.8e-7
GRADIENT = 1e-6  # directional derivative / (norm of gradient * norm of step)

H, N, R, C, V = 3, 8, 4, 16, 6
SCALE = (N + R) ** -0.5
K3 = {"heads": 96, "nope": 128, "rope": 64, "latent": 512, "value": 128}

STATIC = ("scale", "implementation", "query_block", "key_block")
SIZES = [{}, {"query_block": 5, "key_block": 8}]

run = jax.jit(mla, static_argnames=STATIC)


@functools.partial(jax.jit, static_argnames=STATIC)
def gradient(args, positions, weight_BTHV, **options):
    """Of sum(weight * output) in q, cache, w_k and w_v."""
    loss = lambda *a: jnp.sum(mla(*a, positions, **options).astype(jnp.float32) * weight_BTHV)  # noqa: E731
    return jax.grad(loss, argnums=(0, 1, 2, 3))(*args)


def relative(got, want):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return np.abs(got - want).max() / np.abs(want).max()


def case(batch, queries, keys, seed=0, dtype=jnp.float32):
    """Random inputs: q, cache, w_k, w_v. Scores have a spread of about 2."""
    rng = np.random.default_rng([seed, batch, queries, keys])
    draw = lambda *shape, std=1.0: jnp.asarray(rng.normal(0, std, shape), dtype)  # noqa: E731
    return (
        draw(batch, queries, H, N + R, std=2),
        draw(batch, keys, C + R),
        draw(H, N, C, std=C**-0.5),
        draw(H, V, C, std=C**-0.5),
    )


def last_positions(batch, queries, keys):
    """Unequal ends per row; row 0 ends at the last key, and row 1 begins with a pad query."""
    ends = [max(0, keys - 1 - 3 * b - b * keys // 4) for b in range(batch)]
    rows = np.stack([np.arange(e - queries + 1, e + 1) for e in ends])
    rows[1:, 0] = -1
    return jnp.asarray(np.maximum(rows, -1), jnp.int32)


@pytest.mark.parametrize("implementation", mla_op.PORTABLE)
class TestContract:
    @pytest.fixture(autouse=True)
    def _bind(self, implementation):
        options = {"scale": SCALE, "implementation": implementation}
        self.run = functools.partial(run, **options)
        self.gradient = functools.partial(gradient, **options)

    @pytest.mark.parametrize("keys", [1, 300, 4096])
    def test_float64(self, keys):
        args, positions = case(3, 4, keys), last_positions(3, 4, keys)
        want = reference.mla(*args, positions, scale=SCALE)
        assert relative(self.run(*args, positions), want) < FP32

    @pytest.mark.parametrize("keys", [4096])
    def test_bfloat16(self, keys):
        args, positions = case(3, 4, keys, dtype=jnp.bfloat16), last_positions(3, 4, keys)
        got = self.run(*args, positions)
        assert got.dtype == jnp.bfloat16
        got = np.asarray(got, np.float64).ravel()
        want = reference.mla(*args, positions, scale=SCALE).ravel()
        assert relative(got, want) < BF16
        assert got @ want / np.linalg.norm(got) / np.linalg.norm(want) > BF16_COSINE

    def test_pad_queries_are_exact_zeros(self):
        q, *rest = case(3, 4, 7)
        positions = jnp.asarray([[-1, 0, -1, 6], [-1] * 4, [3, 2, 1, -1]], jnp.int32)
        pad = positions < 0
        got = np.asarray(self.run(jnp.where(pad[..., None, None], jnp.nan, q), *rest, positions))
        assert (got[np.asarray(pad)] == 0).all()
        assert relative(got, reference.mla(q, *rest, positions, scale=SCALE)) < FP32

    @pytest.mark.parametrize("sizes", SIZES)
    def test_unused_rows_may_hold_anything(self, sizes):
        q, cache, w_k, w_v = case(3, 12, 20)
        positions = last_positions(3, 12, 20).at[2].set(-1)
        unused = jnp.arange(20) > positions.max(1, keepdims=True)
        assert unused.sum() > 20
        weight = jnp.asarray(np.random.default_rng(2).normal(size=(3, 12, H, V)), jnp.float32)
        seen = []
        for fill in (0.0, jnp.nan, jnp.inf):
            args = (q, jnp.where(unused[..., None], fill, cache), w_k, w_v)
            output = self.run(*args, positions, **sizes)
            seen.append([output, *self.gradient(args, positions, weight, **sizes)])
        for poisoned in seen[1:]:
            for a, b in zip(seen[0], poisoned, strict=True):
                assert np.asarray(a).tobytes() == np.asarray(b).tobytes()

    @pytest.mark.parametrize(("query_block", "key_block"), [(16, 300), (37, 64), (5, 7)])
    def test_block_sizes_change_nothing(self, query_block, key_block):
        args, positions = case(2, 37, 300), last_positions(2, 37, 300)
        whole = self.run(*args, positions)
        cut = self.run(*args, positions, query_block=query_block, key_block=key_block)
        assert relative(cut, whole) < BLOCKING

    def test_later_rows_have_no_influence(self):
        q, cache, w_k, w_v = case(2, 12, 12)
        positions = jnp.broadcast_to(jnp.arange(12, dtype=jnp.int32), (2, 12))
        before = self.run(q, cache, w_k, w_v, positions)
        after = self.run(q, cache.at[:, 5].add(3.0), w_k, w_v, positions)
        np.testing.assert_array_equal(before[:, :5], after[:, :5])
        assert (np.abs(before - after)[:, 5:].max((0, 2, 3)) > 1e-3).all()

    def test_chunked_is_one_shot(self):
        q, cache, w_k, w_v = case(2, 48, 64)
        positions = jnp.broadcast_to(jnp.arange(48, dtype=jnp.int32), (2, 48))
        whole = self.run(q, cache, w_k, w_v, positions)
        for chunk in (1, 16):
            parts = [
                self.run(q[:, i : i + chunk], cache, w_k, w_v, positions[:, i : i + chunk])
                for i in range(0, 48, chunk)
            ]
            assert relative(jnp.concatenate(parts, 1), whole) < BLOCKING

    @pytest.mark.parametrize("sizes", SIZES)
    def test_gradient(self, sizes):
        args, positions = case(3, 12, 20), last_positions(3, 12, 20)
        rng = np.random.default_rng(1)
        weight = rng.normal(size=(3, 12, H, V))
        got = self.gradient(args, positions, jnp.float32(weight), **sizes)
        for i in range(4):  # the derivative along one random direction per argument
            step = rng.normal(size=args[i].shape)
            sides = []
            for sign in (1, -1):
                moved = [np.float64(a) for a in args]
                moved[i] += sign * 1e-5 * step
                sides.append((reference.mla(*moved, positions, scale=SCALE) * weight).sum())
            want = (sides[0] - sides[1]) / 2e-5
            size = np.linalg.norm(got[i]) * np.linalg.norm(step)
            assert abs((np.float64(got[i]) * step).sum() - want) / size < GRADIENT

    def test_bfloat16_gradient(self):
        args, positions = case(3, 12, 20, dtype=jnp.bfloat16), last_positions(3, 12, 20)
        weight = jnp.asarray(np.random.default_rng(2).normal(size=(3, 12, H, V)), jnp.float32)
        exact = self.gradient(tuple(jnp.asarray(np.float32(a)) for a in args), positions, weight)
        for a, b in zip(self.gradient(args, positions, weight), exact, strict=True):
            assert a.dtype == jnp.bfloat16
            a, b = np.float64(a).ravel(), np.float64(b).ravel()
            assert a @ b / np.linalg.norm(a) / np.linalg.norm(b) > BF16_COSINE


def test_forms_agree():
    for keys in (1, 300, 4096):
        args, positions = case(3, 4, keys), last_positions(3, 4, keys)
        a = run(*args, positions, scale=SCALE, implementation="expanded")
        b = run(*args, positions, scale=SCALE, implementation="absorbed")
        assert relative(a, b) < FP32


def k3_shapes(queries, keys, batch=1, dtype=jnp.bfloat16):
    heads, nope, rope, latent, value = K3.values()
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=dtype)
    return (
        shape((batch, queries, heads, nope + rope)),
        shape((batch, keys, latent + rope)),
        shape((heads, nope, latent)),
        shape((heads, value, latent)),
    )


@pytest.mark.parametrize(
    ("queries", "keys", "form"),
    [
        (1, 131072, "absorbed"),
        (128, 8192, "absorbed"),
        (1024, 1024, "expanded"),
        (1024, 16384, "expanded"),
        (4096, 131072, "absorbed"),
    ],
)
def test_choice_at_k3_sizes(queries, keys, form):
    choice, reason = mla_op.choose(*k3_shapes(queries, keys))
    assert (choice, bool(reason)) == (form, True)


def test_choice_is_logged(caplog):
    args, positions = case(1, 4, 7), last_positions(1, 4, 7)
    with caplog.at_level(logging.DEBUG, "k3jax.ops.mla"):
        jax.eval_shape(functools.partial(mla, scale=SCALE), *args, positions)
    assert "expanded" in caplog.text or "absorbed" in caplog.text


def test_plan_stays_within_the_budget():
    for queries, keys, pair in [(1, 1, 8), (1, 2**20, 768), (4096, 2**20, 768), (512, 4096, 768)]:
        t, s = blocks.plan(queries, keys, pair=pair, per_key=1152, per_query=96 * 5000)
        assert 1 <= t <= queries
        assert 1 <= s <= keys
        assert t * s * pair + s * 1152 + t * 96 * 5000 <= blocks.BUDGET_BYTES
        assert s >= min(keys, blocks.KEY_BLOCK_FLOOR)


@pytest.mark.parametrize("implementation", mla_op.PORTABLE)
def test_long_contexts_are_never_scored_whole(implementation):
    """Compiled, not run: 4,096 queries of 96 heads over 16,384 rows would be 26 GB of scores."""
    queries, keys = 4096, 16384
    shapes = k3_shapes(queries, keys)
    positions = jax.ShapeDtypeStruct((1, queries), jnp.int32)
    compiled = run.lower(*shapes, positions, scale=0.07, implementation=implementation).compile()
    made = keys * 96 * (192 + 192 + 128) * 2 if implementation == "expanded" else 0
    temporary = compiled.memory_analysis().temp_size_in_bytes
    # Twice what is made: XLA:CPU multiplies bf16 in float32.
    assert temporary < 3 * blocks.BUDGET_BYTES + 2 * made < queries * keys * 96 * 4 / 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"implementation": "fast"}, "fast"),
        ({"cache": jnp.zeros((2, 7, C + R), jnp.bfloat16)}, "bfloat16"),
        ({"cache": jnp.zeros((2, 7, C))}, "shapes"),
        ({"positions": jnp.zeros((2, 4), jnp.int8)}, "int8"),
        ({"positions": jnp.zeros((2, 5), jnp.int32)}, "shapes"),
    ],
)
def test_refusals_name_the_value(change, message):
    q, cache, w_k, w_v = case(2, 4, 7)
    positions = change.pop("positions", last_positions(2, 4, 7))
    cache = change.pop("cache", cache)
    with pytest.raises(ValueError, match=message):
        mla(q, cache, w_k, w_v, positions, scale=SCALE, **change)
