"""The Mosaic TPU kernel of a depth read, interpreted, against the portable form."""

from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tolerances as tol

from k3jax.ops import attention_residuals as ar
from k3jax.ops import target
from k3jax.ops.attention_residuals import mosaic_tpu, reference

N, D = 3, 256
OPTIONS = {"eps": 1e-5, "out_eps": 1e-6}


@pytest.fixture(autouse=True)
def _interpreted():
    entry = {"mosaic_tpu": partial(mosaic_tpu.read, interpret=True)}
    told = mock.patch.object(target, "device_kind", return_value="TPU v5p")
    with mock.patch.dict(ar.IMPLEMENTATIONS, entry), told:
        yield


def draw(batch, tokens, dtype):
    rng = np.random.default_rng([batch, tokens])
    shapes = (N, batch, tokens, D), (batch, tokens, D), (D,), (D,), (D,)
    bank, partial_, norm, query, out_norm = (rng.normal(size=s) for s in shapes)
    arrays = 2 * bank, partial_, 1 + norm / 4, query / 4, 1 + out_norm / 4
    return tuple(jnp.asarray(a, dtype) for a in arrays)


@jax.jit
def read(*arguments):
    return ar.read(*arguments, weight_after_cast=True, **OPTIONS)


def definition(bank, partial_, norm, query, out_norm, count):
    bank, partial_, norm, query, out_norm = (
        np.asarray(a, np.float64) for a in (bank, partial_, norm, query, out_norm)
    )
    out = np.empty(partial_.shape)
    for at in np.ndindex(partial_.shape[:2]):
        sources = np.stack([*bank[:count, *at], partial_[at]])
        x = reference.mix_token(sources, norm, query, OPTIONS["eps"])
        out[at] = x / np.sqrt(np.mean(x * x) + OPTIONS["out_eps"]) * out_norm
    return out


@pytest.mark.parametrize(("batch", "tokens"), [(3, 1), (2, 75)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_definition(batch, tokens, dtype):
    """With every count; rows past it hold NaN. 150 tokens are a whole tile and a part of one."""
    bank, *rest = draw(batch, tokens, dtype)
    for count in range(N + 1):
        poisoned = bank.at[count:].set(jnp.nan)
        got = read(poisoned, *rest, jnp.int32(count))
        assert got.dtype == dtype
        want = definition(bank, *rest, count)
        # bfloat16: the mix and the normed value are rounded, 2^-9 each, and a product.
        limit = 2 * tol.DEPTH_MIX_FP32 if dtype == jnp.float32 else 2**-7
        assert np.abs(np.float64(got) - want).max() <= limit * np.abs(want).max()


@pytest.mark.parametrize("after", [True, False])
def test_roundings_are_those_of_the_portable_form(after):
    """In bfloat16, almost bit for bit."""
    arguments = *draw(3, 1, jnp.bfloat16), jnp.int32(N)
    forms = (
        jax.jit(partial(ar.read, weight_after_cast=after, implementation=name, **OPTIONS))
        for name in ("mosaic_tpu", "xla")
    )
    got, want = (np.asarray(form(*arguments)) for form in forms)
    assert (got == want).mean() > 0.99


def test_tokens_do_not_meet():
    """A token has the same bits alone, and a NaN stays where it is."""
    bank, partial_, *rest = draw(2, 75, jnp.float32)
    count = jnp.int32(N)
    want = np.asarray(read(bank, partial_, *rest, count))
    got = np.array(read(bank.at[1, 0, 5].set(jnp.nan), partial_, *rest, count))
    assert np.isnan(got[0, 5]).all()
    got[0, 5] = want[0, 5]
    np.testing.assert_array_equal(got, want)
    alone = read(bank[:, 1:, 9:12], partial_[1:, 9:12], *rest, count)
    np.testing.assert_array_equal(alone, want[1:, 9:12])


def test_gradients_are_those_of_the_portable_form():
    arrays = draw(3, 1, jnp.float32)
    weight = jnp.asarray(np.random.default_rng(0).normal(size=(3, 1, D)), jnp.float32)

    def gradients(name):
        def loss(*arrays):
            options = {"weight_after_cast": True, "implementation": name, **OPTIONS}
            return (ar.read(*arrays, jnp.int32(2), **options) * weight).sum()

        return jax.jit(jax.grad(loss, range(5)))(*arrays)

    for got, want in zip(gradients("mosaic_tpu"), gradients("xla"), strict=True):
        np.testing.assert_array_equal(got, want)
        assert np.abs(want).max() > 0


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ((8, 1, 4, 7168), jnp.bfloat16, None),
        ((8, 1, 4, 200), jnp.bfloat16, "D is 200"),
        ((8, 1, 4, 256), jnp.float16, "float16"),
        ((0, 1, 4, 256), jnp.float32, "no rows"),
    ],
)
def test_refusals_name_the_value(shape, dtype, message):
    bank = jax.ShapeDtypeStruct(shape, dtype)
    refused = mosaic_tpu.refusal(bank, jax.ShapeDtypeStruct(shape[1:], dtype))
    assert refused is None if message is None else message in refused
