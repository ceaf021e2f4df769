"""`gated_kda` at the head size of the kernels: every implementation, 500+ cases.

Kernels for TPUs run in interpret mode, which computes every dot exactly: what a matrix unit makes
of them is in `test_passes_of_the_matrix_unit`.
"""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import kda_cases
import numpy as np
import pytest
from kda_kernels import BOUNDS, IMPLEMENTATIONS, D, raw, wide

from k3jax.ops import kda as kda_op
from k3jax.ops.kda import mosaic_tpu_chunked, reference

REGIMES = [name for name in kda_cases.REGIMES if [name] not in BOUNDS.values()]
ROWS, HEADS, LENGTH, SEEDS = 2 * len(REGIMES), 2, 130, 6
SHORT = (1, 17, 64)  # chunks of 16, 32 and 64 rows
OTHER_LENGTH = 64


@pytest.fixture(params=IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS.keys())
def implementation(request):
    return request.param


def float64(inputs, lengths=None, lower_bound=-5.0):
    return reference.gated_kda(*[wide(x) for x in inputs], lengths, lower_bound)


@functools.cache
def runner(implementation, lower_bound=-5.0):
    """Compiled `gated_kda`; traced, and therefore patched, when a new shape comes."""
    call = functools.partial(
        kda_op.gated_kda, lower_bound=lower_bound, implementation=implementation.name
    )
    compiled = jax.jit(lambda inputs, lengths: call(*inputs, lengths_B=lengths))

    def run(inputs, lengths=None):
        with implementation.running():
            o, state = compiled(inputs, None if lengths is None else np.int32(lengths))
        assert o.dtype == implementation.dtype
        assert state.dtype == jnp.float32
        return np.asarray(o), np.asarray(state)

    return run


@functools.cache
def drawn(seed, dtype, length=LENGTH):
    """Inputs, lengths (none, all and anything between) and the float64 result of a batch."""
    inputs = raw(kda_cases.batch(seed, ROWS, length, HEADS, D, D, REGIMES), dtype)
    lengths = np.random.default_rng(seed).integers(0, length + 1, ROWS)
    lengths[: len(REGIMES)] = length
    lengths[-2:] = 0
    return inputs, lengths, float64(inputs, lengths)


def check(implementation, got, expected):
    limits = (implementation.output, implementation.state)
    for name, a, b, limit in zip(("output", "state"), got, expected, limits, strict=True):
        assert a.shape == b.shape
        errors = kda_cases.errors_by_row(a, b)  # a NaN fails the comparison below
        worst = int(np.argmax(errors))
        assert (errors <= limit).all(), f"{name} of row {worst}: {errors[worst]:.2e}"


def padded(inputs, lengths, value):
    real = np.arange(inputs[0].shape[1]) < np.asarray(lengths)[:, None]
    return [
        np.where(real.reshape(*real.shape, *[1] * (x.ndim - 2)), x, np.asarray(value, x.dtype))
        for x in inputs[:5]
    ] + list(inputs[5:])


def test_at_least_500_cases():
    batches = SEEDS + len(SHORT) + len(BOUNDS)
    assert batches * ROWS * HEADS >= 500


class GatedContract:
    """What every implementation of `gated_kda` must satisfy."""

    def test_drawn_cases_and_padding(self, implementation):
        """Padding holds NaN; rows without a real token keep their states bit for bit."""
        for seed in range(SEEDS):
            inputs, lengths, expected = drawn(seed, implementation.dtype)
            inputs[-1][-1, 0, 0, :2] = -0.0, 1e-42  # of a state of zeros
            got = runner(implementation)(padded(inputs, lengths, np.nan), lengths)
            check(implementation, got, expected)
            assert not got[0][np.arange(LENGTH) >= lengths[:, None]].any()
            assert got[1][-2:].tobytes() == inputs[-1][-2:].tobytes()

    @pytest.mark.parametrize("length", SHORT)
    def test_short(self, implementation, length):
        inputs, _, _ = drawn(SEEDS, implementation.dtype, length)
        check(implementation, runner(implementation)(inputs), float64(inputs))

    def test_other_bounds(self, implementation):
        for bound in implementation.bounds:
            cases = kda_cases.batch(1, ROWS, OTHER_LENGTH, HEADS, D, D, BOUNDS[bound] + REGIMES[:1])
            inputs = raw(cases, implementation.dtype, bound)
            got = runner(implementation, bound)(inputs)
            check(implementation, got, float64(inputs, None, bound))

    def test_4096_tokens(self, implementation):
        """Slow decay, and keys whose triangular systems are the hardest."""
        regimes = ["slow_decay", "no_decay", "equal_keys", "near_keys"]
        cases = kda_cases.batch(2, len(regimes), 4096, 1, D, D, regimes)
        cases[3][0] *= 0.1  # 5e-4 nats a token
        inputs = raw(cases, implementation.dtype)
        check(implementation, runner(implementation)(inputs), float64(inputs))

    def test_splits(self, implementation):
        """Row a: its first tokens, then the others from the carried state."""
        splits = [1, 2, 3, 8, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 80, 96, 112, 127,
                  128, 129, 100, 50][:ROWS]  # fmt: skip
        one = [x[:1] for x in raw(
            kda_cases.batch(4, 1, LENGTH, HEADS, D, D, ["slow_decay"]), implementation.dtype
        )[:5]]  # fmt: skip
        *rest, state = drawn(0, implementation.dtype)[0][5:]
        state = np.broadcast_to(state[:1], state.shape)
        expected = float64([*one, *rest, state[:1]])
        outputs = []
        for starts, stops in ((0 * np.array(splits), splits), (splits, [LENGTH] * ROWS)):
            rows = np.asarray(starts)[:, None] + np.arange(LENGTH)
            tokens = [x[0][np.minimum(rows, LENGTH - 1)] for x in one]
            o, state = runner(implementation)([*tokens, *rest, state], np.subtract(stops, starts))
            outputs.append(o)
        whole = [
            np.concatenate([a[:split], b[: LENGTH - split]])
            for a, b, split in zip(*outputs, splits, strict=True)
        ]
        expected = [np.broadcast_to(x, (ROWS, *x.shape[1:])) for x in expected]
        check(implementation, (np.stack(whole), state), expected)

    def test_later_tokens_change_no_earlier_bit(self, implementation):
        inputs, _, _ = drawn(0, implementation.dtype)
        other, _, _ = drawn(1, implementation.dtype)
        full = np.full(ROWS, LENGTH)
        cuts = np.linspace(1, LENGTH - 1, ROWS).astype(int)
        later = np.arange(LENGTH) >= cuts[:, None]
        changed = [
            np.where(later.reshape(*later.shape, *[1] * (x.ndim - 2)), y, x)
            for x, y in zip(inputs[:5], other[:5], strict=True)
        ]
        base, _ = runner(implementation)(inputs, full)
        got, _ = runner(implementation)([*changed, *inputs[5:]], full)
        for row, cut in enumerate(cuts):
            assert got[row, :cut].tobytes() == base[row, :cut].tobytes()
            assert (got[row, cut:] != base[row, cut:]).any()

    def test_gradients(self, implementation):
        """Those of the portable form, and none from padding that holds NaN."""
        inputs, _, _ = drawn(SEEDS, implementation.dtype, 17)
        inputs = [x[:2] if i in (0, 1, 2, 3, 4, 7) else x for i, x in enumerate(inputs)]
        lengths = np.int32([17, 9])
        inputs = [jnp.asarray(x) for x in padded(inputs, lengths, np.nan)]

        def grads(name):
            def loss(*inputs):
                o, state = kda_op.gated_kda(
                    *inputs, lower_bound=-5.0, lengths_B=lengths, implementation=name
                )
                return jnp.sum(jnp.square(o.astype(jnp.float32))) + jnp.sum(jnp.square(state))

            with implementation.running():
                return jax.jit(jax.grad(loss, range(8)))(*inputs)

        for i, (a, b) in enumerate(zip(grads(implementation.name), grads("xla"), strict=True)):
            assert a.dtype == b.dtype
            a, b = wide(a), wide(b)
            assert np.isfinite(a).all(), i
            assert np.abs(a - b).max() <= implementation.output * np.abs(b).max(), i


class TestGated(GatedContract):
    pass


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_passes_of_the_matrix_unit(dtype):
    """What bfloat16 passes make of the dots: 6 of them for HIGHEST, 3 for HIGH, and 1 by default.

    With float32 inputs all dots have 6, measured 2.8e-7 for outputs and states. With bfloat16 ones
    the state is as exact as it has to be, 2.7e-6, and outputs lose 1.4e-5, far below a rounding.
    """
    parts = {jax.lax.Precision.HIGHEST: 3, jax.lax.Precision.HIGH: 2}

    def split(x, count):
        for _ in range(count):
            part = jax.lax.reduce_precision(x, 8, 7)  # bfloat16 within float32
            yield part
            x = x - part

    def dot(a, b, contract, precision=jax.lax.Precision.HIGHEST):
        a, b = ([*split(x, parts[precision])] for x in (a, b))
        pairs = [(i, j) for i in range(len(a)) for j in range(len(a)) if i + j < len(a)]
        return sum(exact(a[i], b[j], contract) for i, j in reversed(pairs))

    exact = mosaic_tpu_chunked._dot
    regimes = ["random", "slow_decay", "saturated", "half_saturated", "equal_keys", "near_keys"]
    inputs = raw(kda_cases.batch(6, len(regimes), 512, 1, D, D, regimes), dtype)
    inputs = [jnp.asarray(x) for x in inputs]
    # Outputs in float32, so that only the passes round: v alone decides their dtype.
    inputs[2] = inputs[2].astype(jnp.float32)
    expected = float64(inputs)
    with mock.patch.object(mosaic_tpu_chunked, "_dot", dot):
        run = functools.partial(mosaic_tpu_chunked.gated_kda, interpret=True)
        got = jax.jit(lambda *x: run(*x, None, -5.0))(*inputs)
    o, state = (kda_cases.errors_by_row(a, b).max() for a, b in zip(got, expected, strict=True))
    assert state <= 1e-5
    assert o <= (1e-5 if dtype == jnp.float32 else 5e-5)
