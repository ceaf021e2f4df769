"""Latent attention: which form runs, what it needs and what is refused (see `mla_contract.py`)."""

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.ops import mla as mla_op
from k3jax.ops.mla import blocks, mla

FP32 = 1e-5  # max|d| / max between forms; measured 1.6e-6 (4,096 keys)

H, N, R, C, V = 3, 8, 4, 16, 6
SCALE = (N + R) ** -0.5
K3 = {"heads": 96, "nope": 128, "rope": 64, "latent": 512, "value": 128}

STATIC = ("scale", "implementation", "query_block", "key_block")

run = jax.jit(mla, static_argnames=STATIC)


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
