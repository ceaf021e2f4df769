"""Kimi Delta Attention: every registered implementation against a float64 token loop."""

import functools

import jax
import jax.numpy as jnp
import kda_cases
import numpy as np
import pytest

from k3jax.ops import kda as kda_op
from k3jax.ops.kda import reference, xla

# Relative to the float64 loop; measured 1.4e-6 (chunked, associative) and 4.7e-6 (recurrent, where
# the rounding of exp(g) near 1 adds up over the tokens).
KDA_FP32 = 1e-5
KDA_IDENTITY = 1e-6  # closed forms
# One key, beta 1: output t is the sum of the differences v_t - v_(t-1) over its chunk. Measured
# 1.3e-6 after 500 tokens in the chunked forms, 1e-7 token by token.
KDA_LAST_VALUE = 3e-6
KDA_GRADIENT = 1e-5  # relative to the scan over tokens, measured 1.3e-6
KDA_FINITE_DIFFERENCE = 1e-5  # of the sum of |gradient * direction|, measured 4.4e-7

ROWS, HEADS = 45, 2
SHAPES = (  # T, K, V: chunks of 64, tiles that just fit or just do not
    (1, 16, 24),
    (2, 16, 24),
    (7, 24, 16),
    (15, 16, 24),
    (16, 24, 16),
    (17, 16, 24),
    (50, 16, 24),
    (63, 24, 16),
    (64, 16, 24),
    (65, 16, 24),
    (127, 24, 16),
    (130, 16, 24),
)
IMPLEMENTATIONS = tuple(kda_op.IMPLEMENTATIONS)


@functools.cache
def runner(implementation, optimised=False):
    """Compiled `kda`. Nearly all the time of this file is compilation; without LLVM's optimiser
    (level 0) it halves. Long inputs and wide heads run as users get them.
    """
    options = {} if optimised else {"xla_backend_optimization_level": 0}
    call = functools.partial(kda_op.kda, implementation=implementation)
    return jax.jit(call, compiler_options=options)


@functools.cache
def drawn(shape):
    length, k_dim, v_dim = shape
    inputs = kda_cases.batch(1, ROWS, length, HEADS, k_dim, v_dim)
    return inputs, kda_cases.float64(inputs)


def where_rows(rows_BT, x, y):
    """x in the rows that are True, else y; for arrays with axes after [B, T]."""
    return np.where(rows_BT.reshape(*rows_BT.shape, *[1] * (x.ndim - 2)), x, np.float32(y))


def check(got, expected, limit=KDA_FP32):
    for name, a, b in zip(("output", "state"), got, expected, strict=True):
        assert a.shape == b.shape
        errors = kda_cases.errors_by_row(a, b)  # a NaN fails the comparison below
        worst = int(np.argmax(errors))
        assert (errors <= limit).all(), f"{name} of row {worst}: {errors[worst]:.2e}"


def test_at_least_500_cases():
    assert len(SHAPES) * ROWS >= 500
    assert ROWS % len(kda_cases.REGIMES) == 0


class KDAContract:
    """What every implementation must satisfy; `implementation` is its name."""

    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_drawn_cases(self, implementation, shape):
        inputs, expected = drawn(shape)
        got = runner(implementation)(*inputs)
        assert got[1].shape == (ROWS, HEADS, shape[2], shape[1])
        check(got, expected)

    def test_every_lower_bound(self, implementation):
        """Constant decays at and around every bound, in half the channels and in all, d = 128."""
        bounds = (-5, -4, -3, -2, -1, -1e-4, -5.9, -6, -20, -88, -500)
        q, k, v, g, beta, state = kda_cases.batch(2, 2 * len(bounds), 128, 1, 128, 128, ["random"])
        for row, bound in enumerate(bounds):
            jitter = 1 - 2e-4 * np.random.default_rng(row).uniform(size=g[0].shape)
            g[row] = bound * jitter
            g[row + len(bounds)] = bound * jitter
            g[row + len(bounds), ..., ::2] = -1e-7
        inputs = (q, k, v, g, beta, state)
        check(runner(implementation, optimised=True)(*inputs), kda_cases.float64(inputs))

    @pytest.mark.parametrize("shape", [(1, 16, 24), (7, 24, 16), (50, 16, 24), (64, 16, 24),
                                       (65, 16, 24), (500, 16, 24)], ids=str)  # fmt: skip
    def test_closed_forms(self, implementation, shape):
        length, k_dim, v_dim = shape
        inputs = kda_cases.batch(3, ROWS, length, HEADS, k_dim, v_dim, ["random"])
        q, k, v, g, beta, state = inputs
        g[0] = 0  # the ungated delta rule
        beta[1] = 0  # decay alone
        g[2], beta[2], k[2] = 0, 1, k[2, :1]  # one key: the last value comes back
        q[2] = k[2]
        g[3], beta[3] = -5, 0  # e^-5 a step
        o, new_state = (np.asarray(x, np.float64) for x in runner(implementation)(*inputs))

        s = state[0].astype(np.float64)
        for t in range(length):
            u = beta[0, t, :, None] * (v[0, t] - np.einsum("hvk,hk->hv", s, k[0, t]))
            s = s + u[:, :, None] * k[0, t, :, None, :]
            expected = np.einsum("hvk,hk->hv", s, q[0, t])
            assert np.abs(o[0, t] - expected).max() <= KDA_IDENTITY * np.abs(s).max()
        assert np.abs(new_state[0] - s).max() <= KDA_IDENTITY * np.abs(s).max()

        gone = np.exp(np.cumsum(g[1].astype(np.float64), axis=0))
        expected = np.einsum("hvk,thk->thv", state[1], gone * q[1])
        assert np.abs(o[1] - expected).max() <= KDA_IDENTITY * np.abs(expected).max()
        assert np.abs(o[2] - v[2]).max() <= KDA_LAST_VALUE * np.abs(v[2]).max()
        for t in range(length):
            expected = np.einsum("hvk,hk->hv", state[3] * np.exp(-5.0 * (t + 1)), q[3, t])
            assert np.abs(o[3, t] - expected).max() <= KDA_IDENTITY * np.abs(expected).max() + 1e-37
        expected = state[3] * np.exp(-5.0 * length)
        assert (
            np.abs(new_state[3] - expected).max() <= KDA_IDENTITY * np.abs(expected).max() + 1e-37
        )

    def test_every_split_of_130_tokens(self, implementation):
        """Row a: a tokens, then the other 130 - a from the carried state; padding holds NaN."""
        length = 130
        splits = np.arange(1, length)
        one = kda_cases.batch(4, 1, length, 1, 8, 12, ["random"])
        one[3][:] *= 0.1  # the state survives more than a few tokens
        expected_o, expected_state = kda_cases.float64(one)

        def call(starts, stops, state):
            rows = starts[:, None] + np.arange(length)
            valid = rows < stops[:, None]
            tokens = [x[0][np.minimum(rows, length - 1)] for x in one[:5]]
            inputs = [where_rows(valid, x, np.nan) for x in tokens]
            o, state = runner(implementation)(*inputs, state, valid_BT=valid)
            return np.asarray(o), np.asarray(state)

        state = np.broadcast_to(one[5], (len(splits), *one[5].shape[1:]))
        first, state = call(np.zeros_like(splits), splits, state)
        second, state = call(splits, np.full_like(splits, length), state)
        for row, split in enumerate(splits):
            got = np.concatenate([first[row, :split], second[row, : length - split]])
            assert np.abs(got - expected_o[0]).max() <= KDA_FP32 * np.abs(expected_o).max()
        expected_state = np.broadcast_to(expected_state, state.shape)
        assert (kda_cases.errors_by_row(state, expected_state) <= KDA_FP32).all()

    def test_pieces_without_padding(self, implementation):
        inputs, expected = drawn((130, 16, 24))
        for pieces in ((65, 65), (64, 2, 64), (50, 15, 65)):
            state, outputs, start = inputs[5], [], 0
            for piece in pieces:
                part = [x[:, start : start + piece] for x in inputs[:5]]
                o, state = runner(implementation)(*part, state)
                outputs.append(np.asarray(o))
                start += piece
            check((np.concatenate(outputs, axis=1), state), expected)

    def test_later_tokens_change_no_earlier_bit(self, implementation):
        inputs, _ = drawn((130, 16, 24))
        base = np.asarray(runner(implementation)(*inputs)[0])
        cuts = np.linspace(1, 129, ROWS).astype(int)
        other = kda_cases.batch(5, ROWS, 130, HEADS, 16, 24)
        later = np.arange(130) >= cuts[:, None]
        changed = [where_rows(later, y, x) for x, y in zip(inputs[:5], other[:5], strict=True)]
        got = np.asarray(runner(implementation)(*changed, inputs[5])[0])
        for row, cut in enumerate(cuts):
            assert got[row, :cut].tobytes() == base[row, :cut].tobytes()
            assert (got[row, cut:] != base[row, cut:]).any()

    def test_padding_rows(self, implementation):
        """Right padding from none to all; what it holds does not matter."""
        (*tokens, state), _ = drawn((130, 16, 24))
        real = np.linspace(0, 130, ROWS).astype(int)
        valid = np.arange(130) < real[:, None]
        state = state.copy()
        state[0, 0, 0] = -0.0
        results = []
        for garbage in (np.nan, np.inf, 7.0):
            padded = [where_rows(valid, x, garbage) for x in tokens]
            got = runner(implementation)(*padded, state, valid_BT=valid)
            o, new_state = (np.asarray(x) for x in got)
            assert not o[~valid].any()
            assert np.isfinite(o).all()
            assert np.isfinite(new_state).all()
            assert new_state[0].tobytes() == state[0].tobytes()
            results.append((o, new_state))
        for o, new_state in results[1:]:
            assert o.tobytes() == results[0][0].tobytes()
            assert new_state.tobytes() == results[0][1].tobytes()
        for row in (1, 20, ROWS - 1):
            alone = [x[row : row + 1, : real[row]] for x in tokens] + [state[row : row + 1]]
            expected_o, expected_state = kda_cases.float64(alone)
            got = (results[0][0][row : row + 1, : real[row]], results[0][1][row : row + 1])
            check(got, (expected_o, expected_state))

    def test_padding_anywhere(self, implementation):
        """Left padding and holes: the same as the tokens closed up."""
        inputs, _ = drawn((130, 16, 24))
        rng = np.random.default_rng(6)
        valid = rng.uniform(size=(ROWS, 130)) < rng.uniform(size=(ROWS, 1))
        valid[0, :17], valid[0, 17:] = False, True
        tokens = [where_rows(valid, x, np.nan) for x in inputs[:5]]
        o, state = runner(implementation)(*tokens, inputs[5], valid_BT=valid)
        for row in (0, 1, 7, 13, 30):
            closed = [x[row : row + 1, valid[row]] for x in inputs[:5]] + [inputs[5][row : row + 1]]
            got = (np.asarray(o)[row : row + 1, valid[row]], state[row : row + 1])
            check(got, kda_cases.float64(closed))

    def test_slow_decay_against_single_steps(self, implementation):
        """4,096 tokens at once against 4,096 decode steps, decays of 1e-4 a token."""
        inputs, steps = slow_case()
        got = runner(implementation, optimised=True)(*inputs)
        check(got, steps)
        check(got, kda_cases.float64(inputs))

    def test_gradients(self, implementation):
        """Against the scan over tokens and against finite differences of the float64 loop.

        The last row ends in padding that holds NaN.
        """
        tokens, state, valid, o_weight, state_weight = gradient_case()
        got = gradients(implementation)
        for i, (a, b) in enumerate(zip(got, gradients("recurrent"), strict=True)):
            assert (kda_cases.errors_by_row(a, b) <= KDA_GRADIENT).all(), i
        for grad in got[:5]:
            assert not grad[~valid].any()

        wide = [where_rows(valid, x, 0).astype(np.float64) for x in tokens]
        wide.append(state.astype(np.float64))

        def loss_by_row(inputs):
            o, state = reference.kda(*inputs)
            return (o * o_weight).sum((1, 2, 3)) + (state * state_weight).sum((1, 2, 3))

        for i, grad in enumerate(got):
            direction = np.random.default_rng(i).standard_normal(wide[i].shape)
            if i < 5:
                direction = where_rows(valid, direction, 0)
            step = 1e-5
            up, down = ([*wide[:i], wide[i] + s * direction, *wide[i + 1 :]] for s in (step, -step))
            slope = (loss_by_row(up) - loss_by_row(down)) / (2 * step)
            terms = (grad.astype(np.float64) * direction).reshape(6, -1)
            size = np.abs(terms).sum(1)
            assert (np.abs(terms.sum(1) - slope) <= KDA_FINITE_DIFFERENCE * size + 1e-9).all(), i

    def test_65537_tokens(self, implementation):
        inputs, expected = long_case(65537)
        o, state = runner(implementation, optimised=True)(*inputs)
        check((o[:, -64:], state), expected)
        assert len(np.unique(np.asarray(o[:, 65472:, 0, 0]))) == 65


@functools.cache
def slow_case():
    """4,096 tokens, and the result of decoding them one call of `kda` at a time."""
    inputs = kda_cases.batch(7, 4, 4096, 1, 8, 12, ["slow_decay", "no_decay"])
    inputs[3][:] *= 0.1

    def decode(state, token):
        o, state = kda_op.kda(*[x[:, None] for x in token], state)
        return state, o[:, 0]

    tokens = [np.moveaxis(x, 1, 0) for x in inputs[:5]]
    state, o = jax.jit(functools.partial(jax.lax.scan, decode))(inputs[5], tokens)
    return inputs, (np.moveaxis(np.asarray(o), 0, 1), np.asarray(state))


@functools.cache
def gradient_case():
    regimes = ("random", "saturated", "equal_keys", "no_decay", "zero_keys", "softplus")
    (*tokens, state) = kda_cases.batch(8, len(regimes), 70, 1, 8, 12, regimes)
    valid = np.arange(70) < np.array([70, 70, 70, 70, 70, 40])[:, None]
    rng = np.random.default_rng(8)
    return (
        tokens,
        state,
        valid,
        rng.standard_normal((6, 70, 1, 12)),
        rng.standard_normal(state.shape),
    )


@functools.cache
def gradients(implementation):
    tokens, state, valid, o_weight, state_weight = gradient_case()

    def loss(*inputs):
        o, state = kda_op.kda(*inputs, valid_BT=valid, implementation=implementation)
        return jnp.sum(o * o_weight.astype(np.float32)) + jnp.sum(
            state * state_weight.astype(np.float32)
        )

    inputs = [where_rows(valid, x, np.nan) for x in tokens] + [state]
    return [np.asarray(x) for x in jax.jit(jax.grad(loss, range(6)))(*inputs)]


@functools.cache
def long_case(length):
    """One head, 8 x 12, and the last 64 outputs and the state of the float64 loop.

    Decays of at least 0.02 nats a token: what lies 8,192 tokens back has shrunk by e^-160, so the
    loop may start there.
    """
    inputs = kda_cases.batch(9, 1, length, 1, 8, 12, ["random"])
    inputs[3][:] = np.minimum(inputs[3] * 0.05, -0.02)
    tail = [x[:, -8192:] for x in inputs[:5]] + [np.zeros_like(inputs[5])]
    o, state = kda_cases.float64(tail)
    return inputs, (o[:, -64:], state)


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request):
    return request.param


class TestKDA(KDAContract):
    pass


@pytest.mark.parametrize("length", [65535, 65536, 131073])
def test_long_lengths(length):
    inputs, expected = long_case(length)
    o, state = runner("chunked", optimised=True)(*inputs)
    check((o[:, -64:], state), expected)
    assert len(np.unique(np.asarray(o[:, -64:, 0, 0]))) == 64


@pytest.mark.parametrize("run", [xla.chunked, xla.associative])
def test_every_dot_is_full_float32(run):
    """A CPU computes them exactly anyway; a TPU or a GPU would not."""
    text = str(jax.make_jaxpr(run)(*drawn((130, 16, 24))[0]))
    dots = text.split("dot_general[")[1:]
    assert len(dots) >= 10
    for dot in dots:
        assert "precision=(Precision.HIGHEST, Precision.HIGHEST)" in dot.split("]\n")[0][:300]


@pytest.mark.parametrize("shape", [(17, 16, 24), (130, 16, 24)], ids=str)
def test_no_exponent_is_positive(shape, monkeypatch):
    """Also on saturated gates, which random ones never reach; and there is no other exponential."""
    inputs, _ = drawn(shape)
    largest = []

    def watched(x):
        jax.debug.callback(lambda m: largest.append(float(m)), jnp.max(x))
        return jnp.exp(x)

    monkeypatch.setattr(xla, "_exp", watched)
    got = jax.jit(lambda *x: xla.chunked(*x))(*inputs)
    jax.block_until_ready(got)
    jax.effects_barrier()
    assert len(largest) >= 3
    assert max(largest) <= 0

    monkeypatch.setattr(xla, "_exp", lambda x: x)  # what is left must hold no other exponential
    text = str(jax.make_jaxpr(lambda *x: xla.chunked(*x))(*inputs))
    assert not [op for op in (" exp ", "exp2", " pow", "expm1", "logistic") if op in text]


def test_groups_of_chunks(monkeypatch):
    """Longer inputs scan over groups: 5 chunks in 3 groups of 2; values and gradients."""
    inputs = kda_cases.batch(10, 2, 300, 1, 8, 12, ["random", "slow_decay"])

    def grads_and_values(run):
        def loss(*inputs):
            o, state = run(*inputs)
            return jnp.sum(o**2) + jnp.sum(state**2), (o, state)

        return jax.jit(jax.grad(loss, range(6), has_aux=True))(*inputs)

    monkeypatch.setattr(xla, "GROUP_ELEMENTS", 2 * 2 * 64 * 12)
    expected = kda_cases.float64(inputs)
    grads, values = grads_and_values(xla.chunked)
    check(values, expected)
    for a, b in zip(grads, grads_and_values(xla.recurrent)[0], strict=True):
        assert (kda_cases.errors_by_row(a, np.asarray(b)) <= KDA_GRADIENT).all()
    check(jax.jit(xla.associative)(*inputs), expected)


def test_chunk_maps_compose_to_the_whole():
    inputs, (_, expected) = drawn((130, 16, 24))
    _, k, v, g, beta, state = inputs
    maps = jax.jit(kda_op.chunk_maps)(k, v, g, beta)
    assert [m.shape for m in maps] == [(3, ROWS, HEADS, 16, 16), (3, ROWS, HEADS, 24, 16)]
    first, second, third = ([m[n] for m in maps] for n in range(3))
    left = kda_op.compose(kda_op.compose(first, second), third)
    right = kda_op.compose(first, kda_op.compose(second, third))
    for m, b in (left, right):
        got = np.einsum("bhvi,bhij->bhvj", state, m) + np.asarray(b)
        assert (kda_cases.errors_by_row(got, expected) <= KDA_FP32).all()
