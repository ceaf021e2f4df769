"""The portable forms of the routed experts, also on plain weights; and tiles of rows.

What they share with kernels is in tests/moe_contract.py.
"""

import logging
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.errors import InputError
from k3jax.ops.grouped_matmul import activation_error, experts, reference
from k3jax.ops.grouped_matmul.xla import tile_map, tile_rows
from k3jax.quantization.mxfp4 import MXFP4, pack

FP32 = 1e-5  # max|d| / max|reference in float64|; measured 4.9e-7
BF16 = 1e-2  # against a reference that rounds at the same places; measured 2.7e-3
SAME_BITS = 0.9  # of the bfloat16 results; measured 1.0, and 0.43 without the inner roundings
GRADIENT = 1e-5  # dense against tiles, max|d| / max|gradient|; measured 4.5e-7
DIRECTIONAL = 1e-5  # against a float64 finite difference; measured 3e-7

E, K, L, F = 8, 2, 64, 32
BETAS = {"situ_beta": 4.0, "situ_linear_beta": 25.0}


@cache
def weights(form="packed", dtype=jnp.float32, seed=0):
    """w13 [E, 2F, L] and w2 [E, L, F] whose gates reach the bend of tanh."""
    rng = np.random.default_rng(seed)
    w13 = jnp.asarray(rng.standard_normal((E, 2 * F, L)) / 4, dtype)
    w2 = jnp.asarray(rng.standard_normal((E, L, F)) / 4, dtype)
    return (jax.jit(pack)(w13), jax.jit(pack)(w2)) if form == "packed" else (w13, w2)


def choose(kind, n, rng):
    """int32 [n, K], no expert twice for a token."""
    if kind == "one":  # every token to the same experts
        return np.tile(np.array([5, 2], np.int32), (n, 1))
    if kind == "uneven":  # expert 0 always, experts 6 and 7 never
        return np.stack([[0, rng.integers(1, 6)] for _ in range(n)]).astype(np.int32)
    return np.stack([rng.permutation(E)[:K] for _ in range(n)]).astype(np.int32)


def inputs(n, kind="uniform", dtype=jnp.float32, seed=1):
    rng = np.random.default_rng(seed)
    z = jnp.asarray(rng.standard_normal((n, L)), dtype)
    return z, jnp.asarray(choose(kind, n, rng)), jnp.asarray(rng.random((n, K)), jnp.float32)


@cache
def compiled(implementation):
    return jax.jit(partial(experts, implementation=implementation, **BETAS))


@pytest.fixture(params=["tiles", "dense"])
def run(request):
    return compiled(request.param)


def relative(got, want):
    want = np.asarray(want, np.float64)
    return np.abs(np.asarray(got, np.float64) - want).max() / np.abs(want).max()


class TestPortable:
    @pytest.mark.parametrize("kind", ["uniform", "one", "uneven"])
    @pytest.mark.parametrize("n", [1, 24])
    def test_reference_float32(self, run, n, kind):
        z, ids, weight = inputs(n, kind)
        w13, w2 = weights("plain")
        got = run(z, ids, weight, w13, w2)
        assert got.dtype == jnp.float32
        want = reference.experts(np.asarray(z, np.float64), ids, weight, w13, w2, **BETAS)
        assert relative(got, want) <= FP32

    def test_reference_bfloat16(self, run):
        z, ids, weight = inputs(24, dtype=jnp.bfloat16)
        w13, w2 = weights("plain", jnp.bfloat16)
        got = run(z, ids, weight, w13, w2)
        assert got.dtype == jnp.bfloat16
        want = reference.experts(z, ids, weight, w13, w2, **BETAS)
        assert relative(got, want) <= BF16
        assert (np.asarray(got) == want.astype(jnp.bfloat16)).mean() >= SAME_BITS

    def test_without_linear_beta(self, run):
        z, ids, weight = inputs(24)
        w13, w2 = weights("plain")
        implementation = run.__wrapped__.keywords["implementation"]
        betas = {"situ_beta": 4.0, "situ_linear_beta": None}
        unbounded = jax.jit(partial(experts, implementation=implementation, **betas))
        got = unbounded(z, ids, weight, w13, w2)
        want = reference.experts(np.asarray(z, np.float64), ids, weight, w13, w2, **betas)
        assert relative(got, want) <= FP32
        assert relative(got, run(z, ids, weight, w13, w2)) > 1e-3

    def test_gate_rows_come_first(self, run):
        z, ids, weight = inputs(24)
        w13, w2 = weights("plain")
        swapped = jnp.concatenate([w13[:, F:], w13[:, :F]], axis=1)
        assert relative(run(z, ids, weight, swapped, w2), run(z, ids, weight, w13, w2)) > 0.1

    @pytest.mark.parametrize("kind", ["uniform", "uneven"])
    def test_gradient_is_a_finite_difference(self, run, kind):
        z, ids, weight = inputs(24, kind)
        args = (z, weight, *weights("plain"))
        rng = np.random.default_rng(3)
        directions = [rng.standard_normal(a.shape) * np.abs(np.asarray(a)).mean() for a in args]
        c = rng.standard_normal(z.shape)

        def value(step):
            z, weight, w13, w2 = (
                np.asarray(a, np.float64) + step * d for a, d in zip(args, directions, strict=True)
            )
            return (reference.experts(z, ids, weight, w13, w2, **BETAS) * c).sum()

        want = (value(1e-5) - value(-1e-5)) / 2e-5
        loss = lambda z, weight, *w: (run(z, ids, weight, *w) * jnp.float32(c)).sum()  # noqa: E731
        gradients = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(*args)
        got = sum(
            (np.asarray(g, np.float64) * d).sum()
            for g, d in zip(gradients, directions, strict=True)
        )
        assert got == pytest.approx(want, rel=DIRECTIONAL)
        if kind == "uneven":
            assert not np.asarray(gradients[2])[6:].any()

    @pytest.mark.parametrize("form", ["packed", "plain"])
    def test_gradients_of_all_implementations_agree(self, run, form):
        z, ids, weight = inputs(24)
        ids = ids.at[3, 1].set(-1)
        w13, w2 = weights(form)
        argnums = (0, 1) if form == "packed" else (0, 1, 2, 3)
        c = jax.random.normal(jax.random.key(0), z.shape)

        def gradients(f):
            loss = lambda z, weight, *w: (f(z, ids, weight, *w) * c).sum()  # noqa: E731
            return jax.jit(jax.grad(loss, argnums=argnums))(z, weight, w13, w2)

        found = gradients(run)
        for got, want in zip(found, gradients(compiled("dense")), strict=True):
            assert got.dtype == want.dtype
            assert relative(got, want) <= GRADIENT
        assert found[1][3, 1] == 0

    def test_bad_rows_do_not_reach_weight_gradients(self, run):
        """A padded row, id -1, may hold NaN: the gradients of everything else are those without."""
        z, ids, weight = inputs(24)
        w = weights("plain")
        ids = ids.at[-1].set(-1)  # the last row, where an index past the end would be clamped to

        def loss(weight, w13, w2, z):
            return run(z, ids, weight, w13, w2)[:-1].sum()

        gradients = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
        found = gradients(weight, *w, z.at[-1].set(jnp.nan))
        if run.__wrapped__.keywords["implementation"] == "dense":
            assert np.isnan(found[1]).any()  # stated in its docstring
            return
        for got, want in zip(found, gradients(weight, *w, z), strict=True):
            np.testing.assert_array_equal(got, want)

    def test_inside_a_scan_over_layers_with_remat(self, run):
        z, ids, weight = inputs(24)
        layers = [weights("plain", seed=s) for s in (0, 1)]
        stacked = jax.tree.map(lambda *a: jnp.stack(a), *layers)

        def layer(z, w):
            return z + run(z, ids, weight, *w), None

        scanned = jax.jit(jax.grad(lambda w: jax.lax.scan(jax.checkpoint(layer), z, w)[0].sum()))(
            stacked
        )

        def unrolled(w):
            y = z
            for i in range(2):
                y, _ = layer(y, jax.tree.map(lambda a: a[i], w))  # noqa: B023
            return y.sum()

        for got, want in zip(scanned, jax.jit(jax.grad(unrolled))(stacked), strict=True):
            assert relative(got, want) <= GRADIENT


class TestMXFP8:
    """Activations in eight bits. A code next to a tie may be the other one where w1 z, summed in
    another order, differs in its last bit: such a row is off by up to a step of one activation."""

    @pytest.mark.parametrize("form", ["packed", "plain"])
    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
    def test_reference(self, run, form, dtype):
        z, ids, weight = inputs(24, dtype=dtype)
        w = weights(form, dtype)
        implementation = run.__wrapped__.keywords["implementation"]
        low = jax.jit(partial(experts, implementation=implementation, activations="mxfp8", **BETAS))
        got = low(z, ids, weight, *w)
        assert got.dtype == dtype
        exact = np.asarray(z, np.float64) if dtype == jnp.float32 else z
        want = reference.experts(exact, ids, weight, *w, activations="mxfp8", **BETAS)
        if dtype == jnp.float32:
            assert relative(got, want) <= FP32
        else:
            assert (np.asarray(got) == want.astype(dtype)).mean() >= SAME_BITS
        assert relative(got, run(z, ids, weight, *w)) > 1e-2  # and it is another number

    def test_gradients_go_straight_through(self, run):
        """Of z, the derivative of the layer at the rounded values; agreed by both forms."""
        z, ids, weight = inputs(24)
        w = weights("plain")
        c = jax.random.normal(jax.random.key(0), z.shape)

        def gradients(implementation):
            f = partial(experts, implementation=implementation, activations="mxfp8", **BETAS)
            loss = lambda z, weight, *w: (f(z, ids, weight, *w) * c).sum()  # noqa: E731
            return jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(z, weight, *w)

        found = gradients(run.__wrapped__.keywords["implementation"])
        plain = jax.jit(jax.grad(lambda z: (run(z, ids, weight, *w) * c).sum()))(z)
        assert 1e-3 < relative(found[0], plain) < 0.2
        for got, want in zip(found, gradients("dense"), strict=True):
            assert relative(got, want) <= GRADIENT

    def test_error_of_the_layer(self):
        """Each value is off by up to 1/16 of itself; measured 0.0484 here."""
        z, ids, weight = inputs(200, dtype=jnp.bfloat16)
        error = jax.jit(partial(activation_error, **BETAS))(z, ids, weight, *weights())
        assert 0.03 < float(error) < 0.07

    def test_unknown_format(self):
        z, ids, weight = inputs(1)
        with pytest.raises(InputError, match="activations 'fp8'"):
            experts(z, ids, weight, *weights(), activations="fp8", **BETAS)


class TestTiles:
    @pytest.mark.parametrize("rows", [1, 8])
    @pytest.mark.parametrize("kind", ["uniform", "one", "uneven", "worst"])
    def test_map(self, kind, rows):
        """Each assignment in exactly one row of a tile of its expert, experts ascending."""
        rng = np.random.default_rng(4)
        for n in (1, 24):
            if kind == "worst":  # as many experts with one row over as there can be
                ids = (np.arange(n * K) % E).reshape(n, K).astype(np.int32)
            else:
                ids = choose(kind, n, rng)
            if n == 24:
                ids[7, 0], ids[9] = -1, E
            tiles = jax.jit(tile_map, static_argnums=(1, 2))(jnp.asarray(ids), E, rows)
            used = int(tiles.used)
            known = (ids >= 0) & (ids < E)
            counts = np.bincount(ids[known], minlength=E)
            assert used == (-(-counts // rows)).sum() <= len(tiles.expert_T)
            expert, assignment = np.asarray(tiles.expert_T), np.asarray(tiles.assignment_TM)
            assert (np.diff(expert[:used]) >= 0).all()
            assert (assignment[used:] == n * K).all()
            real = assignment < n * K
            assert sorted(assignment[real]) == np.flatnonzero(known).tolist()
            owner = np.broadcast_to(expert[:, None], assignment.shape)[real]
            np.testing.assert_array_equal(ids.reshape(-1)[assignment[real]], owner)

    def test_bound_is_reached(self):
        ids = jnp.arange(E * K, dtype=jnp.int32).reshape(-1, K) % E
        tiles = jax.jit(tile_map, static_argnums=(1, 2))(ids[:4], E, 4)
        assert int(tiles.used) == len(tiles.expert_T) == 8

    def test_rows(self):
        assert tile_rows(1, 16, 896) == 1
        assert tile_rows(64, 16, 896) == 8
        assert tile_rows(1024, 16, 896) == 32
        assert tile_rows(100_000, 16, 896) == 128
        assert tile_rows(64, 4, 32) == 8

    def test_one_expert_is_unpacked_at_a_time(self):
        """Temporary bytes against all experts in float32 and against one."""
        experts_, wide, n = 64, 256, 16
        w13 = MXFP4(*(jnp.zeros((experts_, 2 * wide, w), jnp.uint8) for w in (wide // 2, 8)))
        w2 = MXFP4(*(jnp.zeros((experts_, wide, w), jnp.uint8) for w in (wide // 2, 8)))
        z = jnp.zeros((n, wide))
        ids, weight = jnp.zeros((n, 4), jnp.int32), jnp.zeros((n, 4))
        one = 3 * wide * wide * 4

        def temporaries(f):
            compiled = jax.jit(f).lower(z, ids, weight, w13, w2).compile()
            return compiled.memory_analysis().temp_size_in_bytes

        forward = partial(experts, implementation="tiles", **BETAS)
        # Measured 1.03 experts forward, 1.05 with gradients, 67 for all experts at once.
        assert temporaries(forward) < 1.5 * one
        assert temporaries(jax.grad(lambda *a: forward(*a).sum())) < 1.5 * one
        dense = partial(experts, implementation="dense", **BETAS)
        assert temporaries(dense) > experts_ * one / 2  # the measure can tell


def test_auto_is_logged(caplog):
    z, ids, weight = inputs(1)
    with caplog.at_level(logging.DEBUG, "k3jax"):
        auto = jax.jit(partial(experts, **BETAS))(z, ids, weight, *weights())
    assert "-> tiles" in caplog.text
    np.testing.assert_array_equal(auto, compiled("tiles")(z, ids, weight, *weights()))


U8 = jnp.uint8
STACKS = {"w13": jnp.ones((3, E, 2 * F, L)), "w2": jnp.ones((3, E, L, F))}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"z_NL": jnp.ones((3, 32))}, r"z \(3, 32\), w13 \(8, 64, 64\)"),
        ({"w2": jnp.ones((E, L, 16))}, r"w2 \(8, 64, 16\)"),
        ({"ids_Nk": jnp.zeros((2, K), jnp.int32)}, r"ids \(2, 2\)"),
        ({"weights_Nk": jnp.zeros((3, K), jnp.bfloat16)}, "weights bfloat16"),
        ({"ids_Nk": jnp.zeros((3, K), jnp.int16)}, "ids int16"),
        ({"implementation": "cuda"}, "'cuda' is not one of"),
        ({"activations": "fp4"}, "activations 'fp4'"),
        ({"z_NL": jnp.ones((3, L), jnp.int32)}, "z is int32"),
        ({"z_NL": jnp.ones(L)}, r"z \(64,\)"),
        ({"w2": jnp.ones(3)}, r"w2 \(3,\)"),
        (
            {"w2": MXFP4(jnp.zeros((E, L, F // 2), U8), jnp.zeros((3, L, 1), U8))},
            r"w2 has codes .*\(3, 64, 1\)",
        ),
        ({"layer": 3} | STACKS, "layer 3 is outside 0..2"),
        ({"layer": -1} | STACKS, "layer -1 is outside 0..2"),
        ({"layer": 1.5} | STACKS, "layer 1.5 is not one integer"),
    ],
)
def test_refusals(change, message):
    w13, w2 = weights()
    good = {
        "z_NL": jnp.ones((3, L)),
        "ids_Nk": jnp.zeros((3, K), jnp.int32),
        "weights_Nk": jnp.ones((3, K)),
        "w13": w13,
        "w2": w2,
    }
    with pytest.raises((InputError, ValueError), match=message):
        experts(**(good | change), **BETAS)
