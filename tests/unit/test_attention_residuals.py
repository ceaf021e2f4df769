"""Depth mixes: plain, two-phase and full forms against the written definition."""

import jax.numpy as jnp
import numpy as np
import pytest
import tolerances as tol

from k3jax.ops import attention_residuals as ar
from k3jax.ops.attention_residuals import reference

EPS = 1e-5
N, B, T, D, READS = 8, 2, 5, 24, 6


def draw(seed, scale=1.0):
    rng = np.random.default_rng(seed)
    bank = rng.normal(size=(N, B, T, D)) * scale
    return (
        bank,
        rng.normal(size=(B, T, D)),
        1 + 0.3 * rng.normal(size=(READS, D)),
        rng.normal(size=(READS, D)),
    )


def oracle(sources, norm, query):
    out = np.empty(sources.shape[1:])
    for b in range(sources.shape[1]):
        for t in range(sources.shape[2]):
            out[b, t] = reference.mix_token(sources[:, b, t], norm, query, EPS)
    return out


def f32(*arrays):
    return [jnp.asarray(a, jnp.float32) for a in arrays]


@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0])
@pytest.mark.parametrize("count", range(N + 1))
def test_plain_and_two_phase_equal_the_definition(count, scale):
    bank, partial, norms, queries = draw(count, scale)
    bank[count:] = 7.0  # rows past the count are not read
    args = f32(bank, partial, norms, queries)
    part = ar.score_bank(args[0], args[2], args[3], count, eps=EPS)
    for i in range(READS):
        want = oracle(np.concatenate([bank[:count], partial[None]]), norms[i], queries[i])
        limit = tol.DEPTH_MIX_FP32 * np.abs(want).max()
        plain = ar.mix(args[0], args[1], args[2][i], args[3][i], count, eps=EPS)
        phased = ar.merge_partial(part, i, args[1], args[2][i], args[3][i], eps=EPS)
        assert np.abs(plain - want).max() <= limit
        assert np.abs(phased - want).max() <= limit


def test_an_empty_bank_returns_the_running_sum_itself():
    bank, partial, norms, queries = f32(*draw(0))
    got = ar.mix(bank, partial, norms[0], queries[0], 0, eps=EPS)
    assert np.array_equal(got, partial)


def test_full_variant():
    bank, _, norms, queries = draw(3)
    args = f32(bank, norms[0], queries[0])
    limit = tol.DEPTH_MIX_FP32 * np.abs(bank).max()
    for count in (1, 5, N):
        want = oracle(bank[:count], norms[0], queries[0])
        assert np.abs(ar.mix_all(*args, count, eps=EPS) - want).max() <= limit
    assert np.array_equal(ar.mix_all(*args, eps=EPS), ar.mix_all(*args, N, eps=EPS))


def test_scores_are_not_rounded_to_the_model_dtype():
    """In bf16 the mix is formed in float32 and rounded once."""
    bank, partial, norms, queries = (jnp.asarray(a, jnp.bfloat16) for a in draw(5))
    got = ar.mix(bank, partial, norms[0], queries[0], N, eps=EPS)
    sources = np.concatenate([np.asarray(bank, np.float64), np.asarray(partial, np.float64)[None]])
    want = oracle(sources, np.asarray(norms[0], np.float64), np.asarray(queries[0], np.float64))
    noise = tol.DEPTH_MIX_FP32 * np.abs(want).max()
    low, high = (
        jnp.asarray(x, jnp.float32).astype(jnp.bfloat16) for x in (want - noise, want + noise)
    )
    assert ((low <= got) & (got <= high)).all()
    assert (low == high).mean() > 0.95  # so nearly all values are given
