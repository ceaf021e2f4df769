"""What every implementation of `gated_kda` and `kda_decode` must satisfy, at the kernels' size."""

import functools

import jax
import jax.numpy as jnp
import kda_cases
import numpy as np
import pytest
from kda_kernels import BOUNDS, EPS, D, decode_inputs, raw, wide

from k3jax.ops import kda as kda_op
from k3jax.ops.kda import reference

REGIMES = [name for name in kda_cases.REGIMES if [name] not in BOUNDS.values()]
ROWS, HEADS, LENGTH, SEEDS = 2 * len(REGIMES), 2, 130, 6
SHORT = (1, 17, 64)  # chunks of 16, 32 and 64 rows
OTHER_LENGTH = 64


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


def check(implementation, got, expected, regimes):
    """Rows are of these regimes in turn; keys nearly alike may have a limit of their own."""
    alike = np.array([r in ("equal_keys", "near_keys") for r in regimes])
    alike = np.resize(alike, len(got[0]))
    limits = (implementation.output, implementation.state)
    for name, a, b, limit in zip(("output", "state"), got, expected, limits, strict=True):
        assert a.shape == b.shape
        shares = kda_cases.errors_by_row(a, b) / np.where(
            alike, implementation.alike or limit, limit
        )
        worst = int(np.argmax(shares))  # a NaN fails the comparison below
        assert (shares <= 1).all(), f"{name} of row {worst}: {shares[worst]:.2f} of its limit"


def padded(inputs, lengths, value):
    real = np.arange(inputs[0].shape[1]) < np.asarray(lengths)[:, None]
    return [
        np.where(real.reshape(*real.shape, *[1] * (x.ndim - 2)), x, np.asarray(value, x.dtype))
        for x in inputs[:5]
    ] + list(inputs[5:])


class GatedContract:
    """What every implementation of `gated_kda` must satisfy."""

    def test_drawn_cases_and_padding(self, implementation):
        """Padding holds NaN; rows without a real token keep their states bit for bit."""
        for seed in range(SEEDS):
            inputs, lengths, expected = drawn(seed, implementation.dtype)
            inputs[-1][-1, 0, 0, :2] = -0.0, 1e-42  # of a state of zeros
            got = runner(implementation)(padded(inputs, lengths, np.nan), lengths)
            check(implementation, got, expected, REGIMES)
            assert not got[0][np.arange(LENGTH) >= lengths[:, None]].any()
            assert got[1][-2:].tobytes() == inputs[-1][-2:].tobytes()

    @pytest.mark.parametrize("length", SHORT)
    def test_short(self, implementation, length):
        inputs, _, _ = drawn(SEEDS, implementation.dtype, length)
        check(implementation, runner(implementation)(inputs), float64(inputs), REGIMES)

    def test_other_bounds(self, implementation):
        for bound in implementation.bounds:
            regimes = BOUNDS[bound] + REGIMES[:1]
            cases = kda_cases.batch(1, ROWS, OTHER_LENGTH, HEADS, D, D, regimes)
            inputs = raw(cases, implementation.dtype, bound)
            got = runner(implementation, bound)(inputs)
            check(implementation, got, float64(inputs, None, bound), regimes)

    def test_4096_tokens(self, implementation):
        """Slow decay, and keys whose triangular systems are the hardest."""
        regimes = ["slow_decay", "no_decay", "equal_keys", "near_keys"]
        cases = kda_cases.batch(2, len(regimes), 4096, 1, D, D, regimes)
        cases[3][0] *= 0.1  # 5e-4 nats a token
        inputs = raw(cases, implementation.dtype)
        check(implementation, runner(implementation)(inputs), float64(inputs), regimes)

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
        check(implementation, (np.stack(whole), state), expected, ["slow_decay"])

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

    def test_packed(self, implementation):
        """Each sequence gives its float64 result, and the same bits where the others are empty and
        where they hold NaN, as rows behind the last one do. Empty ones keep their states.
        """
        length, all_lengths = 310, [(15, 85, 200, 0, 1, 3), (0, 64, 0, 128, 1, 0), (0,) * 6]
        cases = kda_cases.batch(5, 1, length, HEADS, D, D, ["slow_decay"])
        *tokens, A_log, dt_bias, _ = raw(cases, implementation.dtype)
        states = np.random.default_rng(5).standard_normal((6, HEADS, D, D), np.float32)
        states[:, 0, 0, :2] = -0.0, 1e-42
        call = jax.jit(
            functools.partial(
                kda_op.gated_kda, lower_bound=-5.0, implementation=implementation.name
            )
        )

        def run(inputs, lengths):
            lengths = jnp.asarray(lengths, jnp.int32)
            with implementation.running():
                o, after = call(*inputs, A_log, dt_bias, states, packed_lengths_N=lengths)
            o, after, empty = np.asarray(o), np.asarray(after), np.equal(lengths, 0)
            assert not o[0, np.sum(lengths) :].any()
            assert after[empty].tobytes() == states[empty].tobytes()
            return o, after

        for lengths in all_lengths:
            o, after = run(padded(tokens, [sum(lengths)], np.nan), lengths)
            for n, end in enumerate(np.cumsum(lengths)):
                if not lengths[n]:
                    continue
                start = end - lengths[n]
                first = padded([np.roll(x, -start, 1) for x in tokens], [lengths[n]], np.nan)
                there = [np.roll(x, start, 1) for x in first]
                alone = np.where(np.arange(6) == n, lengths, 0)
                for at, inputs, others in ((0, first, alone), (start, there, lengths)):
                    got_o, got = run(inputs, others)
                    rows = got_o[0, at : at + lengths[n]]
                    assert rows.tobytes() == o[0, start:end].tobytes()
                    assert got[n].tobytes() == after[n].tobytes()
                mine = [x[:, start:end] for x in tokens]
                expected = float64([*mine, A_log, dt_bias, states[n : n + 1]])
                got = o[:, start:end], after[n : n + 1]
                check(implementation, got, expected, ["slow_decay"])

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


@functools.cache
def step(implementation, lower_bound=-5.0):
    call = functools.partial(
        kda_op.kda_decode, lower_bound=lower_bound, eps=EPS, implementation=implementation.name
    )
    compiled = jax.jit(
        lambda token, weights, state, tails, valid, slot: call(
            *token, *weights, state, tails, valid_B=valid, slot=slot
        )
    )

    def run(*arguments):
        with implementation.running():
            return [np.asarray(x) for x in compiled(*arguments)]

    return run


def decode64(token, weights, state, tails, lower_bound=-5.0):
    leaves = jax.tree.map(wide, (*token, *weights, state, tails))
    dtype = token[0][0].dtype
    rounded = (lambda x: x) if dtype == np.float32 else lambda x: wide(jnp.asarray(x, dtype))
    return reference.kda_decode(*leaves, lower_bound=lower_bound, eps=EPS, rounded=rounded)


def check_steps(implementation, steps, batch, heads):
    """Rows that are not valid hold NaN and keep every bit; so do the other layers."""
    rng = np.random.default_rng(20)
    layers, slot = 3, 1
    token, weights, state, tails = decode_inputs(rng, implementation.dtype, batch, heads, layers)
    state[slot, 0, 0, 0, 0], state[slot, 0, -1, -1, -1] = 65536, 1e6
    state[slot, 1, 0, 0, :2] = -0.0, 1e-42
    state[0, 0, 0, 0, 0] = np.nan
    exact_state, exact_tails = state[slot].astype(np.float64), wide(tails[slot])
    for t in range(steps):
        token = decode_inputs(rng, implementation.dtype, batch, heads)[0]
        valid = rng.uniform(size=batch) < 0.8
        valid[0], valid[1] = True, t >= steps // 2
        poisoned = jax.tree.map(
            lambda x, v=valid: np.where(
                v.reshape(-1, *[1] * (x.ndim - 1)), x, np.asarray(np.nan, x.dtype)
            ),
            token,
        )
        o, new_state, new_tails = step(implementation)(
            poisoned, weights, state, tails, valid, np.int32(slot)
        )
        expected_o, *expected = decode64(token, weights, exact_state, exact_tails)
        exact_state = np.where(valid[:, None, None, None], expected[0], exact_state)
        exact_tails = np.where(valid[:, None, None], expected[1], exact_tails)
        errors = kda_cases.errors_by_row(o, np.where(valid[:, None, None], expected_o, 0))
        assert (errors[valid] <= implementation.step).all(), (t, errors)
        assert not o[~valid].any()
        assert (wide(new_tails[slot]) == exact_tails).all()
        for old, new, axis in ((state, new_state, 0), (tails, new_tails, 1)):
            assert np.delete(new, slot, 0).tobytes() == np.delete(old, slot, 0).tobytes()
            kept = [np.compress(~valid, x[slot], axis).tobytes() for x in (old, new)]
            assert kept[0] == kept[1]
        state, tails = new_state, new_tails
    errors = kda_cases.errors_by_row(state[slot], exact_state)
    assert (errors <= implementation.step).all(), errors


class DecodeContract:
    """What every implementation of `kda_decode` must satisfy."""

    def test_72_steps_in_a_stack(self, implementation):
        check_steps(implementation, steps=72, batch=5, heads=3)

    @pytest.mark.parametrize(("batch", "heads"), [(1, 2), (12, 4), (16, 1)])
    def test_batches_without_a_stack(self, implementation, batch, heads):
        """Blocks of 8 rows that fit and that do not; all rows real."""
        inputs = decode_inputs(np.random.default_rng(21), implementation.dtype, batch, heads)
        o, state, tails = step(implementation)(*inputs, None, None)
        expected_o, expected_state, expected_tails = decode64(*inputs)
        assert (kda_cases.errors_by_row(o, expected_o) <= implementation.step).all()
        assert (kda_cases.errors_by_row(state, expected_state) <= implementation.step).all()
        assert (wide(tails) == expected_tails).all()

    def test_other_bounds(self, implementation):
        for bound in implementation.bounds:
            inputs = decode_inputs(np.random.default_rng(22), implementation.dtype, 2, 2)
            o, state, _ = step(implementation, bound)(*inputs, None, None)
            expected_o, expected_state, _ = decode64(*inputs, bound)
            assert (kda_cases.errors_by_row(o, expected_o) <= implementation.step).all()
            assert (kda_cases.errors_by_row(state, expected_state) <= implementation.step).all()
