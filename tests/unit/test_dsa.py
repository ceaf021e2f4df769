"""Gated DSA: scores, sizes, choices and refusals (see `dsa_contract.py` and `mla_contract.py`)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dsa_kernels import check_sizes

from k3jax.ops import dsa, mla
from k3jax.ops.dsa import reference, xla
from k3jax.ops.mla import blocks

FP32 = 1e-5  # max|d| / max|float64|; measured 5.9e-7 (2,048 of 2,064 keys)

HI, KI = 4, 8  # indexer heads and width
H, N, R, C, V = 3, 8, 4, 16, 6

select = jax.jit(dsa.select, static_argnames=("topk", "implementation", "query_block", "key_block"))


def relative(got, want):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return np.abs(got - want).max() / np.abs(want).max()


def indexer_case(batch, queries, keys, seed=0, whole=False):
    """q, k, w of the indexer. ``whole`` numbers make scores exact, with many ties."""
    rng = np.random.default_rng([seed, batch, queries, keys])
    shapes = (batch, queries, HI, KI), (batch, keys, KI), (batch, queries, HI)
    if whole:
        return tuple(jnp.asarray(rng.integers(-1, 2, s), jnp.float32) for s in shapes)
    return tuple(jnp.asarray(rng.normal(size=s), jnp.float32) for s in shapes)


def attention_case(batch, queries, keys, seed=0, dtype=jnp.float32):
    rng = np.random.default_rng([seed, batch, queries, keys, 1])
    shapes = (batch, queries, H, N + R), (batch, keys, C + R), (H, N, C), (H, V, C)
    spreads = 2, 1, C**-0.5, C**-0.5
    return tuple(jnp.asarray(rng.normal(0, *a), dtype) for a in zip(spreads, shapes, strict=True))


def positions_of(batch, queries, keys):
    """Unequal ends per row; row 0 ends at the last key, later rows begin with a pad query."""
    rows = np.stack([np.arange(queries) + keys - queries - b * (keys // 3) for b in range(batch)])
    rows[1:, 0] = -1
    return jnp.asarray(np.maximum(rows, -1), jnp.int32)


def test_scores():
    case = indexer_case(2, 5, 40)  # head weights of both signs
    assert relative(dsa.scores(*case), reference.scores(*case)) < FP32


def test_rank_order():
    """NaN and both zeros have one place, whatever top_k makes of them itself."""
    low = np.finfo(np.float32).min
    score = jnp.asarray([0.0, -0.0, jnp.nan, -jnp.inf, jnp.inf, low, 1.0, 2.0], jnp.float32)
    rank = np.asarray(jax.jit(xla.ranked)(score, jnp.arange(8) < 7))
    assert rank[:2].tobytes() == bytes(8)  # +0.0 twice
    assert -np.inf == rank[7] < rank[2] < rank[3] == rank[5] < -1
    assert rank[4] == np.inf


def test_million_keys_keep_their_positions():
    keys = 2**20 + 3
    k = jnp.zeros((1, keys, 1)).at[0, -20:, 0].set(jnp.arange(20, 0, -1, dtype=jnp.float32))
    q, w = jnp.ones((1, 2, 1, 1)), jnp.ones((1, 2, 1))
    positions = jnp.asarray([[keys - 1, keys - 11]], jnp.int32)
    got = np.asarray(select(q, k, w, positions, 16, key_block=2**18))
    assert got[0, 0].tolist() == list(range(keys - 20, keys - 4))
    assert got[0, 1].tolist() == [*range(6), *range(keys - 20, keys - 10)]


def k3_shapes(queries, keys):
    bf16 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    indexer = (
        *(bf16((1, queries, 32, 128)), bf16((1, keys, 128))),
        jax.ShapeDtypeStruct((1, queries, 32), jnp.float32),
    )
    attention = (
        *(bf16((1, queries, 96, 192)), bf16((1, keys, 576))),
        *(bf16((96, 128, 512)), bf16((96, 128, 512))),
    )
    return indexer, attention, jax.ShapeDtypeStruct((1, queries), jnp.int32)


def test_million_keys_by_abstract_shapes():
    """8,192 x 2^20 scores pass 2^31: nothing is that long, and no index is such a product."""
    queries, keys = 8192, 2**20
    indexer, attention, positions = k3_shapes(queries, keys)
    pick = functools.partial(dsa.select, topk=2048)
    indices = jax.eval_shape(pick, *indexer, positions)
    assert (indices.shape, indices.dtype) == ((1, queries, 2048), jnp.int32)
    read = functools.partial(dsa.attend, scale=192**-0.5)
    assert jax.eval_shape(read, *attention, indices).shape == (1, queries, 96, 128)
    whole = functools.partial(mla.mla, scale=192**-0.5)
    limit = queries * 96 * 192  # the queries themselves
    for function, args in (
        (pick, (*indexer, positions)),
        (read, (*attention, indices)),
        (whole, (*attention, positions)),
    ):
        check_sizes(jax.make_jaxpr(function)(*args).jaxpr, limit + 1)


def test_million_keys_compile_within_the_budget():
    queries, keys = 2048, 2**20
    indexer, _, positions = k3_shapes(queries, keys)
    compiled = select.lower(*indexer, positions, topk=2048).compile()
    temporary = compiled.memory_analysis().temp_size_in_bytes
    assert temporary < 3 * blocks.BUDGET_BYTES + keys * 128 * 4  # XLA:CPU copies keys to float32
    assert temporary < queries * keys * 4 / 4


@pytest.mark.parametrize("case", ["1024 1024 128 masked", "1 16 16 masked", "1 64 16 gathered"])
def test_choice(case, caplog):
    *sizes, form = case.split()
    queries, keys, topk = map(int, sizes)
    _, attention, _ = k3_shapes(queries, keys)
    indices = jax.ShapeDtypeStruct((1, queries, topk), jnp.int32)
    with caplog.at_level("DEBUG", "k3jax.ops.dsa"):
        jax.eval_shape(functools.partial(dsa.attend, scale=1.0), *attention, indices)
    assert f"dsa.attend: {form}" in caplog.text


def test_refusals_name_the_value():
    (q, k, w), positions = indexer_case(1, 5, 64), positions_of(1, 5, 64)
    args, indices = attention_case(1, 5, 64), jnp.zeros((1, 5, 16), jnp.int32)
    half = jnp.bfloat16
    refused = {
        "got 0": lambda: dsa.select(q, k, w, positions, 0),
        "select.*'fast'": lambda: dsa.select(q, k, w, positions, 16, implementation="fast"),
        "q and k.*bfloat16": lambda: dsa.select(q, k.astype(half), w, positions, 16),
        "weights.*bfloat16": lambda: dsa.select(q, k, w.astype(half), positions, 16),
        "dsa: shapes": lambda: dsa.scores(q, k[..., 1:], w),
        "positions": lambda: dsa.select(q, k, w, positions[:, 1:], 16),
        "attend.*'fast'": lambda: dsa.attend(*args, indices, scale=1.0, implementation="fast"),
        "attend: shapes": lambda: dsa.attend(*args, indices[:, 1:], scale=1.0),
    }
    for message, call in refused.items():
        with pytest.raises(ValueError, match=message):
            call()
