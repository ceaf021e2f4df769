"""What every implementation of the routed experts must satisfy on packed weights, at the sizes that
it takes."""

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.ops import target
from k3jax.ops.grouped_matmul import IMPLEMENTATIONS, experts, reference
from k3jax.quantization.mxfp4 import GROUP, MXFP4, pack

BETAS = {"situ_beta": 4.0, "situ_linear_beta": 25.0}
UNBOUNDED = {"situ_beta": 4.0, "situ_linear_beta": None}
ROUTINGS = ("uniform", "one", "uneven")
# Every group is empty but one (the first, a middle and the last expert), or both ends are.
SPARSE = ("first", "middle", "last", "inner")


@dataclass(frozen=True, eq=False)
class Implementation:
    """One entry of the contract.

    Attributes:
      name: in the table of implementations.
      dtype: of the latents.
      sizes: E experts, K of a token, L columns of a latent and F of an expert; F <= L.
      device: device kind that it is told to run on; None for this one.
      entry: what stands in the table while it runs; None to leave the table alone, as for portable
        forms and on the device itself.
      limit: max|d| / max|reference| against float64 that rounds where the op does.
      same_bits: the least share of results that are that reference, rounded; 0 where products stay
        in float32 up to the activation, and in float32.
      gradient: of z and weights, max|d| / max|gradient|, against the dense form in float32.
    """

    name: str
    dtype: Any = jnp.float32
    sizes: tuple[int, int, int, int] = (8, 2, 64, 64)
    device: str | None = None
    entry: Callable | None = None
    limit: float = 1e-5
    same_bits: float = 0.0
    gradient: float = 1e-5

    @contextlib.contextmanager
    def running(self):
        with contextlib.ExitStack() as stack:
            if self.entry is not None:
                entry = {self.name: self.entry}
                stack.enter_context(mock.patch.dict(IMPLEMENTATIONS, entry))
            if self.device is not None:
                stack.enter_context(
                    mock.patch.object(target, "device_kind", return_value=self.device)
                )
            yield


# Measured: 5e-7 of outputs, 4.5e-7 of gradients; in bfloat16 2.7e-3, all bits of outputs, and 0.43
# of them without the inner roundings.
PORTABLE = {
    "tiles": Implementation("tiles"),
    "tiles-bfloat16": Implementation(
        "tiles", jnp.bfloat16, limit=1e-2, same_bits=0.9, gradient=2e-2
    ),
    "dense": Implementation("dense"),
}


@functools.cache
def weights(sizes, seed=0):
    """Packed w13 [E, 2F, L] and w2 [E, L, F] whose gates reach the bend of tanh."""
    E, _, L, F = sizes
    rng = np.random.default_rng(seed)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)  # noqa: E731
    w13, w2 = normal(E, 2 * F, L) * (2 / L**0.5), normal(E, L, F) * (2 / F**0.5)
    return tuple(jax.jit(pack)(w) for w in (w13, w2))


def choose(sizes, kind, n, rng):
    """int32 [n, K], no expert twice for a token."""
    E, K = sizes[:2]
    if kind == "one":  # every token to the same experts
        return np.tile(rng.permutation(E)[:K].astype(np.int32), (n, 1))
    if kind == "uneven":  # expert 0 always, the last two never
        rest = [1 + rng.permutation(E - 3)[: K - 1] for _ in range(n)]
        return np.array([[0, *r] for r in rest], np.int32).reshape(n, K)
    if kind == "inner":
        return np.stack([1 + rng.permutation(E - 2)[:K] for _ in range(n)]).astype(np.int32)
    if kind in SPARSE:
        ids = np.full((n, K), -1, np.int32)
        ids[:, K - 1] = {"first": 0, "middle": E // 2, "last": E - 1}[kind]
        return ids
    return np.stack([rng.permutation(E)[:K] for _ in range(n)]).astype(np.int32)


def inputs(implementation, n, kind="uniform", seed=1):
    """(z, ids, weights) of n tokens."""
    sizes, rng = implementation.sizes, np.random.default_rng(seed)
    z = jnp.asarray(rng.standard_normal((n, sizes[2])), implementation.dtype)
    ids = jnp.asarray(choose(sizes, kind, n, rng))
    return z, ids, jnp.asarray(rng.random((n, sizes[1])), jnp.float32)


@functools.cache
def runner(implementation, **options):
    """Compiled experts; traced, and therefore patched, when a new shape comes."""
    options = {"implementation": implementation.name, **BETAS, **options}
    compiled = jax.jit(functools.partial(experts, **options))

    def run(*arguments, **layer):
        with implementation.running():
            return compiled(*arguments, **layer)

    return run


def relative(got, want):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    return np.abs(got - want).max() / np.abs(want).max()


def check(implementation, got, z, *rest, **options):
    """Against float64 with the roundings of the op; float32 counts as none."""
    assert got.dtype == implementation.dtype
    if implementation.dtype == jnp.float32:
        z = np.asarray(z, np.float64)
    want = reference.experts(z, *rest, **(BETAS | options))
    assert relative(got, want) <= implementation.limit  # false for a NaN
    same = np.asarray(got) == want.astype(got.dtype)
    assert same.mean() >= implementation.same_bits


def exact_values():
    """[256, 16]: what each code is under each scale byte, in float64 but for what float32 lacks."""
    magnitudes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    values = np.array([*magnitudes, *(-m for m in magnitudes)])
    table = values * 2.0 ** (np.arange(256.0)[:, None] - 127)
    table[np.abs(table) < 2.0**-126] = 0
    table[np.abs(table) >= 2.0**128] *= np.inf
    table[255] = np.nan
    return table


def lone_codes(byte_R, code_R, column_R, shape):
    """A packed [..., out, in] whose R rows hold one code each, under one scale, and zeros."""
    out, width = len(byte_R), shape[-1]
    codes = np.zeros((out, width), np.uint8)
    codes[np.arange(out), column_R] = code_R
    packed = codes[:, ::2] | codes[:, 1::2] << 4
    scales = np.full((out, width // GROUP), 127)
    scales[np.arange(out), column_R // GROUP] = byte_R
    scales = scales.astype(np.uint8).reshape(*shape[:-1], width // GROUP)
    return MXFP4(jnp.asarray(packed.reshape(*shape[:-1], width // 2)), jnp.asarray(scales))


def one_each(implementation, z_EL):
    """(z, ids, weights) of 24 tokens: token e goes to expert e alone, with weight 1."""
    E, K = implementation.sizes[:2]
    ids = np.full((24, K), -1, np.int32)
    ids[:E, 0] = np.arange(E)
    z = jnp.asarray(np.pad(z_EL, ((0, 24 - E), (0, 0))), implementation.dtype)
    return z, jnp.asarray(ids), jnp.ones((24, K))


def one_hot_w13(implementation, bytes_, codes):
    """w13 with one code a row; gate rows and up rows have one kind each, given expert by expert."""
    E, _, L, F = implementation.sizes
    column = np.arange(2 * E * F) % L
    return lone_codes(np.repeat(bytes_, F), np.repeat(codes, F), column, (E, 2 * F, L))


class ExpertsContract:
    """A class that inherits it gives a fixture ``implementation``."""

    @pytest.mark.parametrize("kind", ROUTINGS)
    @pytest.mark.parametrize("n", [1, 24, 200])
    def test_float64(self, implementation, n, kind):
        arguments = *inputs(implementation, n, kind), *weights(implementation.sizes)
        check(implementation, runner(implementation)(*arguments), *arguments)

    @pytest.mark.parametrize("kind", SPARSE)
    @pytest.mark.parametrize("n", [24, 200])
    def test_empty_experts(self, implementation, n, kind):
        arguments = *inputs(implementation, n, kind), *weights(implementation.sizes)
        check(implementation, runner(implementation)(*arguments), *arguments)

    def test_mxfp8_activations(self, implementation):
        """A code next to a tie may be its neighbour where w1 z was summed in another order, so the
        whole is compared; unrounded activations are 5e-2 away."""
        arguments = *inputs(implementation, 24), *weights(implementation.sizes)
        got = np.asarray(runner(implementation, activations="mxfp8")(*arguments), np.float64)
        want, plain = (
            reference.experts(*arguments, activations=form, **BETAS) for form in ("mxfp8", None)
        )
        distance = lambda a: np.linalg.norm(a - want) / np.linalg.norm(want)  # noqa: E731
        assert distance(got) < 1e-2
        assert distance(plain) > 3e-2

    def test_without_linear_beta(self, implementation):
        arguments = *inputs(implementation, 24), *weights(implementation.sizes)
        got = runner(implementation, **UNBOUNDED)(*arguments)
        check(implementation, got, *arguments, **UNBOUNDED)
        bounded = runner(implementation)(*arguments)
        assert relative(got, bounded) > 1e-3

    @pytest.mark.parametrize("odd", [0, 1])
    def test_every_pair_of_scale_and_code_is_exact_in_w2(self, implementation, odd):
        """Each row of w2 holds one code, so y is its value times h, which a code of 1 tells."""
        E, _, L, F = implementation.sizes
        w13 = one_hot_w13(implementation, np.tile([132, 125], E), np.tile([4, 2], E))  # 64 and 1/4
        tokens = one_each(implementation, np.full((E, L), 1.25))
        run, table = runner(implementation, **UNBOUNDED), exact_values()

        def outputs(byte, code, column):
            got = run(*tokens, w13, lone_codes(byte, code, column, (E, L, F)))
            return np.asarray(got, np.float32)[:E].reshape(-1)

        rows = np.arange(E * L)
        h = outputs(rows * 0 + 127, rows * 0 + 2, rows % F)
        assert (h == h[0]).all()
        assert abs(h[0] - 1.25) < 1e-6
        for start in range(0, 4096, E * L):
            byte, code = np.divmod((start + rows) % 4096, 16)
            with np.errstate(over="ignore"):
                want = table[byte, code].astype(np.float32) * h
            column = rows * 2 % F + (byte + code + odd) % 2
            np.testing.assert_array_equal(outputs(byte, code, column), want)

    @pytest.mark.parametrize("odd", [0, 1])
    @pytest.mark.parametrize("half", ["gate", "up"])
    def test_pairs_are_exact_in_w13(self, implementation, half, odd):
        """Weights of one code each on latents of 1 are codes of 1 on latents of their values.

        To bytes whose values are finite, and 4 times them where they are those of up rows.
        """
        E, _, L, F = implementation.sizes
        gate, bytes_ = half == "gate", 253 if half == "gate" else 251
        rows = np.arange(E * F)
        w2 = lone_codes(np.full(E * L, 127), np.full(E * L, 2), np.arange(E * L) % L % F, (E, L, F))
        run, table = runner(implementation, **UNBOUNDED), exact_values()
        other = (127, 4) if gate else (132, 4)  # an up value of 2, a gate of 64

        def outputs(z, byte, code, column, constant):
            parts = [a.reshape(E, F) for a in (byte, code, column)]
            # The constant stands on the latent that is 1 in both runs.
            constants = [np.full((E, F), a) for a in (*other, constant)]
            both = (parts, constants) if gate else (constants, parts)
            stacked = [np.concatenate(x, 1).reshape(-1) for x in zip(*both, strict=True)]
            got = run(*one_each(implementation, z), lone_codes(*stacked, (E, 2 * F, L)), w2)
            return np.asarray(got, np.float32)[:E, :F].reshape(-1)

        seen = set()
        # Pairs on the last latent are left out if F = L, which are others with another start.
        for start in range(odd, bytes_ * 16 + odd, E * F):
            byte, code = np.divmod((start + rows) % (bytes_ * 16), 16)
            column = rows * 2 % L + (byte + code + odd) % 2
            got = outputs(np.ones((E, L)), byte, code, column, 3)
            z = np.ones((E, L))
            z[:, :F] = table[byte, code].reshape(E, F)
            z[:, L - 1] = 1
            ones = rows * 0 + 127, rows * 0 + 2, rows % F
            want = outputs(z, *ones, L - 1)
            live = rows % F < L - 1
            np.testing.assert_array_equal(got[live], want[live])
            assert np.isfinite(want).all()
            seen.update(want)
        assert len(seen) > 500  # the measure can tell

    def test_routed_scaling_is_linear(self, implementation):
        (z, ids, weight), w = inputs(implementation, 24), weights(implementation.sizes)
        run = runner(implementation, out_dtype=jnp.float32)
        once = np.asarray(run(z, ids, weight, *w))
        for scaling in (2.5, 7.0):
            assert relative(run(z, ids, weight * scaling, *w), once * scaling) <= 1e-6
        np.testing.assert_array_equal(run(z, ids, weight * 2, *w), once * 2)

    def test_experts_nobody_chose_cannot_leak(self, implementation):
        z, ids, weight = inputs(implementation, 24, "uneven")
        w, run = weights(implementation.sizes), runner(implementation)
        want = run(z, ids, weight, *w)
        bad = [MXFP4(a.codes, a.scales.at[-2:].set(255)) for a in w]
        np.testing.assert_array_equal(run(z, ids, weight, *bad), want)
        chosen = ids.at[3, 0].set(implementation.sizes[0] - 1)
        got = np.asarray(run(z, chosen, weight, *bad), np.float32)
        assert np.isnan(got[3]).all()
        np.testing.assert_array_equal(np.delete(got, 3, 0), np.delete(want, 3, 0))

    @pytest.mark.parametrize("value", [np.nan, np.inf])
    def test_a_bad_row_stays_alone(self, implementation, value):
        z, ids, weight = inputs(implementation, 24, "one")
        w, run = weights(implementation.sizes), runner(implementation)
        want = np.asarray(run(z, ids, weight, *w), np.float32)
        got = run(z.at[3].set(value), ids, weight.at[3].set(value), *w)
        got = np.asarray(got, np.float32)
        assert not np.isfinite(got[3]).any()
        np.testing.assert_array_equal(np.delete(got, 3, 0), np.delete(want, 3, 0))

    def test_unknown_ids_contribute_nothing(self, implementation):
        """Bit for bit what a weight of zero gives; tokens without an expert are zeros."""
        z, ids, weight = inputs(implementation, 24)
        w, run, E = weights(implementation.sizes), runner(implementation), implementation.sizes[0]
        want = np.asarray(run(z, ids, weight.at[5:9, 1].set(0).at[7].set(0), *w))
        some = ids.at[5:9, 1].set(-1).at[7].set(E).at[8, 1].set(2**31 - 1)
        got = np.asarray(run(z, some, weight, *w))
        np.testing.assert_array_equal(got, want)
        assert not got[7].any()
        z = z.at[7].set(jnp.nan)  # a padded token may hold anything
        np.testing.assert_array_equal(np.asarray(run(z, some, weight, *w)), want)
        nobody = run(jnp.full_like(z, jnp.nan), jnp.full_like(ids, -1), weight, *w)
        assert (np.asarray(nobody) == 0).all()

    @pytest.mark.parametrize("n", [24, 200])
    def test_batch_mates_change_nothing(self, implementation, n):
        """One row at any place among any others in a bucket: the same bits."""
        w, run = weights(implementation.sizes), runner(implementation)
        first = inputs(implementation, n)
        want = np.asarray(run(*first, *w), np.float32)[0]
        rng = np.random.default_rng(2)
        for seed, kind in enumerate(ROUTINGS * 2):
            mates = inputs(implementation, n, kind, seed=10 + seed)
            place = int(rng.integers(n))
            row = [m.at[place].set(a[0]) for m, a in zip(mates, first, strict=True)]
            np.testing.assert_array_equal(np.asarray(run(*row, *w), np.float32)[place], want)

    def test_order_of_tokens_and_choices(self, implementation):
        """Tokens permuted permute the results; a token's experts may come in any order."""
        (z, ids, weight), w = inputs(implementation, 24), weights(implementation.sizes)
        run, order = runner(implementation), np.random.default_rng(5).permutation(24)
        want = np.asarray(run(z, ids, weight, *w))
        got = run(*(a[order] for a in (z, ids, weight)), *w)
        np.testing.assert_array_equal(np.asarray(got), want[order])
        got = run(z, ids[:, ::-1], weight[:, ::-1], *w)
        np.testing.assert_array_equal(np.asarray(got), want)

    def test_layers_of_a_stack(self, implementation):
        """Under a scan, in any order; a layer of NaN is that layer's alone."""
        arguments, sizes = inputs(implementation, 24), implementation.sizes
        layers = [weights(sizes, seed) for seed in (0, 1)]
        bad = [MXFP4(a.codes, jnp.full_like(a.scales, 255)) for a in layers[0]]
        stack = jax.tree.map(lambda *a: jnp.stack(a), layers[0], tuple(bad), layers[1])
        run = runner(implementation)

        @jax.jit
        def scanned(arguments, stack):
            def body(_, layer):
                return None, run(*arguments, *stack, layer=layer)

            return jax.lax.scan(body, None, jnp.array([2, 1, 0], jnp.int32))[1]

        last, bad, first = np.asarray(scanned(arguments, stack))
        for result, w in ((first, layers[0]), (last, layers[1])):
            np.testing.assert_array_equal(result, np.asarray(run(*arguments, *w)))
        assert np.isnan(np.float32(bad)).all()

    def test_no_tokens(self, implementation):
        z, ids, weight = inputs(implementation, 1)
        got = runner(implementation)(z[:0], ids[:0], weight[:0], *weights(implementation.sizes))
        assert got.shape == (0, implementation.sizes[2])

    def test_gradients(self, implementation):
        """Of z and weights; those of a kernel are those of the portable form."""
        z, ids, weight = inputs(implementation, 24)
        ids, w = ids.at[3, 1].set(-1), weights(implementation.sizes)
        c = np.random.default_rng(4).standard_normal(z.shape)
        dense = Implementation("dense")

        def gradients(form, z):
            run = runner(form, out_dtype=jnp.float32)

            def loss(z, weight):
                return (run(z, ids, weight, *w) * jnp.float32(c)).sum()

            with form.running():
                return jax.jit(jax.grad(loss, argnums=(0, 1)))(z, weight)

        found = gradients(implementation, z)
        assert found[0].dtype == implementation.dtype
        for got, want in zip(found, gradients(dense, jnp.float32(z)), strict=True):
            assert relative(got, want) <= implementation.gradient
        assert found[1][3, 1] == 0
