"""Index keys in eight bits: exact selection over what the codes say, from op to model."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tiny
import tolerances as tol
from flax import nnx

from k3jax.cache import state
from k3jax.ops import choice, dsa
from k3jax.ops.dsa import reference
from k3jax.ops.rows import Scaled
from k3jax.quantization import fp8
from k3jax.runtime import Model

FP32 = 1e-6  # max|d| / max|float64| of scores; measured 1.2e-7 (2,064 keys of 128)
B, T, S, H, K, TOPK = 2, 6, 100, 4, 8, 16
POSITIONS = jnp.asarray([[99, 50, 16, 15, 3, -1], [98, 97, 40, 0, -1, -1]], jnp.int32)

quantize = jax.jit(fp8.quantize)
select = jax.jit(dsa.select, static_argnames=("topk", "query_block", "key_block"))


def case(*shape, seed=0):
    b, t, s, h, k = shape or (B, T, S, H, K)
    rng = np.random.default_rng([seed, t, s])
    shapes = (b, t, h, k), (b, s, k), (b, t, h)
    return tuple(jnp.asarray(rng.normal(size=n), jnp.float32) for n in shapes)


def stored(k) -> Scaled:
    return Scaled.of(*quantize(k))


def values(x) -> np.ndarray:
    """What codes and factors of x say, in float64."""
    codes, factors = quantize(x)
    return np.asarray(codes, np.float64) * np.asarray(factors, np.float64)[..., None]


class TestQuantize:
    def test_equals_numpy(self):
        x = np.random.default_rng(0).normal(size=(64, 128)).astype(np.float32)
        x *= np.float32(10.0) ** np.arange(-32, 32, dtype=np.float32)[:, None]
        codes, factors = quantize(x)
        assert (codes.dtype, factors.dtype) == (jnp.float8_e4m3fn, jnp.float32)
        want = np.abs(x).max(-1) * np.float32(1 / 448)
        np.testing.assert_array_equal(factors, want)
        want = (x / want[:, None]).astype(ml_dtypes.float8_e4m3fn)
        np.testing.assert_array_equal(np.asarray(codes).view(np.uint8), want.view(np.uint8))
        top = np.abs(np.asarray(codes, np.float32)).max(-1)
        assert (top == 448).all()

    def test_bfloat16_and_error(self):
        x = jnp.asarray(np.random.default_rng(1).normal(size=(64, 128)), jnp.bfloat16)
        exact = np.asarray(x, np.float64)
        error = np.abs(values(x) - exact)
        # Half a step: 1/16 of a value, or of the least normal code, 2**-6.
        step = np.abs(exact).max(-1, keepdims=True) / 448
        assert (error <= np.maximum(np.abs(exact) / 16, step * 2.0**-10) * (1 + 1e-6)).all()

    @pytest.mark.parametrize("small", [0.0, 1e-42, 1e-38])
    def test_rows_of_almost_nothing(self, small):
        x = jnp.full((2, K), small, jnp.float32)
        codes, factors = quantize(x)
        assert (np.asarray(factors) == 2.0**-126).all()
        assert (np.abs(np.asarray(codes, np.float32)) <= 1).all()
        assert small or not np.asarray(codes, np.float32).any()

    @pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
    def test_what_is_not_finite_stays_so(self, odd):
        codes, _ = quantize(jnp.ones((2, K)).at[0, 3].set(odd))
        assert np.isnan(np.asarray(codes[0], np.float32)).any()
        assert (np.asarray(codes[1], np.float32) == 448).all()


class TestSelect:
    @pytest.mark.parametrize("shape", [(B, T, S, H, K), (1, 3, 2064, 32, 128)])
    def test_scores(self, shape):
        q, k, w = case(*shape)
        got = np.asarray(dsa.scores(q, stored(k), w))
        want = reference.scores(values(q), values(k), w)
        assert np.abs(got - want).max() < FP32 * np.abs(want).max()
        assert np.abs(got - reference.scores(q, k, w)).max() > 1e-3 * np.abs(want).max()

    @pytest.mark.parametrize("blocks", [{}, {"query_block": 2, "key_block": 33}])
    def test_equals_the_oracle_on_what_the_codes_say(self, blocks):
        q, k, w = case()
        k = k.at[:, 1::2].set(k[:, :1])  # half of the keys tie
        want = reference.select(values(q), values(k), w, POSITIONS, TOPK)
        np.testing.assert_array_equal(select(q, stored(k), w, POSITIONS, TOPK, **blocks), want)
        rank, at = dsa.candidates(q, stored(k), w, POSITIONS, TOPK)
        at = np.where(np.asarray(rank) == -np.inf, S, at)
        np.testing.assert_array_equal(np.sort(at, -1), np.where(want < 0, S, want))

    def test_real_sizes(self):
        q, k, w = case(1, 3, 2064, 32, 128)
        positions = jnp.asarray([[2063, 2050, 2047]], jnp.int32)
        want = reference.select(values(q), values(k), w, positions, 2048)
        np.testing.assert_array_equal(select(q, stored(k), w, positions, 2048), want)

    def test_pages_and_stacks(self):
        q, k, w = case()
        want = select(q, stored(k), w, POSITIONS, TOPK)
        codes, factors = quantize(k)
        table = np.random.default_rng(0).permutation(12).reshape(2, 6)[:, :5]
        pools = [np.full((2, 12, 20, *a.shape[2:]), np.nan, a.dtype) for a in (codes, factors)]
        for pool, a in zip(pools, (codes, factors), strict=True):
            pool[1, table] = np.asarray(a).reshape(2, 5, 20, *a.shape[2:])
        views = Scaled.of(*map(jnp.asarray, pools), jnp.int32(1), jnp.asarray(table, jnp.int32))
        np.testing.assert_array_equal(select(q, views, w, POSITIONS, TOPK), want)
        second = select(q[1:], views.sequences(1, 1), w[1:], POSITIONS[1:], TOPK)
        np.testing.assert_array_equal(second, want[1:])

    @pytest.mark.parametrize("odd", [np.nan, np.inf])
    def test_odd_keys_come_last(self, odd):
        """Below every finite score, but legal; behind the position they are nothing at all."""
        q, k, w = case()
        w = -jnp.abs(w)  # finite scores are negative or zero
        k = k.at[:, :90, 2].set(odd).at[:, 99].set(np.nan)
        got = np.asarray(select(q, stored(k), w, POSITIONS, TOPK))
        at = np.asarray(POSITIONS)
        for index, position in zip(got.reshape(-1, TOPK), at.reshape(-1), strict=True):
            finite = [s for s in range(90, 99) if s <= position]
            rest = [s for s in (*range(90), 99) if s <= position][: TOPK - len(finite)]
            assert [s for s in index if s >= 0] == sorted(finite + rest)

    def test_powers_of_two_change_nothing(self):
        q, k, w = case()
        want = select(q, stored(k), w, POSITIONS, TOPK)
        got = select(q * 2**20, stored(k * 2**-30), w, POSITIONS, TOPK)
        np.testing.assert_array_equal(got, want)

    def test_what_a_kernel_gets(self, monkeypatch):
        q, k, w = case()
        seen = []

        def kernel(q, rows, w, positions, topk):
            assert (q.dtype, rows.dtype, w.dtype) == (fp8.DTYPE, fp8.DTYPE, jnp.float32)
            assert rows.factors.shape == (B, S, 1)
            return jnp.zeros((B, T, topk)), jnp.broadcast_to(jnp.arange(topk), (B, T, topk))

        def refusal(q, rows, w, topk):
            seen.append(rows.dtype)

        monkeypatch.setitem(dsa.SELECT, "some", kernel)
        kernels = {"some": choice.Kernel(lambda kind: True, refusal)}
        monkeypatch.setattr(dsa, "SELECT_KERNELS", kernels)
        got = dsa.select(q, stored(k), w, POSITIONS, TOPK)
        assert got.tolist() == [[list(range(TOPK))] * T] * B
        assert seen == [fp8.DTYPE]

    def test_refused(self):
        q, k, w = case()
        codes, factors = quantize(k)
        for keys, words in (
            (Scaled.of(k, factors), "float8_e4m3fn"),
            (Scaled.of(codes, factors.astype(jnp.bfloat16)), "bfloat16"),
            (Scaled.of(codes, factors[:, :-1]), "99, 1"),
            (Scaled.of(codes[..., :4], factors), "do not fit"),
            (codes, "must share"),
        ):
            with pytest.raises(ValueError, match=words):
                dsa.select(q, keys, w, POSITIONS, TOPK)
        with pytest.raises(ValueError, match="q must be"):
            dsa.select(q.astype(fp8.DTYPE), stored(k), w, POSITIONS, TOPK)


def test_agreement():
    a = jnp.asarray([[[0, 2, 4, -1], [1, 2, 3, 4]]], jnp.int32)
    b = jnp.asarray([[[2, 4, 5, -1, -1], [5, 6, 7, 8, -1]]], jnp.int32)
    assert float(dsa.agreement(a, b)) == pytest.approx(2 / 7)
    assert float(dsa.agreement(a, a)) == 1
    assert float(dsa.agreement(jnp.full((1, 2, 4), -1, jnp.int32), a)) == 1


@pytest.mark.parametrize(
    ("queries", "keys", "topk", "least"), [(64, 200, 16, 0.9), (8, 16384, 2048, 0.95)]
)
def test_agreement_with_bfloat16(queries, keys, topk, least):
    """Of random queries, keys and weights, all independent: 32 heads of 128."""
    q, k, w = case(1, queries, keys, 32, 128)
    q, k = q.astype(jnp.bfloat16), k.astype(jnp.bfloat16)
    positions = jnp.full((1, queries), keys - 1, jnp.int32)
    share = dsa.agreement(
        select(q, stored(k), w, positions, topk), select(q, k, w, positions, topk)
    )
    print(f"fp8 index keys: {float(share):.4f} of the top {topk} of {keys} are those of bfloat16")
    assert least < float(share) < 1


def config(**changes):
    base = tiny.config(**changes)
    return dataclasses.replace(
        base, dsa=dataclasses.replace(base.dsa, index_key_dtype="float8_e4m3fn")
    )


@functools.cache
def model() -> Model:
    return Model(tiny.module(config()))


class TestModel:
    def test_cache_holds_codes_and_factors(self):
        plain = state.empty(tiny.config(), 2, 64, jnp.bfloat16).period[1]
        assert (plain.index_key_BSK.dtype, plain.index_factor_BS) == (jnp.bfloat16, None)
        one = state.empty(config(), 2, 64, jnp.bfloat16).period[1]
        assert (one.index_key_BSK.shape, one.index_key_BSK.dtype) == ((2, 2, 64, 8), fp8.DTYPE)
        assert (one.index_factor_BS.shape, one.index_factor_BS.dtype) == ((2, 2, 64), jnp.float32)
        assert one.latent_BSC.dtype == jnp.bfloat16
        names = state.axes(state.empty(config(), 2, 64, jnp.bfloat16, 16)).period[1]
        assert names.index_factor_BS == ("layers", "batch", "cache_sequence")

    def test_forward_prefill_and_decode_select_alike(self):
        """Without a cache, in two pieces and token by token, contiguous and in pages."""
        m, ids = model(), tiny.tokens(2, 40)
        logits, aux = m.forward(ids, collect=("index",))
        wide = Model(tiny.module(tiny.config())).forward(ids, collect=("index",))[1]
        share = float(dsa.agreement(aux["selected"][0], wide["selected"][0]))
        assert 0.8 < share < 1  # eight bits are seen
        results = []
        for page in (None, 16):
            cache = m.init_cache(2, 60, page_size=page)
            steps, start = [], 0
            for n in (20, 17, 1, 1, 1):
                piece = ids[:, start : start + n]
                if n > 1:
                    last, cache = m.prefill(piece, cache)
                else:
                    last, cache = m.decode(piece[:, 0], cache)
                start += n
                steps.append(np.asarray(last))
                error = np.abs(last - logits[:, start - 1]).max()
                assert error <= tol.MODEL_FP32 * np.abs(logits).max()
            results.append(np.stack(steps))
        np.testing.assert_array_equal(*results)

    def test_keys_in_the_cache(self):
        """Those that the model makes without a cache of eight bits, up to their rounding."""
        m, ids = model(), tiny.tokens(2, 40)
        _, cache = m.prefill(ids, m.init_cache(2, 60))
        wide = Model(tiny.module(tiny.config()))
        _, plain = wide.prefill(ids, wide.init_cache(2, 60))
        # The first global layer: later ones read what the selection changed.
        got = cache.arrays.period[1].index_keys(jnp.int32(0))
        want = np.asarray(plain.arrays.period[1].index_keys(jnp.int32(0)).whole())[:, :40]
        got = np.asarray(got.codes.whole(), np.float32) * np.asarray(got.factors.whole())
        error = np.abs(got[:, :40] - want).max(-1) / np.abs(want).max(-1)
        assert 1e-3 < error.max() <= 1 / 28 * (1 + 1e-3)


def test_an_indexer_that_trains_sees_its_keys():
    module = tiny.module(config(), indexer="sparse")
    ids = jnp.asarray(tiny.tokens(1, 24))

    def loss(module):
        return (module(ids, collect=("indexer",))[1]["index_scores"] ** 2).sum()

    grads = nnx.jit(nnx.grad(loss))(module)
    wk = grads.period[1].attention.indexer.wk
    assert np.abs(np.asarray(wk[...])).max() > 0
