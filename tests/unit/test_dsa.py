"""Gated DSA: selection against a stable float64 sort, attention over the selected rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.ops import dsa, mla
from k3jax.ops.dsa import reference, xla
from k3jax.ops.mla import blocks

FP32 = 1e-5  # max|d| / max|float64|; measured 5.9e-7 (2,048 of 2,064 keys)
BF16 = 1e-2  # the same with bfloat16 inputs; measured 4.8e-3
BF16_COSINE = 0.9999
BLOCKING = 1e-6  # between block sizes; measured 2.0e-7
GRADIENT = 1e-6  # directional derivative / (norm of gradient * norm of step)

HI, KI = 4, 8  # indexer heads and width
H, N, R, C, V = 3, 8, 4, 16, 6
SCALE = (N + R) ** -0.5
BLOCKS = [{}, {"query_block": 4, "key_block": 32}, {"query_block": 3, "key_block": 7}]

select = jax.jit(dsa.select, static_argnames=("topk", "implementation", "query_block", "key_block"))
ATTEND_STATIC = ("scale", "implementation", "query_block")
attend = jax.jit(dsa.attend, static_argnames=ATTEND_STATIC)
attend_all = jax.jit(mla.mla, static_argnames=ATTEND_STATIC)


@functools.partial(jax.jit, static_argnames=ATTEND_STATIC)
def gradient(args, indices, weight_BTHV, **options):
    """Of sum(weight * output) in q, cache, w_k and w_v."""
    loss = lambda *a: jnp.sum(dsa.attend(*a, indices, **options) * weight_BTHV)  # noqa: E731
    return jax.grad(loss, argnums=(0, 1, 2, 3))(*args)


def relative(got, want):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return np.abs(got - want).max() / np.abs(want).max()


def indexer_case(batch, queries, keys, seed=0, whole=False):
    """q, k, w of the indexer. ``whole`` numbers make scores exact, with many ties."""
    rng = np.random.default_rng([seed, batch, queries, keys])
    shapes = (batch, queries, HI, KI), (batch, keys, KI), (batch, queries, HI)
    if whole:
        return tuple(jnp.asarray(rng.integers(-1, 2, s), jnp.float32) for s in shapes)
    return tuple(jnp.asarray(rng.normal(size=s), jnp.float32) for s in shapes)


def attention_case(batch, queries, keys, seed=0, dtype=jnp.float32):
    rng = np.random.default_rng([seed, batch, queries, keys, 1])
    shapes = (batch, queries, H, N + R), (batch, keys, C + R), (H, N, C), (H, V, C)
    spreads = 2, 1, C**-0.5, C**-0.5
    return tuple(jnp.asarray(rng.normal(0, *a), dtype) for a in zip(spreads, shapes, strict=True))


def positions_of(batch, queries, keys):
    """Unequal ends per row; row 0 ends at the last key, later rows begin with a pad query."""
    rows = np.stack([np.arange(queries) + keys - queries - b * (keys // 3) for b in range(batch)])
    rows[1:, 0] = -1
    return jnp.asarray(np.maximum(rows, -1), jnp.int32)


class TestScores:
    def test_float64(self):
        case = indexer_case(2, 5, 40)  # head weights of both signs
        assert relative(dsa.scores(*case), reference.scores(*case)) < FP32

    def test_hand_made_case(self):
        """Two heads, three keys, top 1: each of four known mistakes selects another key.

        Query t = 2. Products with the keys, one row a key, in units of 1e37:
        (0, 3), (5, -9), (2, 2), so the two heads' ReLU sums are 3, 5, 4 and key 1 wins.
        """
        k = jnp.asarray([[[0, 3], [5, -9], [2, 2]]], jnp.float32) * 1e37
        q = jnp.broadcast_to(jnp.eye(2, dtype=jnp.float32), (1, 3, 2, 2))
        raw = jnp.asarray([[[20, 60], [20, 20], [20, 20]]], jnp.float32)
        w, positions = raw / 64, jnp.asarray([[-1, -1, 2]], jnp.int32)
        expected = {
            "correct": [1],
            "ReLU dropped": [2],
            "heads not summed": [1, 0],  # each head's own
            "head weights from the key side": [0],
            "scale omitted": [0],  # all scores overflow and tie
        }
        dots, unscaled = np.float32(k[0]).T, np.float32(raw[0, 2])[:, None]  # [head, key]
        relu, own, of_key = np.maximum(dots, 0), np.float32(w[0, 2])[:, None], np.float32(w[0]).T
        with np.errstate(over="ignore"):
            mistakes = {
                "ReLU dropped": [(own * dots).sum(0).argmax()],
                "heads not summed": list((own * relu).argmax(1)),
                "head weights from the key side": [(of_key * relu).sum(0).argmax()],
                "scale omitted": [(unscaled * relu).sum(0).argmax()],
            }
        for name, got in mistakes.items():
            assert got == expected[name] != expected["correct"], name
        got = np.asarray(select(q, k, w, positions, 1))
        assert got[0].tolist() == [[-1], [-1], expected["correct"]]


@pytest.mark.parametrize("implementation", dsa.SELECT_IMPLEMENTATIONS)
class TestSelect:
    @pytest.fixture(autouse=True)
    def _bind(self, implementation):
        self.select = functools.partial(select, implementation=implementation)

    @pytest.mark.parametrize("keys", [1, 15, 16, 17, 32, 64])
    @pytest.mark.parametrize("whole", [False, True])
    def test_float64(self, keys, whole):
        case, positions = indexer_case(3, 5, keys, whole=whole), positions_of(3, 5, keys)
        want = reference.select(*case, positions, 16)
        np.testing.assert_array_equal(self.select(*case, positions, 16), want)

    def test_real_topk(self):
        case, positions = indexer_case(1, 3, 2064), positions_of(1, 3, 2064)
        want = reference.select(*case, positions, 2048)
        assert (want[0, -1] != np.arange(2048)).any()
        for key_block in (None, 700):
            got = self.select(*case, positions, 2048, key_block=key_block)
            np.testing.assert_array_equal(got, want)

    @pytest.mark.parametrize("blocks", [*BLOCKS[:2], {"query_block": 3, "key_block": 1}])
    def test_block_sizes_change_nothing(self, blocks):
        case, positions = indexer_case(2, 20, 100, whole=True), positions_of(2, 20, 100)
        want = reference.select(*case, positions, 16)
        np.testing.assert_array_equal(self.select(*case, positions, 16, **blocks), want)

    def test_chunk_sizes_change_nothing(self):
        q, k, w = indexer_case(1, 200, 200)
        positions = jnp.arange(200, dtype=jnp.int32)[None]
        want = reference.select(q, k, w, positions, 16)
        np.testing.assert_array_equal(self.select(q, k, w, positions, 16), want)
        for chunk in (1, 7, 16, 17, 64):  # the chunks of a size ride on the batch axis
            count = -(-200 // chunk)
            at = np.arange(count * chunk, dtype=np.int32).reshape(count, chunk)
            here, take = np.where(at < 200, at, -1), np.minimum(at, 199)
            # Keys of later chunks are not written yet.
            written = np.arange(200) <= at[:, -1:]
            cache = np.where(written[..., None], k, np.float32(np.nan))
            got = self.select(q[0, take], jnp.asarray(cache), w[0, take], jnp.asarray(here), 16)
            got = np.asarray(got).reshape(1, count * chunk, 16)
            np.testing.assert_array_equal(got[:, :200], want)

    @pytest.mark.parametrize("blocks", BLOCKS[::2])
    def test_ties_and_odd_values(self, blocks):
        """One batch row a rule, over 100 keys: ties to the lower position, NaN last."""
        at, nan, inf = np.arange(100), np.nan, np.inf
        edge = [*range(6), *range(90, 100)]
        cases = {
            "all equal": (at * 0, range(16)),
            "half equal": (at % 2, range(1, 32, 2)),
            "boundary inside the ties": (np.where(at >= 90, 2, 1), edge),
            "zero above negative": (np.where(at < 50, -1, 0), range(50, 66)),
            "NaN below finite": (np.where(at < 50, nan, -at), range(50, 66)),
            "NaN still legal": (np.where(at < 90, nan, at), edge),
            "all NaN": (at * nan, range(16)),
            "infinities": (np.where(at < 6, -3e38, np.where(at < 90, -inf, inf)), edge),
            "NaN below minus infinity": (np.where(at < 50, nan, -inf), range(50, 66)),
        }
        # relu(k) - relu(-k) = k: two heads of width 1 give any score.
        k = jnp.asarray(np.stack([score for score, _ in cases.values()]), jnp.float32)[..., None]
        shape = (len(cases), 5, 2)
        w = jnp.broadcast_to(jnp.asarray([1, -1], jnp.float32), shape)
        positions = jnp.full(shape[:2], 99, jnp.int32)
        got = np.asarray(self.select(w[..., None], k, w, positions, 16, **blocks))
        for (name, (_, chosen)), index in zip(cases.items(), got, strict=True):
            assert (index == list(chosen)).all(), name

    def test_negative_zero(self):
        """One negative head weight on a ReLU's zero: -0.0 from both sides of the sum."""
        k = jnp.where(jnp.arange(100) < 50, 1.0, -1.0)[None, :, None]
        q, w = jnp.ones((1, 5, 1, 1)), -jnp.ones((1, 5, 1))
        positions = jnp.full((1, 5), 99, jnp.int32)
        got = np.asarray(self.select(q, k, w, positions, 16, key_block=7))
        assert (got == np.arange(50, 66)).all()

    def test_padding_and_tail(self):
        case = indexer_case(2, 5, 64)
        positions = jnp.asarray([[-1, 0, 3, 15, 16], [-1, -1, -1, -1, 63]], jnp.int32)
        got = np.asarray(self.select(*case, positions, 16))
        assert got.dtype == np.int32
        for index, position in zip(got.reshape(10, 16), np.ravel(positions), strict=True):
            count = min(position + 1, 16)
            assert (index[count:] == -1).all()
            assert (np.diff(index[:count]) > 0).all()
            assert ((index[:count] >= 0) & (index[:count] <= position)).all()

    def test_has_no_gradient(self):
        q, k, w = indexer_case(1, 5, 64)
        positions = positions_of(1, 5, 64)
        loss = lambda *a: self.select(*a, positions, 16).astype(jnp.float32).sum()  # noqa: E731
        for g in jax.grad(loss, argnums=(0, 1, 2))(q, k, w):
            assert not np.asarray(g).any()


def test_rank_order():
    """NaN and both zeros have one place, whatever top_k makes of them itself."""
    low = np.finfo(np.float32).min
    score = jnp.asarray([0.0, -0.0, jnp.nan, -jnp.inf, jnp.inf, low, 1.0, 2.0], jnp.float32)
    rank = np.asarray(jax.jit(xla.ranked)(score, jnp.arange(8) < 7))
    assert rank[:2].tobytes() == bytes(8)  # +0.0 twice
    assert -np.inf == rank[7] < rank[2] < rank[3] == rank[5] < -1
    assert rank[4] == np.inf


def test_million_keys_keep_their_positions():
    keys = 2**20 + 3
    k = jnp.zeros((1, keys, 1)).at[0, -20:, 0].set(jnp.arange(20, 0, -1, dtype=jnp.float32))
    q, w = jnp.ones((1, 2, 1, 1)), jnp.ones((1, 2, 1))
    positions = jnp.asarray([[keys - 1, keys - 11]], jnp.int32)
    got = np.asarray(select(q, k, w, positions, 16, key_block=2**18))
    assert got[0, 0].tolist() == list(range(keys - 20, keys - 4))
    assert got[0, 1].tolist() == [*range(6), *range(keys - 20, keys - 10)]


def biggest_array(jaxpr):
    """Elements of the largest value any equation makes, inner jaxprs included."""
    sizes = [0]
    for equation in jaxpr.eqns:
        sizes += [int(np.prod(v.aval.shape, dtype=object)) for v in equation.outvars]
        parameters = list(equation.params.values())
        for inner in jax.tree.leaves(parameters, is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            sizes.append(biggest_array(inner) if hasattr(inner, "eqns") else 0)
    return max(sizes)


def k3_shapes(queries, keys):
    bf16 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    indexer = (
        *(bf16((1, queries, 32, 128)), bf16((1, keys, 128))),
        jax.ShapeDtypeStruct((1, queries, 32), jnp.float32),
    )
    attention = (
        *(bf16((1, queries, 96, 192)), bf16((1, keys, 576))),
        *(bf16((96, 128, 512)), bf16((96, 128, 512))),
    )
    return indexer, attention, jax.ShapeDtypeStruct((1, queries), jnp.int32)


def test_million_keys_by_abstract_shapes():
    """8,192 x 2^20 scores pass 2^31: nothing is that long, and no index is such a product."""
    queries, keys = 8192, 2**20
    indexer, attention, positions = k3_shapes(queries, keys)
    pick = functools.partial(dsa.select, topk=2048)
    indices = jax.eval_shape(pick, *indexer, positions)
    assert (indices.shape, indices.dtype) == ((1, queries, 2048), jnp.int32)
    read = functools.partial(dsa.attend, scale=192**-0.5)
    assert jax.eval_shape(read, *attention, indices).shape == (1, queries, 96, 128)
    whole = functools.partial(mla.mla, scale=192**-0.5)
    limit = queries * 96 * 192  # the queries themselves
    for function, args in (
        (pick, (*indexer, positions)),
        (read, (*attention, indices)),
        (whole, (*attention, positions)),
    ):
        assert biggest_array(jax.make_jaxpr(function)(*args).jaxpr) <= limit < 2**31


def test_million_keys_compile_within_the_budget():
    queries, keys = 2048, 2**20
    indexer, _, positions = k3_shapes(queries, keys)
    compiled = select.lower(*indexer, positions, topk=2048).compile()
    temporary = compiled.memory_analysis().temp_size_in_bytes
    assert temporary < 3 * blocks.BUDGET_BYTES + keys * 128 * 4  # XLA:CPU copies keys to float32
    assert temporary < queries * keys * 4 / 4


@pytest.mark.parametrize("implementation", dsa.ATTEND_IMPLEMENTATIONS)
class TestAttend:
    @pytest.fixture(autouse=True)
    def _bind(self, implementation):
        options = {"scale": SCALE, "implementation": implementation}
        self.attend = functools.partial(attend, **options)
        self.gradient = functools.partial(gradient, **options)

    @pytest.mark.parametrize("keys", [1, 15, 16, 17, 32, 64])
    def test_edge_of_topk(self, keys):
        """Up to topk rows this is dense attention; beyond, the oracle's own selection."""
        args, positions = attention_case(3, 5, keys), positions_of(3, 5, keys)
        indexer = indexer_case(3, 5, keys)
        got = self.attend(*args, select(*indexer, positions, 16))
        if keys <= 16:
            for form in mla.IMPLEMENTATIONS:
                dense = attend_all(*args, positions, scale=SCALE, implementation=form)
                assert relative(got, dense) < FP32
        want = reference.attend(*args, reference.select(*indexer, positions, 16), scale=SCALE)
        assert relative(got, want) < FP32

    @pytest.mark.parametrize("keys", [2047, 2064])
    def test_real_topk(self, keys):
        args, positions = attention_case(1, 3, keys), positions_of(1, 3, keys)
        indexer = indexer_case(1, 3, keys)
        got = self.attend(*args, select(*indexer, positions, 2048))
        want = reference.attend(*args, reference.select(*indexer, positions, 2048), scale=SCALE)
        assert relative(got, want) < FP32

    def test_bfloat16(self):
        args = attention_case(3, 5, 64, dtype=jnp.bfloat16)
        indices = select(*indexer_case(3, 5, 64), positions_of(3, 5, 64), 16)
        got = self.attend(*args, indices)
        assert got.dtype == jnp.bfloat16
        got = np.asarray(got, np.float64).ravel()
        want = reference.attend(*args, indices, scale=SCALE).ravel()
        assert relative(got, want) < BF16
        assert got @ want / np.linalg.norm(got) / np.linalg.norm(want) > BF16_COSINE

    @pytest.mark.parametrize("query_block", [1, 2, 3])
    def test_query_blocks_change_nothing(self, query_block):
        args, positions = attention_case(3, 5, 64), positions_of(3, 5, 64)
        indices = select(*indexer_case(3, 5, 64), positions, 16)
        whole = self.attend(*args, indices)
        assert relative(self.attend(*args, indices, query_block=query_block), whole) < BLOCKING

    @pytest.mark.parametrize("query_block", [2])
    def test_unselected_rows_may_hold_anything(self, query_block):
        q, cache, w_k, w_v = attention_case(3, 5, 64)
        # Row 0, which stands in for absent entries of the gather, is selected by no query.
        indices = select(*indexer_case(3, 5, 64), positions_of(3, 5, 64), 16)
        indices = jnp.where(indices == 0, 1, indices).at[1:, 3, 10:].set(-1)
        selected = np.zeros((3, 64), bool)
        for b in range(3):
            selected[b, np.asarray(indices[b][indices[b] >= 0])] = True
        assert not selected[:, 0].any()
        weight = jnp.asarray(np.random.default_rng(2).normal(size=(3, 5, H, V)), jnp.float32)
        seen = []
        for fill in (0.0, jnp.nan, jnp.inf):
            args = (q, jnp.where(selected[..., None], cache, fill), w_k, w_v)
            output = self.attend(*args, indices, query_block=query_block)
            assert np.isfinite(output).all()
            seen.append([output, *self.gradient(args, indices, weight, query_block=query_block)])
        for poisoned in seen[1:]:
            for a, b in zip(seen[0], poisoned, strict=True):
                assert np.asarray(a).tobytes() == np.asarray(b).tobytes()

    def test_absent_entries(self):
        """Nothing selected gives exact zeros; -1 anywhere and rows past the cache do not count."""
        q, *rest = attention_case(3, 5, 64)
        indices = np.asarray(select(*indexer_case(3, 5, 64), positions_of(3, 5, 64), 16)).copy()
        indices[1:, 0] = -1
        indices[:, 2, ::2] = -1
        indices[:, 4, 9:] = [64, 70, 2**30, 2**31 - 1, -5, -(2**31), -1]
        kept = np.where((indices >= 0) & (indices < 64), indices, -1)
        dead = (kept < 0).all(-1)
        assert dead.sum() == 2
        q = jnp.where(dead[..., None, None], jnp.nan, q)
        got = np.asarray(self.attend(q, *rest, jnp.asarray(indices)))
        assert (got[dead] == 0).all()
        want = reference.attend(jnp.nan_to_num(q), *rest, kept, scale=SCALE)
        assert relative(got, want) < FP32

    @pytest.mark.parametrize("query_block", [2])
    def test_gradient(self, query_block):
        args = attention_case(3, 5, 64)
        indices = select(*indexer_case(3, 5, 64), positions_of(3, 5, 64), 16)
        rng = np.random.default_rng(1)
        weight = rng.normal(size=(3, 5, H, V))
        got = self.gradient(args, indices, jnp.float32(weight), query_block=query_block)
        for i in range(4):  # the derivative along one random direction per argument
            step = rng.normal(size=args[i].shape)
            sides = []
            for sign in (1, -1):
                moved = [np.float64(a) for a in args]
                moved[i] += sign * 1e-5 * step
                sides.append((reference.attend(*moved, indices, scale=SCALE) * weight).sum())
            want = (sides[0] - sides[1]) / 2e-5
            size = np.linalg.norm(got[i]) * np.linalg.norm(step)
            assert abs((np.float64(got[i]) * step).sum() - want) / size < GRADIENT


@pytest.mark.parametrize("case", ["1024 1024 128 masked", "1 16 16 masked", "1 64 16 gathered"])
def test_choice(case, caplog):
    *sizes, form = case.split()
    queries, keys, topk = map(int, sizes)
    _, attention, _ = k3_shapes(queries, keys)
    indices = jax.ShapeDtypeStruct((1, queries, topk), jnp.int32)
    with caplog.at_level("DEBUG", "k3jax.ops.dsa"):
        jax.eval_shape(functools.partial(dsa.attend, scale=1.0), *attention, indices)
    assert f"dsa.attend: {form}" in caplog.text


def test_refusals_name_the_value():
    (q, k, w), positions = indexer_case(1, 5, 64), positions_of(1, 5, 64)
    args, indices = attention_case(1, 5, 64), jnp.zeros((1, 5, 16), jnp.int32)
    half = jnp.bfloat16
    refused = {
        "got 0": lambda: dsa.select(q, k, w, positions, 0),
        "select.*'fast'": lambda: dsa.select(q, k, w, positions, 16, implementation="fast"),
        "q and k.*bfloat16": lambda: dsa.select(q, k.astype(half), w, positions, 16),
        "weights.*bfloat16": lambda: dsa.select(q, k, w.astype(half), positions, 16),
        "dsa: shapes": lambda: dsa.scores(q, k[..., 1:], w),
        "positions": lambda: dsa.select(q, k, w, positions[:, 1:], 16),
        "attend.*'fast'": lambda: dsa.attend(*args, indices, scale=1.0, implementation="fast"),
        "attend: shapes": lambda: dsa.attend(*args, indices[:, 1:], scale=1.0),
    }
    for message, call in refused.items():
        with pytest.raises(ValueError, match=message):
            call()
