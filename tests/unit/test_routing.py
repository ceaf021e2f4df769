"""The router: which experts, and with which weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from k3jax.errors import InputError
from k3jax.ops.routing import IMPLEMENTATIONS, reference, route, scores
from k3jax.ops.routing.xla import select

WEIGHT = 1e-6  # relative error of a weight against float64; measured 3.1e-7
GAP = 1e-6  # scores closer than this may swap: float32 has 1e-7 at 1, 1e-6 at 12; measured 7.3e-7


def logit(p):
    return np.log(p) - np.log1p(-p)


def through(score_NE):
    """Inputs whose router scores are the given ones: x = logits, w = identity."""
    score_NE = np.asarray(score_NE, np.float64)
    return jnp.asarray(logit(score_NE), jnp.float32), jnp.eye(score_NE.shape[1])


def sets_and_gaps(choice_NE, k):
    """Oracle: the k largest of each row as sorted ids, and the gap to the first one left out."""
    order = np.argsort(-choice_NE, axis=1, kind="stable")
    ranked = np.take_along_axis(choice_NE, order, axis=1)
    return np.sort(order[:, :k], axis=1), ranked[:, k - 1] - ranked[:, k]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
class TestRoute:
    @pytest.mark.parametrize("renormalize", [True, False])
    def test_reference(self, implementation, renormalize):
        rng = np.random.default_rng(0)
        x, w = rng.standard_normal((50, 48)), rng.standard_normal((32, 48)) / 4
        bias = rng.standard_normal(32) / 8
        x, w, bias = (jnp.asarray(a, jnp.float32) for a in (x, w, bias))
        ids, weights = route(
            x, w, bias, 4, scaling=2.5, renormalize=renormalize, implementation=implementation
        )
        assert (ids.dtype, weights.dtype) == (jnp.int32, jnp.float32)
        want_ids, want_weights = reference.route(x, w, bias, 4, 2.5, renormalize)
        np.testing.assert_array_equal(ids, want_ids)
        np.testing.assert_allclose(weights, want_weights, rtol=WEIGHT)

    @pytest.mark.parametrize("kind", ["random", "fine"])
    def test_16_of_896(self, implementation, kind):
        """10,000 tokens. The fine biases are 1e-4 apart near 12, where bfloat16 steps by 0.06."""
        rng = np.random.default_rng(1)
        x = rng.standard_normal((10_000, 32)).astype(np.float32)
        w = (rng.standard_normal((896, 32)) / 4).astype(np.float32)
        if kind == "random":
            bias = rng.standard_normal(896).astype(np.float32) / 4
        else:
            bias = (12 + 1e-4 * rng.permutation(896)).astype(np.float32)
        ids, weights = jax.jit(lambda *a: route(*a, 16, implementation=implementation))(
            *map(jnp.asarray, (x, w, bias))
        )
        score = 1 / (1 + np.exp(-(x.astype(np.float64) @ w.T.astype(np.float64))))
        want, gap = sets_and_gaps(score + bias.astype(np.float64), 16)
        clear = gap > GAP
        assert clear.mean() > 0.99
        np.testing.assert_array_equal(np.sort(ids, axis=1)[clear], want[clear])
        chosen = np.take_along_axis(score, np.asarray(ids), axis=1)
        np.testing.assert_allclose(weights, chosen / chosen.sum(1, keepdims=True), rtol=WEIGHT)
        if kind == "fine":  # the test can fail: biases rounded to bfloat16 choose otherwise
            rounded = bias.astype(jnp.bfloat16).astype(np.float64)
            other, _ = sets_and_gaps(score + rounded, 16)
            assert (other[clear] != want[clear]).any(axis=1).mean() > 0.5

    def test_weights_are_not_score_minus_bias(self, implementation):
        rng = np.random.default_rng(2)
        logits = rng.uniform(-19, -17, (64, 32))
        bias = rng.uniform(11.9, 12.1, 32).astype(np.float32)
        ids, weights = route(
            jnp.asarray(logits, jnp.float32),
            jnp.eye(32),
            jnp.asarray(bias),
            4,
            implementation=implementation,
        )
        score = 1 / (1 + np.exp(-logits.astype(np.float32).astype(np.float64)))
        chosen = np.take_along_axis(score, np.asarray(ids), axis=1)
        np.testing.assert_allclose(weights, chosen / chosen.sum(1, keepdims=True), rtol=1e-5)
        np.testing.assert_allclose(weights.sum(axis=1), 1.0, atol=1e-6)
        assert np.float32(np.float32(score[0, 0]) + bias[0]) - bias[0] == 0  # what would be left

    def test_constant_added_to_every_bias(self, implementation):
        rng = np.random.default_rng(3)
        x, w = through(rng.permuted(np.tile(np.arange(1, 33) / 33, (64, 1)), axis=1))
        bias = jnp.asarray(rng.integers(-8, 8, 32) / 64 + rng.permutation(32) / 4096, jnp.float32)
        run = lambda bias: route(x, w, bias, 4, implementation=implementation)  # noqa: E731
        for constant in (0.5, -2.0, 4.0):
            for a, b in zip(run(bias), run(bias + constant), strict=True):
                np.testing.assert_array_equal(a, b)

    def test_one_bias_swaps_one_expert_in(self, implementation):
        rng = np.random.default_rng(4)
        x, w = through(rng.permuted(np.tile(np.arange(1, 65) / 65, (32, 1)), axis=1))
        run = lambda bias: route(x, w, bias, 16, implementation=implementation)  # noqa: E731
        ids, weights = map(np.asarray, run(jnp.zeros(64)))
        new_ids, new_weights = map(np.asarray, run(jnp.zeros(64).at[5].set(2.0)))
        swapped = 0
        for n in range(32):
            if 5 in ids[n]:
                assert set(ids[n]) == set(new_ids[n])
                continue
            swapped += 1
            assert new_ids[n][0] == 5
            assert set(new_ids[n][1:]) == set(ids[n][:15])
            ratio = new_weights[n][1:] / weights[n][:15]
            np.testing.assert_allclose(ratio, ratio[0], rtol=1e-6)
        assert swapped > 10

    @pytest.mark.parametrize("tokens", [1, 8, 64])
    def test_near_ties_on_8_devices(self, implementation, tokens):
        """As many tokens a device on 8 as all of them on one: the same experts, in the same order.

        Logits are whole multiples of 2^-16 below 16, so every order of summing gives them exactly
        and the scores, around 1, differ by nothing or by one step of float32 for most neighbours.
        """
        rng = np.random.default_rng(tokens)
        x = rng.integers(1, 3, (8 * tokens, 16)).astype(np.float32)
        w = rng.integers(2**14, 2**15, (64, 16))
        w = np.concatenate([w, w, w + 2 * rng.integers(-1, 2, w.shape)]) / np.float32(2**16)
        bias = np.float32(2**-24) * rng.integers(-1, 2, 192).astype(np.float32)
        x, w, bias = map(jnp.asarray, (x, w.astype(np.float32), bias))
        mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
        split, everywhere = PartitionSpec("data"), PartitionSpec()
        one = lambda *a: route(*a, 16, implementation=implementation)  # noqa: E731
        many = jax.shard_map(
            one, mesh=mesh, in_specs=(split, everywhere, everywhere), out_specs=split
        )
        ids, weights = jax.jit(one)(x, w, bias)
        spread_ids, spread_weights = jax.jit(many)(x, w, bias)
        np.testing.assert_array_equal(spread_ids, ids)
        np.testing.assert_allclose(spread_weights, weights, rtol=WEIGHT)  # summed otherwise
        ranked = -np.sort(-np.asarray(scores(x, w) + bias), axis=1)
        edge = ranked[:, 15] - ranked[:, 16]  # between the last chosen and the first left out
        assert (edge <= 2**-23).mean() > 0.5
        assert len(np.unique(np.asarray(scores(x, w))[0])) > 16  # and not all alike

    def test_ties_go_to_the_lowest_expert(self, implementation):
        for n in (1, 7):
            ids, _ = route(
                jnp.ones((n, 8)), jnp.ones((100, 8)), jnp.zeros(100), 16,
                implementation=implementation,
            )  # fmt: skip
            np.testing.assert_array_equal(ids, np.tile(np.arange(16), (n, 1)))

    def test_nan(self, implementation):
        rng = np.random.default_rng(5)
        x, w = jnp.asarray(rng.standard_normal((6, 32)), jnp.float32), jnp.eye(32)
        run = lambda x, bias: route(x, w, bias, 4, implementation=implementation)  # noqa: E731
        ids, weights = run(x, jnp.zeros(32))
        bad_ids, bad_weights = run(x.at[2].set(jnp.nan), jnp.zeros(32))
        others = np.array([0, 1, 3, 4, 5])
        np.testing.assert_array_equal(bad_ids[others], ids[others])
        np.testing.assert_array_equal(bad_weights[others], weights[others])
        assert np.isnan(bad_weights[2]).all()
        assert ((bad_ids >= 0) & (bad_ids < 32)).all()
        best = int(ids[0, 0])
        ids, weights = run(x, jnp.zeros(32).at[best].set(jnp.nan))
        assert not (ids == best).any()
        assert np.isfinite(weights).all()

    def test_scaling_is_linear_and_applied_once(self, implementation):
        x = jax.random.normal(jax.random.key(0), (9, 16))
        w = jax.random.normal(jax.random.key(1), (8, 16))
        for scaling in (1.0, 2.5, 7.0):
            _, weights = route(
                x, w, jnp.zeros(8), 3, scaling=scaling, implementation=implementation
            )
            np.testing.assert_allclose(weights.sum(axis=1), scaling, rtol=1e-6)

    def test_bfloat16_at_full_width(self, implementation):
        """The products of bfloat16 x and w are summed in float32: 7,168 of them, 896 experts,
        against float64. Weights measured 2.4e-7 off, scores 3.6e-7."""
        rng = np.random.default_rng(8)
        x = jnp.asarray(rng.standard_normal((64, 7168)), jnp.bfloat16)
        w = jnp.asarray(rng.standard_normal((896, 7168)) / 85, jnp.bfloat16)
        ids, weights = jax.jit(
            lambda x, w: route(x, w, jnp.zeros(896), 16, implementation=implementation)
        )(x, w)
        wide = np.asarray(x, np.float32).astype(np.float64) @ np.asarray(w, np.float64).T
        score = 1 / (1 + np.exp(-wide))
        want, gap = sets_and_gaps(score, 16)
        clear = gap > GAP
        assert clear.mean() > 0.9
        np.testing.assert_array_equal(np.sort(ids, axis=1)[clear], want[clear])
        chosen = np.take_along_axis(score, np.asarray(ids), axis=1)
        np.testing.assert_allclose(weights, chosen / chosen.sum(1, keepdims=True), rtol=WEIGHT)

    def test_input_dtype(self, implementation):
        """bfloat16 inputs are exact in float32, so both settings agree; float32 ones are not."""
        rng = np.random.default_rng(6)
        x, w = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in [(20, 64), (16, 64)])

        def run(x, w, dtype):
            return route(x, w, jnp.zeros(16), 4, dtype=dtype, implementation=implementation)[1]

        half = x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)
        a, b = run(*half, "float32"), run(*half, "bfloat16")
        assert a.dtype == b.dtype == jnp.float32
        np.testing.assert_allclose(a, b, rtol=1e-5)
        assert np.abs(run(x, w, "float32") - run(x, w, "bfloat16")).max() > 1e-4

    def test_gradient(self, implementation):
        """Through the weights, not through the choice; equal to a finite difference."""
        rng = np.random.default_rng(7)
        x, w, d = (rng.standard_normal(s) for s in [(5, 24), (12, 24), (5, 24)])
        c = rng.standard_normal((5, 3))

        def value(x):
            return (reference.route(x, w, np.zeros(12), 3)[1] * c).sum()

        want = (value(x + 1e-6 * d) - value(x - 1e-6 * d)) / 2e-6
        f = lambda x: (  # noqa: E731
            route(x, jnp.asarray(w, jnp.float32), jnp.zeros(12), 3,
                  implementation=implementation)[1] * jnp.asarray(c, jnp.float32)
        ).sum()  # fmt: skip
        gradient = jax.grad(f)(jnp.asarray(x, jnp.float32))
        assert float((np.asarray(gradient) * d).sum()) == pytest.approx(want, rel=1e-4)

    def test_no_tokens(self, implementation):
        ids, weights = route(
            jnp.zeros((0, 4)), jnp.ones((8, 4)), jnp.zeros(8), 2, implementation=implementation
        )
        assert ids.shape == weights.shape == (0, 2)


def test_select_canonicalises_zero():
    score = jnp.array([[-0.0, 0.0, jnp.nan, -1.0, -jnp.inf, 0.0, 2.0]])
    want = [[6, 0, 1, 5, 3]]
    assert select(score, 5).tolist() == want
    assert jax.jit(select, static_argnums=1)(score, 5).tolist() == want


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": 9}, "k = 9 is outside 1..8"),
        ({"k": 0}, "k = 0"),
        ({"bias_E": jnp.zeros(8, jnp.bfloat16)}, "bias is bfloat16"),
        ({"bias_E": jnp.zeros(7)}, r"bias \(7,\)"),
        ({"x_ND": jnp.ones((3, 5))}, r"x \(3, 5\)"),
        ({"implementation": "cuda"}, "'cuda' is not one of"),
    ],
)
def test_refusals(change, message):
    good = {"x_ND": jnp.ones((3, 4)), "w_ED": jnp.ones((8, 4)), "bias_E": jnp.zeros(8), "k": 2}
    with pytest.raises((InputError, ValueError), match=message):
        route(**(good | change))
