"""The attention over patches against its reference, with padding and at every block size."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tolerances as tol

from k3jax.ops import vision_attention
from k3jax.ops.mla import blocks
from k3jax.ops.vision_attention import attend, reference

N, H, D = 37, 3, 8
SCALE = D**-0.5


def inputs(dtype=jnp.float32, rows=N, seed=0):
    draw = np.random.default_rng(seed)
    return tuple(jnp.asarray(draw.normal(size=(rows, H, D)) * 2, dtype) for _ in range(3))


@pytest.mark.parametrize("length", [0, 1, 16, 36, 37])
@pytest.mark.parametrize("sizes", [(None, None), (8, 8), (5, 37), (37, 7), (64, 64), (1, 1)])
def test_equals_the_reference(length, sizes):
    q, k, v = inputs()
    want = reference.attend(q, k, v, length, scale=SCALE)

    @jax.jit
    def run(length):
        return attend(q, k, v, length, scale=SCALE, query_block=sizes[0], key_block=sizes[1])

    got = np.asarray(run(length), np.float64)
    assert np.abs(got - want).max() <= tol.VISION_ATTENTION * max(np.abs(want).max(), 1)
    assert not got[length:].any()


def test_bfloat16():
    q, k, v = inputs(jnp.bfloat16)
    want = reference.attend(q, k, v, N, scale=SCALE)
    got = attend(q, k, v, N, scale=SCALE)
    assert got.dtype == jnp.bfloat16
    assert np.abs(np.asarray(got, np.float64) - want).max() <= 0.02 * np.abs(want).max()


@pytest.mark.parametrize("sizes", [(None, None), (8, 8)])
def test_what_stands_in_the_padding_does_not_matter(sizes):
    q, k, v = inputs()
    options = {"scale": SCALE, "query_block": sizes[0], "key_block": sizes[1]}
    clean = attend(*(a.at[20:].set(0) for a in (q, k, v)), 20, **options)
    poison = attend(*(a.at[20:].set(jnp.nan) for a in (q, k, v)), 20, **options)
    assert np.array_equal(clean, poison)


def test_no_square_of_scores():
    """65,536 patches at K3's heads: no intermediate is larger than the budget of a block."""
    rows = jax.ShapeDtypeStruct((65_536, 12, 128), jnp.bfloat16)
    run = lambda q, k, v, n: attend(q, k, v, n, scale=0.1, implementation="xla")  # noqa: E731
    jaxpr = jax.make_jaxpr(run)(rows, rows, rows, jax.ShapeDtypeStruct((), jnp.int32))

    def largest(jaxpr) -> int:
        sizes = [v.aval.size for eqn in jaxpr.eqns for v in eqn.outvars]
        for eqn in jaxpr.eqns:
            for value in jax.tree.leaves(
                list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "jaxpr")
            ):
                value = getattr(value, "jaxpr", value)
                if hasattr(value, "eqns"):
                    sizes.append(largest(value))
        return max(sizes, default=0)

    assert largest(jaxpr.jaxpr) <= max(blocks.BUDGET_BYTES // 4, 65_536 * 12 * 128)


def test_refused():
    q, k, v = inputs()
    with pytest.raises(ValueError, match="'nope' is none of auto, xla, cudnn"):
        attend(q, k, v, 3, scale=1.0, implementation="nope")
    with pytest.raises(ValueError, match=r"float32\[5, 3, 8\]"):
        attend(q, k[:5], v, 3, scale=1.0)
    with pytest.raises(ValueError, match="float16"):
        attend(*(a.astype(jnp.float16) for a in (q, k, v)), 3, scale=1.0)


def test_choice_has_a_reason():
    form, reason = vision_attention.choose(inputs()[0])
    assert (form, reason) == ("xla", "not on an NVIDIA GPU")
