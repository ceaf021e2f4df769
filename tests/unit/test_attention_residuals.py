"""Depth mixes: plain, two-phase and full forms against the written definition; reads."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tolerances as tol
from attention_residuals_contract import GradientContract, Read, ReadContract

from k3jax.errors import InputError
from k3jax.ops import attention_residuals as ar
from k3jax.ops.attention_residuals import mosaic_gpu, reference, xla

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


FORMS = {
    "xla float32": Read("xla", jnp.float32, (8, 24)),
    "xla bfloat16": Read("xla", jnp.bfloat16, (8, 24)),
}
KERNEL = Read("mosaic_gpu", jnp.bfloat16, (2, 1024), device="NVIDIA H200")
INTERPRETED = dataclasses.replace(
    KERNEL, entry=functools.partial(mosaic_gpu.read, interpret=True), eager=True
)
STAND_IN = dataclasses.replace(KERNEL, entry=xla.read)


class TestRead(ReadContract):
    @pytest.fixture(params=[*FORMS.values(), INTERPRETED], ids=[*FORMS, "mosaic_gpu"])
    def implementation(self, request):
        return request.param

    @pytest.fixture(autouse=True)
    def _small(self, monkeypatch):
        """A block has several tokens, the last round is not full, and the ring is used again."""
        monkeypatch.setattr(mosaic_gpu, "BLOCKS", 2)
        monkeypatch.setattr(mosaic_gpu, "slots_of", lambda D: 4)


class TestGradients(GradientContract):
    @pytest.fixture(params=[FORMS["xla float32"], STAND_IN], ids=["xla", "kernel"])
    def implementation(self, request):
        return request.param


def test_gradients_against_differences():
    """Of the written definition in float64, along one direction an array."""
    rng = np.random.default_rng(8)
    shapes = [(3, 1, 2, 8), (1, 2, 8), (8,), (8,), (8,)]
    arrays, moves = ([rng.normal(size=s) for s in shapes] for _ in range(2))
    weight = rng.normal(size=shapes[1])
    options = {"eps": EPS, "out_eps": 1e-3}

    def exact(bank, partial, norm, query, out_norm):
        mixed = oracle(np.concatenate([bank[:2], partial[None]]), norm, query)
        scale = 1 / np.sqrt(np.mean(mixed**2, -1, keepdims=True) + options["out_eps"])
        return np.sum(mixed * scale * out_norm * weight)

    read = functools.partial(ar.read, count=2, weight_after_cast=False, **options)
    loss = lambda *x: jnp.sum(read(*x) * jnp.float32(weight))  # noqa: E731
    gradients = jax.jit(jax.grad(loss, argnums=tuple(range(5))))(*f32(*arrays))
    for n, gradient in enumerate(gradients):
        slope = np.sum(np.asarray(gradient) * moves[n])
        ends = [
            exact(*[x + (h * moves[n] if i == n else 0) for i, x in enumerate(arrays)])
            for h in (1e-5, -1e-5)
        ]
        want = (ends[0] - ends[1]) / 2e-5
        assert abs(slope - want) <= 2e-5 * max(1, abs(want))


@pytest.mark.parametrize("after", [True, False])
def test_two_phase_reads(after):
    bank, partial, norms, queries = f32(*draw(9))
    options = {"eps": EPS, "out_eps": 1e-3, "weight_after_cast": after}
    part = ar.score_bank(bank, norms, queries, 5, eps=EPS)
    read, merge = (jax.jit(functools.partial(f, **options)) for f in (ar.read, ar.merge_read))
    for i in range(READS):
        inputs = partial, norms[i], queries[i], norms[0]
        want = read(bank, *inputs, 5)
        got = merge(part, i, *inputs)
        np.testing.assert_allclose(got, want, atol=tol.DEPTH_MIX_FP32 * np.abs(want).max())


def test_memory_is_one_row_in_float32():
    """No float32 copy of the bank, nor any other one."""
    width, tokens = 512, 64
    shapes = [(8, 1, tokens, width), (1, tokens, width), (width,), (width,), (width,)]
    arrays = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes]
    options = {"eps": EPS, "out_eps": EPS, "weight_after_cast": True, "implementation": "xla"}
    read = jax.jit(functools.partial(ar.read, **options))
    memory = read.lower(*arrays, jax.ShapeDtypeStruct((), jnp.int32)).compile().memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes <= 1.1 * tokens * width * 4


def test_choice_of_kernels():
    bank, partial = (jnp.zeros(s, jnp.bfloat16) for s in ((8, 1, 2, 1024), (1, 2, 1024)))
    assert mosaic_gpu.refusal(bank, partial) is None
    for wrong, message in (
        ((bank.astype(jnp.float32), partial.astype(jnp.float32)), "float32"),
        ((bank[..., :1000], partial[..., :1000]), "1000"),
        ((jnp.zeros((16, 1, 2, 1024), jnp.bfloat16), partial), "16 rows"),
        ((jax.ShapeDtypeStruct((9, 1, 2, 7168), jnp.bfloat16), partial), "10 sources of 7168"),
    ):
        assert message in str(mosaic_gpu.refusal(*wrong))
    vectors = [jnp.zeros((1024,), jnp.bfloat16)] * 3

    def read(inputs, implementation="auto", count=1):
        options = {"eps": EPS, "out_eps": EPS, "weight_after_cast": True}
        return ar.read(*inputs, count, implementation=implementation, **options)

    for bad, message in (
        ((bank, partial[:, :1], *vectors), "running sum"),
        ((bank, partial.astype(jnp.float32), *vectors), "two dtypes"),
        ((bank, partial, *vectors[:2], vectors[0][:5]), r"\(5,\)"),
    ):
        with pytest.raises(InputError, match=message):
            read(bad)
    whole = [x.astype(jnp.int32) for x in (bank, partial)]
    with pytest.raises(InputError, match="rows are int32"):
        read((*whole, *vectors))
    for count in (-1, bank.shape[0] + 1, 1.0, None):
        with pytest.raises(InputError, match=f"count {count} is not one integer"):
            read((bank, partial, *vectors), count=count)
    assert read((bank[:, :, :0], partial[:, :0], *vectors)).shape == partial[:, :0].shape
    for name, message in (("mosaic_gpu", "does not run on"), ("triton", "not one of")):
        with pytest.raises(InputError, match=message):
            read((bank, partial, *vectors), name)
