"""Packed sequences: each gives the bits it gives alone, whatever stands around it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.errors import InputError
from k3jax.ops import kda as kda_op
from k3jax.ops.kda.packing import num_chunks, pack
from k3jax.ops.packed import bounds
from k3jax.ops.short_conv import short_conv

KDA_FP32 = 1e-5  # see test_kda.py
LENGTHS = (15, 85, 200, 900, 1, 3)
H, K, V, W, P = 2, 16, 24, 4, 6
BOUND = -5.0


def draw(length, sequences, seed=0, dtype=np.float32):
    """(q, k, v, z, b) of one row, the gate's parameters, a random state a sequence."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    tokens = [normal(1, length, H, n) for n in (K, K, V, K)] + [normal(1, length, H)]
    gates = np.log(rng.uniform(1, 16, H)).astype(np.float32), normal(H, K)
    return [jnp.asarray(x, dtype) for x in tokens], gates, normal(sequences, H, V, K)


@jax.jit
def packed(tokens, gates, state, lengths_N):
    return kda_op.gated_kda(*tokens, *gates, state, lower_bound=BOUND, packed_lengths_N=lengths_N)


@jax.jit
def plain(tokens, gates, state, lengths_B):
    return kda_op.gated_kda(*tokens, *gates, state, lower_bound=BOUND, lengths_B=lengths_B)


def int32(values):
    return jnp.asarray(values, jnp.int32)


def same_bits(a, b):
    a, b = np.asarray(a), np.asarray(b)
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


def segments(lengths):
    ends = np.cumsum(lengths)
    return list(zip(ends - lengths, ends, strict=True))


def alone(tokens, start, end, fill=np.nan):
    """One sequence in a row of the same T; the rest holds ``fill``."""

    def move(x):
        rest = jnp.full((1, x.shape[1] - (end - start), *x.shape[2:]), fill, x.dtype)
        return jnp.concatenate([x[:, start:end], rest], axis=1)

    return [move(x) for x in tokens]


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
@pytest.mark.parametrize("lengths", [LENGTHS, (5, 0, 1, 9, 0), (0, 64, 128, 0, 1), (40,)], ids=str)
def test_bits_of_each_sequence_alone(lengths, dtype):
    """Against the same program with the other sequences empty, and against a batch row of
    the same T without boundaries. The first holds by construction. The second needs XLA to round
    row sums alike in two programs, and does at these shapes.
    """
    length = sum(lengths)
    tokens, gates, state = draw(length, len(lengths), dtype=dtype)
    state[:, 0, 0, 0] = -0.0
    o, after = packed(tokens, gates, state, int32(lengths))
    assert o.dtype == dtype
    for n, (start, end) in enumerate(segments(lengths)):
        if start == end:
            assert same_bits(after[n], state[n])
            continue
        mine = alone(tokens, start, end)
        only = int32(np.where(np.arange(len(lengths)) == n, end - start, 0))
        same, same_states = packed(mine, gates, state, only)
        row, row_state = plain(mine, gates, state[n : n + 1], int32([end - start]))
        for want, want_state in ((same, same_states[n]), (row, row_state[0])):
            assert same_bits(o[0, start:end], want[0, : end - start]), n
            assert same_bits(after[n], want_state), n


def test_groups_of_chunks(monkeypatch):
    """Chunks in several groups, sequences across their borders: the same bits."""
    tokens, gates, state = draw(sum(LENGTHS), len(LENGTHS))
    want = packed(tokens, gates, state, int32(LENGTHS))
    monkeypatch.setattr(kda_op.xla, "GROUP_ELEMENTS", 5 * 64 * H * V)
    form = functools.partial(kda_op.gated_kda, lower_bound=BOUND, packed_lengths_N=LENGTHS)
    assert "scan" in str(jax.make_jaxpr(form)(*tokens, *gates, state))
    for a, b in zip(jax.jit(form)(*tokens, *gates, state), want, strict=True):
        assert same_bits(a, b)


def test_neighbours_and_padding_change_no_bit():
    """Traced lengths may leave rows over at the end, which hold NaN."""
    lengths = (70, 3, 0, 60)
    tokens, gates, state = draw(150, 4)
    o, after = packed(tokens, gates, state, int32(lengths))
    other, _, other_state = draw(150, 4, seed=1)
    for n, (start, end) in enumerate(segments(lengths)):
        mine = (np.arange(150) >= start) & (np.arange(150) < end)
        mixed = [
            jnp.where(mine.reshape(1, -1, *[1] * (x.ndim - 2)), x, jnp.nan if n == 3 else y)
            for x, y in zip(tokens, other, strict=True)
        ]
        states = np.where(np.arange(4)[:, None, None, None] == n, state, other_state)
        got, got_state = packed(mixed, gates, states, int32(lengths))
        assert same_bits(got[0, start:end], o[0, start:end])
        assert same_bits(got_state[n], after[n])
        assert not np.asarray(got[0, 133:]).any()


def test_absent_state_is_zeros():
    tokens, gates, state = draw(20, 3)
    want = packed(tokens, gates, np.zeros_like(state), int32([7, 12, 1]))
    got = packed(tokens, gates, None, int32([7, 12, 1]))
    assert all(same_bits(a, b) for a, b in zip(got, want, strict=True))


def test_gradients():
    """Of a packed row and of its sequences in separate calls, NaN behind the last one."""
    lengths, length = (70, 0, 3, 20), 100
    tokens, gates, state = draw(length, len(lengths), seed=2)
    behind = np.arange(length) >= sum(lengths)
    tokens = [jnp.where(behind.reshape(1, -1, *[1] * (x.ndim - 2)), jnp.nan, x) for x in tokens]
    weight = np.random.default_rng(3).standard_normal((1, length, H, V)).astype(np.float32)

    def loss(o, state, weight):
        return jnp.sum(o * weight) + jnp.sum(state * state)

    def together(tokens, gates, state):
        return loss(*packed(tokens, gates, state, int32(lengths)), weight)

    def apart(tokens, gates, state):
        total = jnp.float32(0)
        for n, (start, end) in enumerate(segments(lengths)):
            if start == end:
                total += jnp.sum(state[n] * state[n])
                continue
            part = [x[:, start:end] for x in tokens]
            o, after = kda_op.gated_kda(*part, *gates, state[n : n + 1], lower_bound=BOUND)
            total += loss(o, after, weight[:, start:end])
        return total

    got = jax.tree.leaves(jax.jit(jax.grad(together, (0, 1, 2)))(tokens, gates, state))
    want = jax.tree.leaves(jax.jit(jax.grad(apart, (0, 1, 2)))(tokens, gates, state))
    for a, b in zip(got, want, strict=True):
        assert np.abs(a - b).max() <= KDA_FP32 * np.abs(b).max()


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("lengths", [(5, 0, 1, 9, 2, 0, 3), LENGTHS], ids=str)
def test_convolution(lengths, width, dtype):
    length, count = sum(lengths) + 7, len(lengths)
    rng = np.random.default_rng(4)
    x = jnp.asarray(rng.standard_normal((1, length, P)), dtype).at[:, sum(lengths) :].set(jnp.nan)
    w = rng.standard_normal((P, width)).astype(np.float32)
    tail = jnp.asarray(rng.standard_normal((count, width - 1, P)), dtype)
    tail = tail.at[:, :1].set(-0.0)
    run = jax.jit(short_conv)
    y, after = run(x, w, tail, None, int32(lengths))
    assert after.shape == tail.shape
    for n, (start, end) in enumerate(segments(lengths)):
        (moved,) = alone([x], start, end)
        want, want_tail = run(moved, w, tail[n : n + 1], int32([end - start]))
        assert same_bits(y[0, start:end], want[0, : end - start])
        assert same_bits(after[n], want_tail[0])
    assert not np.asarray(y[0, sum(lengths) :], np.float32).any()
    gradient = jax.jit(jax.grad(lambda w, n: jnp.sum(short_conv(x, w, tail, None, n)[0])))
    assert np.isfinite(gradient(w, int32(lengths))).all()


@pytest.mark.parametrize("chunk", [1, 4, 64])
@pytest.mark.parametrize("lengths", [(5, 0, 1, 9, 0), (0,), (1,) * 20, (0, 64, 64, 0), LENGTHS])
def test_table(lengths, chunk):
    """Against the table written down one row after another."""
    for length in (sum(lengths), sum(lengths) + 3):
        if length == 0:
            continue
        rows, sequence, first, last = [], [], [], []
        for n, (start, end) in enumerate(segments(lengths)):
            for at in range(start, end, chunk):
                piece = list(range(at, min(at + chunk, end)))
                rows += piece + [-1] * (chunk - len(piece))
                sequence.append(n)
                first.append(at == start)
                last.append(at + chunk >= end)
        left = num_chunks(len(lengths), length, chunk) - len(sequence)
        assert left >= 0
        table = jax.jit(lambda n, T=length: pack(*bounds("f", n, T), T, chunk))(int32(lengths))
        assert table.row_R.tolist() == rows + [-1] * (left * chunk)
        assert table.sequence_C.tolist() == sequence + [len(lengths)] * left
        assert table.first_C.tolist() == first + [False] * left
        assert table.last_C.tolist() == last + [False] * left
        where = {row: at for at, row in enumerate(rows) if row >= 0}
        assert table.padded_T.tolist() == [where.get(t, -1) for t in range(length)]


def test_the_bound_on_chunks_is_reached():
    for lengths, chunk in (((1, 1, 1), 64), ((65, 1), 64), ((5, 5, 2), 4)):
        assert num_chunks(len(lengths), sum(lengths), chunk) == sum(-(-n // chunk) for n in lengths)


def test_traced_lengths_are_clipped():
    run = jax.jit(lambda lengths: bounds("f", lengths, 10))
    start, length = run(int32([-3, 4, 2**31 - 1, 2**31 - 1, 2]))
    assert start.tolist() == [0, 0, 4, 10, 10]
    assert length.tolist() == [0, 4, 6, 0, 0]


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ((5, 4), r"packed_lengths sum to 9, expected T = 10"),
        (np.array([5, 6]), r"packed_lengths sum to 11, expected T = 10"),
        (jnp.asarray(np.array([12, -2], np.int32)), r"packed_lengths\[1\] = -2 is negative"),
        ((), r"expected integers|names no sequence"),
        (np.zeros(0, np.int32), r"names no sequence \(N = 0\)"),
        (np.array([[10]]), r"packed_lengths is int64\[1, 1\], expected integers \[N\]"),
        ((5.0, 5.0), r"packed_lengths is float64\[2\], expected integers \[N\]"),
    ],
    ids=str,
)
def test_refused_lengths(lengths, message):
    tokens, gates, _ = draw(10, 2)
    with pytest.raises(InputError, match=f"gated_kda: .*{message}"):
        kda_op.gated_kda(*tokens, *gates, lower_bound=BOUND, packed_lengths_N=lengths)
    x, w = np.zeros((1, 10, P), np.float32), np.zeros((P, W), np.float32)
    with pytest.raises(InputError, match=f"short_conv: .*{message}"):
        short_conv(x, w, packed_lengths_N=lengths)


def test_refused_combinations():
    tokens, gates, state = draw(10, 3)
    call = functools.partial(kda_op.gated_kda, *tokens, *gates, lower_bound=BOUND)
    both = {"packed_lengths_N": (4, 6), "lengths_B": int32([10])}
    with pytest.raises(InputError, match="gated_kda: lengths and packed_lengths given"):
        call(**both)
    with pytest.raises(InputError, match=r"state is float32\[3, .*expected float32\[2, "):
        call(state, packed_lengths_N=(4, 6))
    two = [jnp.concatenate([x, x]) for x in tokens]
    with pytest.raises(InputError, match="packed_lengths with batch 2, expected batch 1"):
        kda_op.gated_kda(*two, *gates, lower_bound=BOUND, packed_lengths_N=(4, 6))
    x, w = np.zeros((1, 10, P), np.float32), np.zeros((P, W), np.float32)
    with pytest.raises(InputError, match="short_conv: lengths and packed_lengths given"):
        short_conv(x, w, **both)
    with pytest.raises(InputError, match="packed_lengths with batch 2, expected batch 1"):
        short_conv(np.concatenate([x, x]), w, packed_lengths_N=(4, 6))
    with pytest.raises(InputError, match=r"tail is .*expected float32\[2, 3, 6\]"):
        short_conv(x, w, np.zeros((1, W - 1, P), np.float32), packed_lengths_N=(4, 6))
