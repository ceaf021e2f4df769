"""Speculative decoding: what is committed has the bits of serial decode, for every acceptance."""

import functools
import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tolerances as tol

from k3jax.errors import InputError, K3Error
from k3jax.generate.speculative import repeated, speculate
from k3jax.ops import kda as kda_op
from k3jax.runtime import Model, Pending

H, K, W = 2, 16, 4
P = H * K
# Every pattern of 4 rounds in which 0..3 of 3 drafts prove right, one a batch row.
PATTERNS = np.array(list(itertools.product(range(4), repeat=4)), np.int32)


def same_bits(a, b):
    a, b = np.asarray(a), np.asarray(b)
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


# The op: rounds of windows on given projections.


def weights():
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)  # noqa: E731
    return tuple(normal(P, W) for _ in range(3)), normal(H), normal(H, K), normal(K)


def projections(seed, batch, length, dtype):
    """(qkv, z, b, gate) of random rows, time second."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32).astype(dtype)  # noqa: E731
    qkv = tuple(draw(batch, length, P) for _ in range(3))
    return qkv, draw(batch, length, H, K), draw(batch, length, H), draw(batch, length, H, K)


def initial(batch, dtype, layers=()):
    rng = np.random.default_rng(9)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)  # noqa: E731
    return draw(*layers, batch, H, K, K), draw(*layers, 3, batch, W - 1, P).astype(dtype)


COMMON = {"lower_bound": -5.0}


@functools.partial(jax.jit, static_argnames="validity")
def decode(inputs, state, tails, valid_B, slot=None, validity=True):
    valid_B = valid_B if validity else None
    options = COMMON | {"eps": 1e-5, "valid_B": valid_B, "slot": slot}
    return kda_op.kda_decode(*inputs, *weights(), state, tails, **options)


@jax.jit
def verify(inputs, state, tails, slot=None, lengths_B=None):
    options = COMMON | {"eps": 1e-5, "slot": slot, "lengths_B": lengths_B}
    return kda_op.verify_window(*inputs, *weights(), state, tails, **options)


@jax.jit
def commit(window, accepted_B, state, tails, slot=None):
    gates = weights()[:3]
    return kda_op.commit(window, accepted_B, *gates, state, tails, **COMMON, slot=slot)


@jax.jit
def replay_and_verify(window, accepted_B, inputs, state, tails, slot=None):
    options = COMMON | {"eps": 1e-5, "slot": slot}
    return kda_op.replay_and_verify(
        window, accepted_B, *inputs, *weights(), state, tails, **options
    )


def run_patterns(rows, length, dtype, slot=None):
    """Rounds of windows of which ``rows`` [B, rounds] rows each are kept, against one `kda_decode`
    a kept row: outputs, and state and tails at the end."""
    batch, rounds = rows.shape
    layers = () if slot is None else (3,)
    start = initial(batch, dtype, layers)
    windows = [projections(seed, batch, length, dtype) for seed in range(rounds)]
    state, tails = start
    o, window = verify(windows[0], state, tails, slot)
    outputs = [o]
    for i in range(1, rounds):
        o, state, tails, window = replay_and_verify(
            window, rows[:, i - 1], windows[i], state, tails, slot
        )
        outputs.append(o)
    got = commit(window, rows[:, -1], state, tails, slot)

    # The kept rows of every batch row, closed up.
    total = rows.sum(1)
    kept = np.arange(length) < rows[:, :, None]
    order = np.argsort(~kept.reshape(batch, -1), axis=1, kind="stable")[:, : total.max()]
    close = lambda *parts: np.take_along_axis(  # noqa: E731
        np.concatenate(parts, 1),
        order.reshape(*order.shape, *[1] * (np.ndim(parts[0]) - 2)), axis=1,
    )  # fmt: skip
    closed = jax.tree.map(close, *windows)
    outputs = close(*map(np.asarray, outputs))
    state, tails = start
    for t in range(total.max()):
        valid_B = jnp.asarray(t < total)
        row = jax.tree.map(lambda x, t=t: x[:, t], closed)
        o, state, tails = decode(row, state, tails, valid_B, slot)
        assert same_bits(outputs[t < total, t], np.asarray(o)[t < total])
    assert same_bits(got[0], state)
    assert same_bits(got[1], tails)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("slot", [None, 1])
def test_all_patterns_of_four_windows(dtype, slot):
    slot = None if slot is None else jnp.int32(slot)
    run_patterns(PATTERNS + 1, 4, dtype, slot)


def test_a_thousand_random_patterns():
    """Windows of 6 rows, of which 0 to 6 are kept: also none of a window."""
    run_patterns(
        np.random.default_rng(1).integers(0, 7, (1000, 5)).astype(np.int32), 6, jnp.float32
    )


@pytest.mark.parametrize(("batch", "length"), [(1, 1), (3, 8)])
def test_single_steps_without_validity(batch, length):
    """Calls of `kda_decode` as a user makes them, one state kept after each."""
    inputs, (state, tails) = projections(3, batch, length, jnp.float32), initial(batch, jnp.float32)
    o, window = verify(inputs, state, tails)
    states = [(state, tails)]
    for t in range(length):
        row = jax.tree.map(lambda x, t=t: x[:, t], inputs)
        o_B, *after = decode(row, *states[-1], None, validity=False)
        assert same_bits(o[:, t], o_B)
        states.append(tuple(after))
    for kept in range(length + 1):
        got = commit(window, jnp.full((batch,), kept, jnp.int32), state, tails)
        assert all(same_bits(a, b) for a, b in zip(got, states[kept], strict=True))


def test_rows_that_do_not_count():
    """NaN behind a row's length, and counts out of range."""
    (state, tails), lengths = initial(5, jnp.float32), np.arange(5, dtype=np.int32)
    inputs = projections(4, 5, 4, jnp.float32)
    behind = np.arange(4) >= lengths[:, None]
    bad = jax.tree.map(
        lambda x: jnp.where(behind.reshape(5, 4, *[1] * (x.ndim - 2)), jnp.nan, x), inputs
    )
    want, _ = verify(inputs, state, tails, None, lengths)
    got, window = verify(bad, state, tails, None, lengths)
    assert same_bits(got, want)
    assert not np.asarray(got)[behind].any()
    state = state.at[0, 0, 0, 0].set(-0.0)
    after = commit(window, lengths - 1, state, tails)  # -1 for the first row
    assert np.isfinite(after[0]).all()
    assert same_bits(after[0][:2], state[:2])
    assert same_bits(after[1][:, :2], tails[:, :2])
    full = verify(inputs, state, tails)[1]
    for a, b in zip(
        commit(full, jnp.full((5,), 9, jnp.int32), state, tails),
        commit(full, jnp.full((5,), 4, jnp.int32), state, tails),
        strict=True,
    ):
        assert same_bits(a, b)
    with pytest.raises(InputError, match=r"commit: accepted is int32\[4\], expected int32\[5\]"):
        commit(full, lengths[:4], state, tails)
    with pytest.raises(InputError, match=r"verify_window: lengths is int32\[4\]"):
        verify(inputs, state, tails, None, lengths[:4])


# The model.


def model(dsa=True):
    return _model(dsa)


@functools.cache  # `f()` and `f(True)` would be two entries, and every program compiled twice
def _model(dsa):
    return Model(tiny.module(tiny.config(dsa=dsa)), donate=True)


def start(dsa=True):
    """(first greedy token of each of 256 rows, cache) after prompts of 1 to 9 tokens."""
    ids = tiny.tokens(256, 9)
    lengths = np.random.default_rng(2).integers(1, 10, 256)
    logits, cache = model(dsa).prefill(ids, model(dsa).init_cache(256, 64), lengths)
    return np.asarray(logits.argmax(-1), np.int32), cache


def kda_arrays(cache):
    """State and tails of every layer."""
    caches = (*cache.arrays.head, *cache.arrays.period, *cache.arrays.tail)
    return [x for c in caches if hasattr(c, "state_BHVK") for x in (c.state_BHVK, c.tails_3BWP)]


@functools.cache
def serial(dsa, steps=17):
    """Greedy tokens [B, steps + 1], one real row a window, and the cache arrays after each step."""
    token, cache = start(dsa)
    tokens, snapshots, accepted = [token], [], None
    for _ in range(steps):
        window = np.zeros((len(token), 4), np.int32)
        window[:, 0] = tokens[-1]
        logits, cache = model(dsa).verify(window, cache, accepted, np.ones_like(token))
        accepted = np.ones_like(token)
        tokens.append(np.asarray(logits[:, 0].argmax(-1), np.int32))
        # One step late: the state of a pending window is that before it.
        snapshots.append([np.asarray(x) for x in kda_arrays(cache)])
    return np.stack(tokens, 1), snapshots


def run_model(dsa, wanted, drafts):
    """Rounds in which ``wanted`` [B, rounds] of ``drafts`` [B, rounds] guesses prove right."""
    truth, snapshots = serial(dsa)
    token, cache = start(dsa)
    held, accepted = np.zeros_like(token), None  # new tokens in the state
    each = np.arange(len(token))
    for right, count in zip(wanted.T, drafts.T, strict=True):
        at = np.minimum(held[:, None] + np.arange(4), truth.shape[1] - 1)
        window = truth[each[:, None], at]
        wrong = np.arange(4) == right[:, None] + 1
        window = np.where(wrong, (window + 1) % 96, window)
        logits, cache = model(dsa).verify(window, cache, accepted, count + 1)
        chosen = np.asarray(logits.argmax(-1))
        guesses = np.arange(3) < count[:, None]
        kept = np.cumprod((chosen[:, :3] == window[:, 1:]) & guesses, axis=1).sum(1)
        np.testing.assert_array_equal(kept, right)
        for row in each:
            n, h = kept[row] + 1, held[row]
            np.testing.assert_array_equal(chosen[row, :n], truth[row, h + 1 : h + n + 1])
        accepted = (kept + 1).astype(np.int32)
        held = held + accepted
    cache = model(dsa).commit(cache, accepted)
    for i, got in enumerate(kda_arrays(cache)):
        got = np.asarray(got)
        axis = got.ndim - (3 if i % 2 else 4)  # of the batch, in tails and in states
        want = np.stack([snapshots[n][i].take(row, axis) for row, n in enumerate(held)], axis)
        assert same_bits(got, want), i


@pytest.mark.parametrize("dsa", [True, False])
def test_all_patterns_of_the_model(dsa):
    """State, tails and tokens, bit for bit those of one real row a window."""
    run_model(dsa, PATTERNS, np.full_like(PATTERNS, 3))


def test_a_thousand_random_patterns_of_the_model():
    """With fewer guesses than fit, too."""
    rng = np.random.default_rng(5)
    for _ in range(4):  # 4 x 256
        drafts = rng.integers(0, 4, PATTERNS.shape).astype(np.int32)
        wanted = (rng.uniform(size=drafts.shape) * (drafts + 1)).astype(np.int32)
        run_model(True, wanted, drafts)


def test_serial_windows_against_decode():
    """Plain decode is another program: the same tokens, logits and states up to rounding."""
    truth, snapshots = serial(True)
    token, cache = start(True)
    for step in range(16):
        if step:
            for a, b in zip(kda_arrays(cache), snapshots[step], strict=True):
                assert np.abs(np.asarray(a) - b).max() <= tol.WINDOW_FP32 * np.abs(b).max()
        logits, cache = model(True).decode(token, cache)
        token = np.asarray(logits.argmax(-1), np.int32)
        np.testing.assert_array_equal(token, truth[:, step + 1])


def test_dropped_drafts_leave_nothing():
    """Rejected rows in the caches of global layers are never seen: decode after a commit."""
    token, cache = start()
    want = model().decode(token, cache)[0]
    token, cache = start()
    _, cache = model().verify(tiny.tokens(256, 4, seed=8), cache)
    assert isinstance(cache, Pending)
    cache = model().commit(cache, np.zeros(256, np.int32))
    assert not isinstance(cache, Pending)
    assert same_bits(model().decode(token, cache)[0], want)


def test_refusals():
    one, ids = model(), tiny.tokens(256, 60)
    token, cache = start()
    zeros, drafts = np.zeros(256, np.int32), np.full(256, 3)
    with pytest.raises(InputError, match="no pending drafts to commit"):
        one.commit(cache, zeros)
    with pytest.raises(InputError, match="accepted counts for a cache without pending drafts"):
        one.verify(ids[:, :4], cache, zeros)
    with pytest.raises(InputError, match=r"row \d+: \d tokens .* and 60 more exceed its length 64"):
        one.verify(ids, cache)
    _, pending = one.verify(ids[:, :4], cache, lengths_B=drafts)
    with pytest.raises(InputError, match="this cache was consumed by an earlier call"):
        one.verify(ids[:, :4], cache)
    with pytest.raises(InputError, match=r"accepted counts \[4, 4, .*: from 0 to \[3, 3, "):
        one.commit(pending, drafts + 1)
    with pytest.raises(InputError, match=r"accepted counts \[-1, -1, "):
        one.verify(ids[:, :4], pending, zeros - 1)
    with pytest.raises(InputError, match="expected 256 integers"):
        one.commit(pending, [1, 1])
    with pytest.raises(InputError, match="a window of 5 rows where one of 4 is pending"):
        one.verify(ids[:, :5], pending, zeros)
    for call in (lambda: one.decode(token, pending), lambda: one.prefill(token[:, None], pending)):
        with pytest.raises(InputError, match="drafts are pending: commit them first"):
            call()


# Generation.


def greedy(prompt, count):
    one = model()
    logits, cache = one.prefill([prompt], one.init_cache(1, len(prompt) + count))
    tokens = [int(logits[0].argmax())]
    while len(tokens) < count:
        logits, cache = one.decode(np.array(tokens[-1:]), cache)
        tokens.append(int(logits[0].argmax()))
    return tokens


def test_generation_with_any_proposer():
    prompt = tiny.tokens(1, 12, seed=3)[0].tolist()
    want = greedy(prompt, 20)
    oracle = lambda ids, n: want[len(ids) - len(prompt) :][:n]  # noqa: E731
    wrong = lambda ids, n: [(t + 1) % 96 for t in oracle(ids, n)]  # noqa: E731
    for propose, windows, accepted in ((oracle, 5, 14), (wrong, 19, 0), (lambda *_: [], 19, 0)):
        got = speculate(model(), prompt, 20, propose=propose)
        assert (got.tokens, got.windows, got.accepted) == (want, windows, accepted)
    assert speculate(model(), prompt, 20).tokens == want
    stopped = speculate(model(), prompt, 20, propose=oracle, stop_ids=want[6:7])
    assert stopped.tokens == want[: want.index(want[6]) + 1]


def test_prompt_lookup():
    assert repeated([1, 2, 3, 9, 1, 2, 3], 3) == [9, 1, 2]
    assert repeated([5, 2, 3, 1, 2, 3, 7, 2, 3], 2) == [7, 2]
    assert repeated([1, 2], 3) == []
    assert repeated([4], 3) == []


def test_generation_refuses():
    with pytest.raises(InputError, match="window 0: at least 1"):
        speculate(model(), [1, 2], window=0)
    with pytest.raises(InputError, match="token id 96"):
        speculate(model(), [1, 2], propose=lambda ids, n: [96])
    broken = SimpleNamespace(
        init_cache=lambda *_: None, prefill=lambda *_: (jnp.full((1, 96), jnp.nan), None)
    )
    with pytest.raises(K3Error, match="logits hold NaN"):
        speculate(broken, [1, 2])
