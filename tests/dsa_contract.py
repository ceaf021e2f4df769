"""What every implementation of `dsa.select` must satisfy, at the sizes that it takes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dsa_kernels import FLOAT8, Selection, check_sizes, stacked, wide

from k3jax.ops import dsa
from k3jax.ops.dsa import reference, xla
from k3jax.ops.rows import Rows, Scaled

TOPK = 16
PROMPT, CHUNKS = 200, (1, 7, 16, 17, 64, 200)
PAGES = (1, 7, 63)  # tiles of a page, of a cache of 63
MARGIN = 1e-6  # of the largest score: what lies closer to the threshold may be taken or left


def of_table(implementation: Selection):
    """What stands in the table; queries of a float8 form are codes there."""
    return dsa.SELECT.get(implementation.name, dsa.streamed)


def runner(implementation: Selection, topk: int = TOPK, sizes: tuple = ()):
    """Compiled selection; traced, and therefore patched, when a new shape comes."""
    return _runner(implementation, topk, sizes)


@functools.cache  # of all arguments: left out or given, a default is one entry
def _runner(implementation: Selection, topk: int, sizes: tuple):
    sizes = dict(sizes)
    call = functools.partial(
        dsa.select, topk=topk, implementation=implementation.name, **implementation.options(sizes)
    )

    def select_float8(q_BTHK, rows, w_BTH, positions_BT):
        if rows.shape[1] <= topk:
            return xla.everything(positions_BT, rows.shape[1], topk)
        best = of_table(implementation)(q_BTHK, rows, w_BTH, positions_BT, topk)
        return xla.ascending(*best)[..., :topk]

    compiled = jax.jit(select_float8 if implementation.dtype == FLOAT8 else call)

    def run(q, k, w, positions):
        rows = k if isinstance(k, Rows | Scaled) else implementation.rows(k)
        q = jnp.asarray(q, implementation.dtype)
        with implementation.running(**sizes):
            got = compiled(q, rows, jnp.float32(w), jnp.asarray(positions, jnp.int32))
        assert (got.shape, got.dtype) == ((*q.shape[:2], topk), jnp.int32)
        return np.asarray(got)

    return run


def drawn(implementation, batch, queries, keys, ties=False):
    """q, k, w whose scores are exact numbers in float32, added up in any order: whole multiples of
    1 below 2^24. Head weights have 9 bits, one more than bfloat16, or with ties 1.
    """
    rng = np.random.default_rng([batch, queries, keys, ties])
    heads, width = implementation.heads, implementation.width
    assert heads * width * 4 * 511 < 2**24
    q = rng.integers(-1, 2, (batch, queries, heads, width))
    k = rng.integers(-1, 2, (batch, keys, width)) * 2 ** rng.integers(0, 3, (batch, keys, 1))
    w = rng.integers(*((-1, 2) if ties else (-511, 512)), (batch, queries, heads))
    return np.float32(q), np.float32(k), np.float32(w)


def positions_of(batch, queries, keys):
    """Unequal ends per row; row 0 ends at the last key, later rows begin with a pad query."""
    rows = np.stack([np.arange(queries) + keys - queries - b * (keys // 3) for b in range(batch)])
    rows[1:, 0] = -1
    return np.maximum(rows, -1)


def of_scores(implementation, score_BS, queries):
    """q, k, w that score every query so: relu(k) - relu(-k) = k, over pairs of heads."""
    heads, width = implementation.heads // 2 * 2, implementation.width
    sign = np.where(np.arange(heads) % 2, -1, 1)
    score_BS = np.float32(score_BS)
    q = np.zeros((len(score_BS), queries, implementation.heads, width), np.float32)
    q[..., :heads, 0] = sign
    k = np.zeros((*score_BS.shape, width), np.float32)
    k[..., 0] = score_BS
    w = np.zeros(q.shape[:3], np.float32)
    w[..., :heads] = sign * 2 / heads
    if implementation.heads % 2:  # a head of zeros would make NaN of an infinite key
        q[..., -1, 0] = 1
    return q, k, w


class SelectContract:
    """What every implementation of `dsa.select` must satisfy."""

    @pytest.mark.parametrize("keys", [1, TOPK - 1, TOPK, TOPK + 1, 2 * TOPK, 4 * TOPK])
    def test_float64(self, implementation, keys):
        """Padded queries hold NaN."""
        positions = positions_of(3, 5, keys)
        for ties in (False, True):
            q, k, w = drawn(implementation, 3, 5, keys, ties)
            want = reference.select(q, k, w, positions, TOPK)
            q = np.where(positions[..., None, None] < 0, np.float32(np.nan), q)
            np.testing.assert_array_equal(runner(implementation)(q, k, w, positions), want)

    @pytest.mark.parametrize("keys", [1, 2047, 2048, 2049, 2064, 8192])
    def test_real_topk(self, implementation, keys):
        positions = np.minimum([[0, 2046, 2047, 2048, 2063, 8191]], keys - 1)
        case = drawn(implementation, 1, 6, keys)
        want = reference.select(*case, positions, 2048)
        assert keys <= 2048 or (want[0, -1] != np.arange(2048)).any()
        for sizes in [{}, *(implementation.blocks[:1] if keys == 2064 else ())]:
            run = runner(implementation, 2048, (*sizes.items(),))
            np.testing.assert_array_equal(run(*case, positions), want)

    def test_real_numbers(self, implementation):
        """The best are in and the others are not, up to float32's rounding of a score."""
        rng = np.random.default_rng(0)
        heads, width = implementation.heads, implementation.width
        q = jnp.asarray(rng.standard_normal((3, 5, heads, width)), implementation.dtype)
        rows = implementation.rows(rng.standard_normal((3, 64, width)))
        w = rng.standard_normal((3, 5, heads)).astype(np.float32)
        positions = positions_of(3, 5, 64)
        got = runner(implementation)(q, rows, w, positions)
        score = reference.scores(wide(q), wide(rows), w)
        for b, t in np.ndindex(*positions.shape):
            legal = score[b, t, : positions[b, t] + 1]
            chosen = np.isin(np.arange(len(legal)), got[b, t])
            assert chosen.sum() == (got[b, t] >= 0).sum() == min(TOPK, len(legal))
            if len(legal) > TOPK:
                margin = MARGIN * np.abs(legal).max()
                assert legal[chosen].min() >= legal[~chosen].max() - margin

    def test_block_sizes_change_nothing(self, implementation):
        case, positions = drawn(implementation, 2, 20, 100, ties=True), positions_of(2, 20, 100)
        want = reference.select(*case, positions, TOPK)
        for sizes in ({}, *implementation.blocks):
            run = runner(implementation, sizes=(*sizes.items(),))
            np.testing.assert_array_equal(run(*case, positions), want)

    def test_batch_mates_change_nothing(self, implementation):
        """Every query alone, as a batch of its own and as one of a batch."""
        (q, k, w), positions = drawn(implementation, 3, 5, 64, ties=True), positions_of(3, 5, 64)
        run = runner(implementation)
        together = run(q, k, w, positions)
        for b, t in np.ndindex(*positions.shape):
            query = np.s_[b : b + 1, t : t + 1]
            alone = run(q[query], k[b : b + 1], w[query], positions[query])
            np.testing.assert_array_equal(alone, together[query])

    @pytest.mark.parametrize("chunk", CHUNKS)
    def test_chunks_of_a_prompt(self, implementation, chunk):
        """Of any size, which ride on the batch axis; keys of later chunks are not written yet."""
        q, k, w = drawn(implementation, 1, PROMPT, PROMPT)
        want = reference.select(q, k, w, np.arange(PROMPT)[None], TOPK)
        count = -(-PROMPT // chunk)
        at = np.arange(count * chunk).reshape(count, chunk)
        here, take = np.where(at < PROMPT, at, -1), np.minimum(at, PROMPT - 1)
        written = np.arange(PROMPT) <= at[:, -1:]
        cache = np.where(written[..., None], k, np.float32(np.nan))
        got = runner(implementation)(q[0, take], cache, w[0, take], here)
        np.testing.assert_array_equal(got.reshape(1, -1, TOPK)[:, :PROMPT], want)

    def test_every_cached_prefix(self, implementation):
        """Row p: the prompt's first p tokens are cached, and the next 8 come in one call."""
        q, k, w = drawn(implementation, 1, PROMPT, PROMPT)
        want = reference.select(q, k, w, np.arange(PROMPT)[None], TOPK)[0]
        at = np.arange(PROMPT)[:, None] + np.arange(8)
        take = np.minimum(at, PROMPT - 1)
        written = np.arange(PROMPT) <= at[:, -1:]
        cache = np.where(written[..., None], k, np.float32(np.nan))
        got = runner(implementation)(q[0, take], cache, w[0, take], np.where(at < PROMPT, at, -1))
        np.testing.assert_array_equal(got, np.where((at < PROMPT)[..., None], want[take], -1))

    def test_hand_made_case(self, implementation):
        """Two heads, three keys, top 1: each of four known mistakes selects another key.

        Query t = 2. Products with the keys, one row a key, in units of 1e37:
        (0, 3), (5, -9), (2, 2), so the two heads' ReLU sums are 3, 5, 4 and key 1 wins.
        """
        dots = np.float32([[0, 3], [5, -9], [2, 2]]).T * np.float32(1e37)  # [head, key]
        raw = np.float32([[20, 60], [20, 20], [20, 20]])  # of token s
        scale = np.float32(1 / 64)
        own, of_key = (scale * raw[2])[:, None], (scale * raw).T
        relu = np.maximum(dots, 0)
        with np.errstate(over="ignore"):
            mistakes = {
                "ReLU dropped": [(own * dots).sum(0).argmax()],
                "heads not summed": [*(own * relu).argmax(1)],  # each head's own
                "head weights from the key side": [(of_key * relu).sum(0).argmax()],
                "scale omitted": [(raw[2][:, None] * relu).sum(0).argmax()],  # overflow, all tie
            }
        assert mistakes == {
            "ReLU dropped": [2],
            "heads not summed": [1, 0],
            "head weights from the key side": [0],
            "scale omitted": [0],
        }
        heads, width = implementation.heads, implementation.width
        q, w = np.zeros((1, 3, heads, width), np.float32), np.zeros((1, 3, heads), np.float32)
        k = np.zeros((1, 3, width), np.float32)
        q[:, :, :2, :2], k[..., :2], w[..., :2] = np.eye(2), dots.T, scale * raw
        got = runner(implementation, 1)(q, k, w, [[-1, -1, 2]])
        assert got[0].tolist() == [[-1], [-1], [1]]

    def test_ties_and_odd_values(self, implementation):
        """One batch row a rule, over 100 keys: ties to the lower position, NaN last."""
        at, nan, inf = np.arange(100), np.nan, np.inf
        edge = [*range(6), *range(90, 100)]
        cases = {
            "all equal": (at * 0, range(16)),
            "all equal, not zero": (at * 0 + 1, range(16)),
            "half equal": (at % 2, range(1, 32, 2)),
            "boundary inside the ties": (np.where(at >= 90, 2, 1), edge),
            "zero above negative": (np.where(at < 50, -1, 0), range(50, 66)),
            "NaN below finite": (np.where(at < 50, nan, -at), range(50, 66)),
            "NaN still legal": (np.where(at < 90, nan, at), edge),
            "all NaN": (at * nan, range(16)),
            "infinities": (np.where(at < 6, -3e38, np.where(at < 90, -inf, inf)), edge),
            "NaN below minus infinity": (np.where(at < 50, nan, -inf), range(50, 66)),
        }
        if implementation.dtype == FLOAT8:  # which has no infinity
            cases = {name: case for name, case in cases.items() if "infinit" not in name}
        q, k, w = of_scores(implementation, [score for score, _ in cases.values()], 5)
        positions = np.full((len(cases), 5), 99)
        for sizes in ({}, *implementation.blocks[1:2]):
            got = runner(implementation, sizes=(*sizes.items(),))(q, k, w, positions)
            for (name, (_, chosen)), index in zip(cases.items(), got, strict=True):
                assert (index == list(chosen)).all(), name

    def test_negative_zero(self, implementation):
        """A negative head weight on a ReLU's zero gives -0.0, which equals 0.0."""
        q, k, w = of_scores(implementation, np.where(np.arange(100) < 50, 1, -1)[None], 5)
        q, w = np.abs(q), -np.abs(w)  # scores -1, then -0.0 from every head
        got = runner(implementation)(q, k, w, np.full((1, 5), 99))
        assert (got == np.arange(50, 66)).all()

    @pytest.mark.parametrize("page", [None, *PAGES])
    def test_rows_of_a_stack(self, implementation, page):
        """One layer, from the third sequence on; in a row each, or in pages in any order.

        What no query may see holds NaN, and table entries of such pages any number.
        """
        tile = implementation.tile
        keys = PAGES[-1] * tile
        q, k, w = drawn(implementation, 2, 5, keys)
        positions = np.array([[0, 3, 15, 16, keys - 1], [-1, 3, 16, 7, keys // 2]])
        want = reference.select(q, k, w, positions, TOPK)
        seen = np.arange(keys) <= positions.max(1, keepdims=True)
        rows = implementation.rows(np.where(seen[..., None], k, np.float32(np.nan)))
        rows = stacked(rows, page and page * tile)
        np.testing.assert_array_equal(runner(implementation)(q, rows, w, positions), want)

    @pytest.mark.parametrize("keys", [TOPK, 64])
    def test_candidates(self, implementation, keys):
        """Ranks, with which the rows of several devices are compared, are those of `xla.ranked`."""
        if implementation.dtype == FLOAT8:
            pytest.skip("the float8 form is called through its table only")
        (q, k, w), positions = drawn(implementation, 3, 5, keys), positions_of(3, 5, keys)
        k[0, 3] = np.nan
        rows = implementation.rows(k)
        q = jnp.asarray(q, implementation.dtype)
        with implementation.running():
            rank, at = jax.jit(functools.partial(dsa.candidates, topk=TOPK))(
                q, rows, jnp.asarray(w), jnp.asarray(positions, jnp.int32)
            )
        assert rank.dtype == jnp.float32
        assert rank.shape == at.shape
        want = reference.select(q, k, w, positions, TOPK)
        score = np.float32(reference.scores(q, k, w))
        legal = np.arange(keys) <= positions[..., None]
        score = np.asarray(xla.ranked(jnp.asarray(score), jnp.asarray(legal)))
        for b, t in np.ndindex(*positions.shape):
            kept = np.asarray(rank[b, t]) > -np.inf
            places = np.asarray(at[b, t])[kept]
            assert sorted(places) == [p for p in want[b, t] if p >= 0]
            assert np.asarray(rank[b, t])[kept].tobytes() == score[b, t, places].tobytes()

    def test_has_no_gradient(self, implementation):
        if implementation.dtype == FLOAT8:
            pytest.skip("the float8 form is called through its table only")
        q, k, w = drawn(implementation, 3, 5, 64)
        positions = jnp.asarray(positions_of(3, 5, 64), jnp.int32)

        def loss(q, k, w):
            got = dsa.select(q, k, w, positions, TOPK, implementation=implementation.name)
            return got.astype(jnp.float32).sum()

        q, k = (jnp.asarray(x, implementation.dtype) for x in (q, k))
        with implementation.running():
            for g in jax.jit(jax.grad(loss, (0, 1, 2)))(q, k, jnp.asarray(w)):
                assert not np.asarray(g, np.float32).any()

    def test_sizes_past_int32(self, implementation):
        """8,192 queries x 2^20 keys, and caches of 2^33 numbers, by shapes alone."""
        heads, width, dtype = implementation.heads, implementation.width, implementation.dtype
        queries, keys = 8192, 2**20
        shape = jax.ShapeDtypeStruct
        layers = -(-(2**33) // (4 * keys * width))

        def rows(width, dtype):
            stack = shape((layers, 4, keys, width), dtype)
            return Rows(stack, shape((), jnp.int32), 3, 1)

        k = rows(width, dtype)
        if dtype == FLOAT8:
            k = Scaled(k, rows(1, jnp.float32))
        q, w = shape((1, queries, heads, width), dtype), shape((1, queries, heads), jnp.float32)
        positions = shape((1, queries), jnp.int32)

        def select(q, rows, w, positions):
            if dtype == FLOAT8:
                return of_table(implementation)(q, rows, w, positions, 2048)
            return dsa.select(q, rows, w, positions, 2048, implementation=implementation.name)

        with implementation.running():
            traced = jax.make_jaxpr(select)(q, k, w, positions)
        check_sizes(traced.jaxpr, queries * keys // 16, [*map(np.shape, jax.tree.leaves(k))])
