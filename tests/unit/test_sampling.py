"""Sampling against a NumPy float64 oracle of the kept set, and what must not depend on what."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3jax.errors import InputError
from k3jax.generate.sampling import BAD_ROW, check_options, sample, sample_step, support
from k3jax.generate.timing import CompileClock

B, V = 128, 33
MASS_MARGIN = 1e-5  # float32 sums of 33 probabilities err by 1e-7; nearer to top_p either is right


def oracle(logits_V, temperature, top_k, top_p):
    """(tokens that must be kept, tokens that may be), one row, float64."""
    logits_V = np.asarray(logits_V, np.float64)
    order = sorted(range(V), key=lambda token: (-logits_V[token], token))
    order = order[:top_k] if top_k else order
    p = np.exp((logits_V[order] - logits_V.max()) / temperature)
    p /= p.sum()
    before = np.cumsum(p) - p
    must = {t for t, b in zip(order, before, strict=True) if b < top_p - MASS_MARGIN}
    may = {t for t, b in zip(order, before, strict=True) if b < top_p + MASS_MARGIN}
    return {order[0]} | must, {order[0]} | may


def draw_options(rng):
    return (
        rng.choice([0.1, 0.7, 1.0, 3.0], B).astype(np.float32),
        rng.choice([0, 1, 2, 5, V, V + 9], B).astype(np.int32),
        rng.choice([1e-9, 0.1, 0.5, 0.9, 0.999, 1.0], B).astype(np.float32),
    )


def draw_logits(rng, ties):
    logits_BV = rng.normal(scale=3, size=(B, V)).astype(np.float32)
    return np.round(logits_BV) if ties else logits_BV


class TestKeptSet:
    @given(st.integers(0, 2**31), st.booleans())
    @settings(max_examples=12, deadline=None)
    def test_oracle(self, seed, ties):
        rng = np.random.default_rng(seed)
        logits_BV, options = draw_logits(rng, ties), draw_options(rng)
        kept_BV = np.asarray(support(logits_BV, *options))
        ids_B = np.asarray(sample(logits_BV, jax.random.key(seed), *options))
        for row, (kept_V, token) in enumerate(zip(kept_BV, ids_B, strict=True)):
            must, may = oracle(logits_BV[row], *(option[row] for option in options))
            kept = set(np.flatnonzero(kept_V).tolist())
            assert must <= kept <= may
            assert int(token) in kept

    def test_order_is_temperature_top_k_top_p(self):
        logits_BV = np.full((B, V), -np.inf, np.float32)
        logits_BV[:, :4] = np.log([0.4, 0.3, 0.2, 0.1])
        options = np.asarray([(1, 0, 0.5), (1, 2, 0.5), (1, 0, 0.6), (100, 0, 0.6)] * (B // 4))
        kept_BV = support(
            logits_BV,
            options[:, 0].astype(np.float32),
            options[:, 1].astype(np.int32),
            options[:, 2].astype(np.float32),
        )
        # .4 + .3 reach .5 and .6; after top-k 2 the first is .57 and enough; at temperature 100
        # the four are .252 .251 .250 .247.
        assert np.asarray(kept_BV).sum(-1)[:4].tolist() == [2, 1, 2, 3]

    def test_exactly_top_k_of_equal_logits(self):
        kept_BV = np.asarray(support(np.zeros((B, V), np.float32), 1.0, 4, 1.0))
        assert np.flatnonzero(kept_BV[0]).tolist() == [0, 1, 2, 3]


class TestDraw:
    def test_greedy_takes_the_lowest_id_of_equals(self):
        logits_BV = np.zeros((B, V), np.float32)
        logits_BV[1, [5, 20]] = 4.0
        assert np.asarray(sample(logits_BV, jax.random.key(0)))[:2].tolist() == [0, 5]

    @pytest.mark.parametrize(
        "options",
        [
            (np.float32(0.5), np.int32(0), np.float32(1)),
            (np.float32(0.5), np.int32(6), np.float32(0.9)),
        ],
    )
    def test_frequencies(self, options):
        calls = 160
        logits_V = np.linspace(0, 2, V).astype(np.float32)
        logits_BV = np.broadcast_to(logits_V, (B, V))
        kept_V = np.asarray(support(logits_BV, *options))[0]
        p_V = np.where(kept_V, np.exp(logits_V / options[0]), 0)
        p_V = p_V / p_V.sum()
        key = jax.random.key(1)
        drawn = [
            sample_step(logits_BV, key, np.int32(n), *map(np.asarray, options))
            for n in range(calls)
        ]
        share_V = np.bincount(np.concatenate(drawn), minlength=V) / (calls * B)
        sigma_V = np.sqrt(p_V * (1 - p_V) / (calls * B))
        assert (np.abs(share_V - p_V) <= 4 * sigma_V).all()
        if options[1]:
            assert (share_V[~kept_V] == 0).all()
            assert 1 < kept_V.sum() < 7

    def test_rows_do_not_depend_on_each_other(self):
        rng = np.random.default_rng(3)
        logits_BV, options = draw_logits(rng, False), draw_options(rng)
        options[0][::3] = 0
        data_B2 = np.asarray(jax.random.key_data(jax.random.split(jax.random.key(2), B)))
        rows_BX = (logits_BV, data_B2, *options)

        def draw(logits_BV, data_B2, *options):
            return np.asarray(
                sample(logits_BV, jax.random.wrap_key_data(data_B2), *options)
            ).tolist()

        some = range(0, B, 5)
        alone = [draw(*(rows[r : r + 1] for rows in rows_BX)) for r in some]
        together_B = draw(*rows_BX)
        assert [together_B[r] for r in some] == [token for (token,) in alone]

    def test_no_filter_draws_as_a_filter_that_keeps_all(self):
        logits_BV = draw_logits(np.random.default_rng(4), False)
        key = jax.random.key(5)
        plain_B, kept_B = sample(logits_BV, key, 0.8), sample(logits_BV, key, 0.8, V)
        assert np.asarray(plain_B).tolist() == np.asarray(kept_B).tolist()

    def test_key_decides(self):
        logits_BV = np.zeros((B, V), np.float32)
        first, again, other = (
            np.asarray(sample(logits_BV, jax.random.key(seed), 1.0)).tolist() for seed in (0, 0, 1)
        )
        assert first == again
        assert first != other
        assert len(set(first)) > 10

    def test_tiny_temperature_is_greedy(self):
        logits_BV = draw_logits(np.random.default_rng(6), False)
        ids_B = np.asarray(sample(logits_BV, jax.random.key(0), 1e-30, 5, 0.9))
        assert ids_B.tolist() == logits_BV.argmax(-1).tolist()

    def test_bfloat16_logits(self):
        logits_BV = jnp.asarray(draw_logits(np.random.default_rng(6), True), jnp.bfloat16)
        ids_B = np.asarray(sample(logits_BV, jax.random.key(0)))
        assert ids_B.tolist() == np.asarray(logits_BV, np.float32).argmax(-1).tolist()


class TestBadLogits:
    @pytest.mark.parametrize("options", [(0.0, 0, 1.0), (1.0, 0, 1.0), (1.0, 3, 0.9)])
    def test_bad_rows_are_marked_and_only_they(self, options):
        logits_BV = np.zeros((B, V), np.float32)
        logits_BV[0, 4] = np.nan
        logits_BV[1, 4] = np.inf
        logits_BV[2] = -np.inf
        logits_BV[3, :-1] = -np.inf
        ids_B = np.asarray(sample(logits_BV, jax.random.key(0), *options))
        assert ids_B[:4].tolist() == [BAD_ROW, BAD_ROW, BAD_ROW, V - 1]
        assert 0 <= ids_B[4] < V


class TestCompilation:
    def test_no_option_compiles_anew(self):
        rng = np.random.default_rng(7)
        logits_BV, key = draw_logits(rng, False), jax.random.key(0)
        sample(logits_BV, key, 0.0, 0, 1.0)
        sample(logits_BV, key, np.float32(1), np.int32(1), 1)
        with CompileClock() as clock:
            for _ in range(500):
                temperature, top_k, top_p = (option[0] for option in draw_options(rng))
                sample(
                    logits_BV,
                    key,
                    float(temperature) * (rng.random() < 0.8),
                    int(top_k),
                    float(top_p),
                )
        assert clock.compilations == 0

    def test_the_clock_sees_a_compilation(self):
        step = jax.jit(lambda x_B: x_B * 3 + 1)
        x_B = jnp.zeros(5)
        with CompileClock() as clock:
            step(x_B)
            step(x_B)
        assert clock.compilations == 1
        assert clock.seconds(0.0, np.inf) > 0
        assert clock.seconds(0.0, 1e-9) == 0

    def test_step_folds_the_key(self):
        logits_BV = np.zeros((B, V), np.float32)
        key = jax.random.key(0)
        options = (jnp.float32(1), jnp.int32(0), jnp.float32(1))
        one, two = (
            np.asarray(sample_step(logits_BV, key, np.int32(step), *options)) for step in (1, 2)
        )
        assert one.tolist() != two.tolist()
        want_B = sample(logits_BV, jax.random.fold_in(key, 1), 1.0)
        assert one.tolist() == np.asarray(want_B).tolist()


class TestOptions:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ((-0.1, 0, 1.0), "temperature -0.1"),
            ((float("nan"), 0, 1.0), "temperature nan"),
            ((float("inf"), 0, 1.0), "temperature inf"),
            ((1.0, -1, 1.0), "top_k -1"),
            ((1.0, 2**31, 1.0), "top_k 2147483648"),
            ((1.0, 0, 0.0), "top_p 0.0"),
            ((1.0, 0, 1.01), "top_p 1.01"),
            ((1.0, 0, float("nan")), "top_p nan"),
        ],
    )
    def test_refused(self, options, message):
        with pytest.raises(InputError, match=message):
            check_options(*options)

    def test_accepted(self):
        check_options(0.0, 0, 1.0)
        check_options(2.0, 5, 1e-9)
