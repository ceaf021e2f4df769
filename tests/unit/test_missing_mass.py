"""The mass outside of a selection bounds what a head's read can lose."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dsa_kernels import stacked
from hypothesis import given, settings
from hypothesis import strategies as st

from k3jax.ops import dsa
from k3jax.ops.dsa import reference
from k3jax.ops.mla import reference as dense
from k3jax.ops.rows import Rows

B, T, S, K = 2, 5, 40, 8
H, N, R, C, V = 3, 8, 4, 16, 6
SCALE = (N + R) ** -0.5
FP32 = 1e-6  # of mass and bound, relative, over 1 + the largest score; measured 2.6e-7
SMALLEST = 1e-37  # masses below are 0 in float32
VALUES = ("random", "opposite", "equal", "one long outside", "one long inside", "zero")
SELECTIONS = ("indexer", "lowest", "best", "worst", "none", "all")

missing_mass = jax.jit(dsa.missing_mass, static_argnames=("scale", "query_block", "key_block"))


def case(seed, sharpness, values, selection):
    """(arguments of `missing_mass`) with a padded query, and a query that sees one row."""
    rng = np.random.default_rng(seed)
    q = sharpness * rng.standard_normal((B, T, H, N + R))
    cache = rng.standard_normal((B, S, C + R))
    w_k, w_v = (rng.standard_normal((H, n, C)) * C**-0.5 for n in (N, V))
    positions = np.array([[-1, 0, 7, 8, 39], [39, 20, 9, 38, 30]])
    best = np.argsort(-dense_scores(q, cache, w_k).sum(2), -1)  # over heads
    rows = {
        "indexer": rng.permuted(np.broadcast_to(np.arange(S), (B, T, S)), axis=-1),
        "lowest": np.broadcast_to(np.arange(S), (B, T, S)),
        "best": best,
        "worst": best[..., ::-1],
        "none": np.full((B, T, S), -1),
        "all": np.broadcast_to(np.arange(S), (B, T, S)),
    }[selection]
    indices = np.full((B, T, S), -1)
    for b, t in np.ndindex(B, T):
        legal = rows[b, t][rows[b, t] <= positions[b, t]]
        legal = legal if selection == "all" else legal[:K]
        indices[b, t, : len(legal)] = legal
    # Values, by the selection of the last query of each sequence; w_v keeps their directions.
    inside = np.stack([np.isin(np.arange(S), indices[b, -1]) for b in range(B)])[..., None]
    unit = rng.standard_normal(C)
    latent = {
        "random": cache[..., :C],
        "opposite": np.where(inside, unit, -unit),
        "equal": np.broadcast_to(unit, (B, S, C)),
        "one long outside": cache[..., :C] * (1 + 30 * (np.cumsum(~inside, 1) == 1) * ~inside),
        "one long inside": cache[..., :C] * (1 + 30 * (np.cumsum(inside, 1) == 1) * inside),
        "zero": cache[..., :C] * 0,
    }[values]
    cache = np.concatenate([latent, cache[..., C:]], -1)
    return [np.float32(x) for x in (q, cache, w_k, w_v)], np.int32(positions), np.int32(indices)


def dense_scores(q, cache, w_k):
    return np.einsum("bthn,hnc,bsc->bths", q[..., :N], w_k, cache[..., :C]) + np.einsum(
        "bthr,bsr->bths", q[..., N:], cache[..., C:]
    )


def distance(args, positions, indices):
    """Between the dense and the sparse read of each head, in float64."""
    whole = dense.mla(*args, positions, scale=SCALE)
    return np.linalg.norm(whole - reference.attend(*args, indices, scale=SCALE), axis=-1)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.0, 0.1, 2.0, 10.0, 40.0]),
    st.sampled_from(VALUES),
    st.sampled_from(SELECTIONS),
)
def test_the_bound_holds(seed, sharpness, values, selection):
    args, positions, indices = case(seed, sharpness, values, selection)
    mass, bound = reference.missing_mass(*args, positions, indices, scale=SCALE)
    limit = FP32 * (1 + SCALE * np.abs(dense_scores(*args[:3])).max())
    lost = distance(args, positions, indices)
    longest = np.linalg.norm(np.einsum("bsc,hvc->bshv", args[1][..., :C], args[3]), axis=-1).max()
    assert (lost <= bound * (1 + 1e-12) + 1e-14 * longest).all()  # the reads' own rounding
    got = missing_mass(*args, positions, indices, scale=SCALE)
    got_mass, got_bound = (np.asarray(x, np.float64) for x in got)
    assert (lost <= got_bound * (1 + limit) + (1e-14 + SMALLEST) * longest).all()
    assert (np.abs(got_mass - mass) <= limit * mass + SMALLEST).all()
    assert (np.abs(got_bound - bound) <= limit * bound + SMALLEST * longest).all()
    assert ((got_mass >= 0) & (got_mass <= 1)).all()
    assert not got_mass[0, 0].any()
    assert not got_bound[0, 0].any()
    if selection == "all":
        assert not got_mass.any()
    if selection == "none":
        assert (got_mass[positions >= 0] == 1).all()


def test_the_bound_is_reached():
    """Values that are one vector inside and its opposite outside lose all of it; random ones of
    scores that the selection ignores, a good part."""
    args, positions, indices = case(0, 1.0, "opposite", "lowest")
    lost = distance(args, positions, indices)[:, -1]
    _, bound = missing_mass(*args, positions, indices, scale=SCALE)
    longest = np.linalg.norm(np.einsum("bsc,hvc->bhsv", args[1][..., :C], args[3]), axis=-1)
    np.testing.assert_allclose(longest.min(-1), longest.max(-1), rtol=1e-5)
    np.testing.assert_allclose(lost, np.asarray(bound)[:, -1], rtol=1e-5)
    shares = []
    for seed in range(20):
        args, positions, indices = case(seed, 10.0, "random", "worst")
        _, bound = missing_mass(*args, positions, indices, scale=SCALE)
        shares.append(distance(args, positions, indices)[1] / np.asarray(bound)[1])
    assert np.max(shares) > 0.5
    assert np.mean(shares) > 0.2


def test_blocks_pages_and_padding():
    """Whatever the blocks, and in pages of a stack, with NaN where no query may look."""
    args, positions, indices = case(1, 2.0, "random", "indexer")
    positions[1] = np.minimum(positions[1], 20)
    want = missing_mass(*args, positions, indices, scale=SCALE)
    q, cache, *weights = args
    q = np.where(positions[..., None, None] < 0, np.float32(np.nan), q)
    seen = np.arange(S) <= positions.max(1, keepdims=True)
    cache = np.where(seen[..., None], cache, np.float32(np.nan))
    run = functools.partial(missing_mass, scale=SCALE)
    for rows in (cache, stacked(Rows.of(jnp.asarray(cache)), 5)):
        for sizes in ({}, {"query_block": 2, "key_block": 7}):
            got = run(q, rows, *weights, positions, indices, **sizes)
            for a, b in zip(got, want, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-30)


def test_bfloat16_inputs_are_read_exactly():
    args, positions, indices = case(2, 2.0, "random", "indexer")
    half = [jnp.asarray(x, jnp.bfloat16) for x in args]
    got = missing_mass(*half, positions, indices, scale=SCALE)
    wide = [np.asarray(x, np.float64) for x in half]
    for a, b in zip(
        got, reference.missing_mass(*wide, positions, indices, scale=SCALE), strict=True
    ):
        assert a.dtype == jnp.float32
        np.testing.assert_allclose(a, b, rtol=20 * FP32)


def test_refusals():
    args, positions, indices = case(3, 1.0, "random", "indexer")
    with pytest.raises(ValueError, match=r"missing_mass: shapes do not fit"):
        dsa.missing_mass(*args, positions, indices[:, 1:], scale=SCALE)
    with pytest.raises(ValueError, match=r"missing_mass: positions .* int8"):
        dsa.missing_mass(*args, positions.astype(np.int8), indices, scale=SCALE)


def test_memory_at_full_size():
    """128 queries of K3.1 over 65,536 rows: scores alone would be 3.2 GB."""
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    args = shape((1, 128, 96, 192)), shape((1, 65536, 576)), *[shape((96, 128, 512))] * 2
    where = [jax.ShapeDtypeStruct((1, 128, *k), jnp.int32) for k in ((), (2048,))]
    compiled = missing_mass.lower(*args, *where, scale=192**-0.5).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 1.5 * 2**30
