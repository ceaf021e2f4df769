"""Caches in pages: the same bits as contiguous ones, and no page but a sequence's own."""

import copy
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.sharding import PartitionSpec

from k3jax.cache import state
from k3jax.errors import InputError
from k3jax.ops import dsa, mla
from k3jax.ops.rows import Rows
from k3jax.runtime import Cache, Model
from sharding import Layout, resolve

PAGES = (1, 3, 16, 64)
B, T, S = 2, 5, 192  # rows of a sequence, whole pages of every size
SCALE = 12**-0.5


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def dealt(batch, length, page, seed=0, spare=3):
    """A random table int32 [B, M] over a pool with pages to spare, and the pool's size."""
    count = -(-length // page)
    order = np.random.default_rng(seed).permutation(batch * count + spare)
    return order[: batch * count].reshape(batch, count).astype(np.int32), len(order)


def paged(rows, table, pool, page, fill=np.nan):
    """Contiguous [.., B, S, C] as a pool [.., N, P, C]; pages that no table names hold ``fill``."""
    rows = np.asarray(rows)
    *lead, _, length, width = rows.shape
    out = np.full((*lead, pool, page, width), fill, rows.dtype)
    missing = table.shape[1] * page - length
    rows = np.pad(rows, [(0, 0)] * (rows.ndim - 2) + [(0, missing), (0, 0)])
    out[..., table.reshape(-1), :, :] = rows.reshape(*lead, -1, page, width)
    return jnp.asarray(out)


class TestRows:
    @pytest.mark.parametrize("page", [1, 3, 7, 16, 64, 6144])
    def test_reads_what_a_row_of_the_batch_reads(self, page):
        length = -(-S // page) * page
        stack = normal(0, 3, B, length, 4)
        table, pool = dealt(B, length, page)
        for layer in (None, jnp.int32(2)):
            one = stack if layer is not None else stack[0]
            want = Rows.of(one, layer)
            got = Rows.of(paged(one, table, pool, page), layer, jnp.asarray(table))
            at = jnp.asarray(np.random.default_rng(1).integers(0, length, (B, T, 6)), jnp.int32)
            assert (got.shape, got.page) == (want.shape, page)
            np.testing.assert_array_equal(got.take(at), want.take(at))
            np.testing.assert_array_equal(got.whole(), want.whole())
            np.testing.assert_array_equal(got.block(17, 30), want.block(17, 30))
            second = got.sequences(1, 1)
            np.testing.assert_array_equal(second.pages(), table[1:])
            np.testing.assert_array_equal(second.block(3, 9), want.sequences(1, 1).block(3, 9))
            np.testing.assert_array_equal(second.take(at[:1]), want.sequences(1, 1).take(at[:1]))


class TestOps:
    """One program of all ops over a view, in pieces and in blocks; layer 1 of two."""

    @staticmethod
    @jax.jit
    def run(inputs, latents: Rows, keys: Rows):
        q, w_k, w_v, index_q, index_w, at = inputs
        out = {}
        for form in mla.PORTABLE:
            for sizes in ({}, {"query_block": 2, "key_block": 70}):
                options = {"scale": SCALE, "implementation": form, **sizes}
                out[f"{form} {len(sizes)}"] = mla.mla(q, latents, w_k, w_v, at, **options)
        for sizes in ({}, {"query_block": 2, "key_block": 70}):
            options = {"implementation": "streamed", **sizes}
            out[f"select {len(sizes)}"] = dsa.select(index_q, keys, index_w, at, 16, **options)
        out["candidates"] = dsa.candidates(index_q, keys, index_w, at, 16)
        for form in ("gathered", "masked"):
            options = {"scale": SCALE, "implementation": form}
            out[form] = dsa.attend(q, latents, w_k, w_v, out["select 0"], **options)
        return out

    @classmethod
    @functools.cache
    def case(cls):
        """Inputs, latents and keys [2, B, S, .] with NaN after each sequence's end, the results."""
        at = jnp.asarray([np.arange(T) + S - T, [-1, *np.arange(T - 1) + 60]], jnp.int32)
        shapes = (B, T, 3, 12), (3, 8, 16), (3, 6, 16), (B, T, 2, 8), (B, T, 2)
        inputs = (*(normal(i, *shape) for i, shape in enumerate(shapes)), at)
        unseen = np.arange(S) > np.asarray(at).max(1)[:, None]
        latents, keys = (
            np.where(unseen[..., None], np.float32(np.nan), normal(9, 2, B, S, width))
            for width in (20, 8)
        )
        want = cls.run(inputs, *(Rows.of(jnp.asarray(a), jnp.int32(1)) for a in (latents, keys)))
        return inputs, latents, keys, want

    @pytest.mark.parametrize("page", PAGES)
    def test_bits_of_contiguous_rows(self, page):
        inputs, latents, keys, want = self.case()
        table, pool = dealt(B, S, page)
        pools = [paged(a, table, pool, page) for a in (latents, keys)]
        table[1, -(-64 // page) :] = -1  # pages behind the end of a sequence need not exist
        got = self.run(inputs, *(Rows.of(a, jnp.int32(1), jnp.asarray(table)) for a in pools))
        assert all(
            np.isfinite(got[form]).all() for form in ("expanded 0", "absorbed 2", "gathered")
        )
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_array_equal(a, b)

    def test_gradient_goes_to_the_pages(self):
        inputs, latents, _, _ = self.case()
        q, w_k, w_v, _, _, at = inputs
        table, pool = dealt(B, S, 16)
        latents = np.nan_to_num(latents[0])

        def loss(stack, table):
            rows = Rows.of(stack, None, table)
            return (mla.mla(q, rows, w_k, w_v, at, scale=SCALE, key_block=70) ** 2).sum()

        want = jax.grad(loss)(jnp.asarray(latents), None)
        got = jax.grad(loss)(paged(latents, table, pool, 16, 0), jnp.asarray(table))
        want = paged(want, table, pool, 16, 0)
        assert np.abs(want).max() > 0.01
        assert np.abs(got - want).max() <= 1e-6 * np.abs(want).max()


@pytest.mark.parametrize("page", PAGES)
def test_tags_of_tokens_survive_writes_and_moves(page):
    """250 steps a page size: chunks written, pages moved, copied, freed and taken.

    Every token has a tag in its latent row and its index key. After each step the pools equal a
    plain record of them, and each token that was written shows its last tag through the table.
    """
    rng = np.random.default_rng(page)
    batch, length = 3, 40
    table, pool = dealt(batch, length, page, spare=4)
    free = sorted(set(range(pool)) - set(table.reshape(-1).tolist()))
    latents = np.full((2, pool, page, 3), -1.0, np.float32)
    keys = np.full((pool, page, 2), -1.0, np.float32)
    held: dict[tuple[int, int], float] = {}  # (sequence, position) -> tag

    @jax.jit
    def write(latents, keys, table, at, tags):
        rows = jnp.broadcast_to(tags[..., None], (*tags.shape, 3))
        latents = state.write_rows(latents, rows, at, jnp.int32(1), table)
        return latents, state.write_rows(keys, rows[..., :2], at, None, table)

    for step in range(250):
        b, m = int(rng.integers(batch)), int(rng.integers(table.shape[1]))
        kind = ("write", "move", "drop", "take")[rng.choice(4, p=[0.6, 0.2, 0.1, 0.1])]
        if kind == "move" and free and table[b, m] >= 0:
            new = free.pop(int(rng.integers(len(free))))
            latents[:, new], keys[new] = latents[:, table[b, m]], keys[table[b, m]]
            latents[:, table[b, m]], keys[table[b, m]] = np.nan, np.nan
            free.append(int(table[b, m]))
            table[b, m] = new
        elif kind == "drop" and table[b, m] >= 0:
            free.append(int(table[b, m]))
            table[b, m] = -1
            held = {k: v for k, v in held.items() if k[0] != b or k[1] // page != m}
        elif kind == "take" and free and table[b, m] < 0:
            table[b, m] = free.pop()
        # Rows in any order, some dropped, some past the end of the table.
        at = np.stack([rng.permutation(length + 2 * page)[:7] for _ in range(batch)])
        at = np.where(rng.random(at.shape) < 0.3, -1, at).astype(np.int32)
        tags = (step * 100 + np.arange(at.size).reshape(at.shape)).astype(np.float32)
        wrote = write(latents, keys, table, at, tags)
        for (i, t), position in np.ndenumerate(at):
            if position < 0 or position // page >= table.shape[1]:
                continue
            entry = table[i, position // page]
            if entry >= 0:
                latents[1, entry, position % page] = keys[entry, position % page] = tags[i, t]
                held[i, int(position)] = tags[i, t]
        for got, want in zip(wrote, (latents, keys), strict=True):
            np.testing.assert_array_equal(got, want)
        latents, keys = (np.array(a) for a in wrote)
        for (i, position), tag in held.items():
            entry, row = table[i, position // page], position % page
            assert (latents[1, entry, row] == tag).all()
            assert (keys[entry, row] == tag).all()
    assert len(held) > 60
    assert (latents[0, free] != latents[0, free]).any()  # a page that was freed holds NaN
    assert (np.nan_to_num(latents[0], nan=-1) == -1).all()  # the other layer


def test_writes_beyond_the_table_and_absent_pages_change_nothing():
    table = jnp.asarray([[2, -1], [0, 1]], jnp.int32)
    stack = normal(0, 5, 4, 3)
    at = jnp.asarray([[4, 7, 8, -1], [8, 100, 2**31 - 1, -1]], jnp.int32)
    got = state.write_rows(stack, jnp.ones((2, 4, 3)), at, None, table)
    np.testing.assert_array_equal(got, stack)


def shapes_in(jaxpr):
    """Dimensions of every array and sizes of every gather's and scatter's index vector."""
    for equation in jaxpr.eqns:
        for v in equation.outvars:
            yield from v.aval.shape
        if equation.primitive.name in ("gather", "scatter"):
            operand, indices = (v.aval for v in equation.invars[:2])
            assert indices.shape[-1] >= operand.ndim - 1, "an index counts flat rows"
        for inner in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from shapes_in(inner)


@pytest.mark.parametrize("page", [None, 1, 64, 6144])
@pytest.mark.parametrize("layers", [None, 4])
def test_no_flat_index_passes_int32(page, layers):
    """4 x 2^20 rows of 576 are 2.4e9 values: indices have a dimension each, none is a product."""
    batch, length, tokens = (1, 2**20, 4096) if layers else (4, 2**20, 1024)
    lead = () if layers is None else (layers,)
    spec = lambda *shape, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(shape, dtype)  # noqa: E731
    i32 = functools.partial(spec, dtype=jnp.int32)
    layer = None if layers is None else i32()
    table, stack = None, spec(*lead, batch, length, 576)
    if page is not None:
        count = -(-length // page)
        table, stack = i32(batch, count), spec(*lead, batch * count, page, 576)
    assert stack.size > 2**31

    def touch(stack, layer, table, rows, at, chosen):
        stack = state.write_rows(stack, rows, at, layer, table)
        view = Rows.of(stack, layer, table)
        return view.take(chosen), view.block(at[0, 0], 512), view.pages()

    inputs = (
        stack,
        layer,
        table,
        spec(batch, tokens, 576),
        i32(batch, tokens),
        i32(batch, 2, 2048),
    )
    traced = jax.make_jaxpr(touch)(*inputs)
    assert max(shapes_in(traced.jaxpr)) <= 2**22  # the longest dimension, rows of a pool by ones
    taken, block, pages = traced.out_avals
    assert taken.shape == (batch, 2, 2048, 576)
    assert block.shape == (batch, 512, 576)
    assert pages.dtype == jnp.int32


def global_caches(arrays):
    groups = (*arrays.head, *arrays.period, *arrays.tail)
    return [c for c in groups if isinstance(c, state.GlobalCache)]


def pools(c):
    """A global cache without its table."""
    return dataclasses.replace(c, table_BM=None)


def schedule(steps, batch, chunk, page, pages, pool, seed=0):
    """200 mixed steps: each sequence gets 0 to ``chunk`` tokens and takes pages as it grows; one
    that is full, or finds no page free, gives its pages back and starts anew."""
    rng = np.random.default_rng(seed)
    table, lengths = np.full((batch, pages), -1, np.int32), np.zeros(batch, int)
    tables, starts, news = [], [], []
    for _ in range(steps):
        new = rng.integers(0, chunk + 1, batch)
        for b in rng.permutation(batch):
            free = sorted(set(range(pool)) - set(table[table >= 0].tolist()))
            need = -(-(lengths[b] + new[b]) // page)
            if need > pages or need - (table[b] >= 0).sum() > len(free):
                table[b], lengths[b], new[b] = -1, 0, 0
                continue
            for m in range((table[b] >= 0).sum(), need):
                table[b, m] = free.pop(int(rng.integers(len(free))))
        tables.append(table.copy())
        starts.append(lengths.copy())
        news.append(new.copy())
        lengths = lengths + new
    arrays = (np.stack(a).astype(np.int32) for a in (tables, starts, news))
    return (*arrays, rng.integers(0, 96, (steps, batch, chunk)).astype(np.int32))


@pytest.mark.parametrize("dsa", [False, True])
def test_poison_in_free_pages_and_unused_rows(dsa):
    """200 mixed steps of the model, before each of which all rows that hold no token become NaN,
    have the bits of the same steps with zeros there."""
    page, pages, pool, batch = 5, 9, 20, 3
    steps = schedule(200, batch, 4, page, pages, pool)
    module = tiny.module(tiny.config(3, (2, 3), dsa=dsa))  # KDA, and a stack of two global layers
    free = pool - (steps[0] >= 0).sum((1, 2))
    assert free.min() < 2 < 10 < free.max()
    assert steps[1].max() > 2 * tiny.config().dsa.topk
    assert {0, 1, 2, 3, 4} == set(steps[2].reshape(-1).tolist())

    def prepared(cache, table, start_B, fill):
        """Stained, with the state of sequences that start anew at zero."""
        at = jnp.arange(pages * page, dtype=jnp.int32)
        at = jnp.where(at < start_B[:, None], at, -1)
        used = jnp.zeros((pool, page, 1), bool)
        used = state.write_rows(used, jnp.ones((*at.shape, 1), bool), at, None, table)
        going = start_B > 0

        def one(c):
            if isinstance(c, state.KDACache):
                states = jnp.where(going[:, None, None, None], c.state_BHVK, 0)
                tails = jnp.where(going[:, None, None], c.tails_3BWP, 0)
                return dataclasses.replace(c, state_BHVK=states, tails_3BWP=tails)
            return jax.tree.map(lambda a: jnp.where(used, a, fill), pools(c))

        return dataclasses.replace(
            state.with_table(state.each(cache, one), table), lengths_B=start_B
        )

    @jax.jit
    def run(cache, fill):
        def step(cache, xs):
            table, start_B, new_B, tokens_BT = xs
            logits, cache = module.extend(tokens_BT, prepared(cache, table, start_B, fill), new_B)
            return cache, logits

        return jax.lax.scan(step, cache, steps)[1]

    def cut(c):
        if isinstance(c, state.KDACache):
            return c
        return jax.tree.map(lambda a: a[..., :pool, :, :], pools(c))

    empty = state.each(state.empty(module.config, batch, pages * page, jnp.float32, page), cut)
    empty = state.with_table(empty, jnp.asarray(steps[0][0]))
    results = [np.asarray(run(empty, jnp.float32(fill))) for fill in (0.0, np.nan)]
    real = steps[2] > 0
    assert np.isfinite(results[0][real]).all()
    np.testing.assert_array_equal(results[0][real], results[1][real])


@functools.cache
def model(dsa: bool) -> Model:
    return Model(tiny.module(tiny.config(dsa=dsa)))


def run(m: Model, cache):
    """A prompt, the next piece of it, five tokens one by one: logits and the cache."""
    ids, steps = tiny.tokens(2, 46), []
    logits, cache = m.prefill(ids[:, :17], cache, [17, 9])
    steps.append(logits)
    logits, cache = m.prefill(ids[:, 17:46], cache, [29, 20])
    steps.append(logits)
    for t in range(5):
        logits, cache = m.decode(tiny.tokens(1, 2, seed=t)[0], cache)
        steps.append(logits)
    return np.stack(steps), cache


@pytest.mark.parametrize(("dsa", "page"), [(False, 16), (True, 3), (True, 6144)])
def test_model_has_the_bits_of_a_contiguous_cache(dsa, page):
    """In order and in dealt pages, with NaN wherever nothing was written."""
    m, count = model(dsa), -(-64 // page)
    # As long as the pages are, so that sums have one order.
    plain = Cache(state.empty(m.config, 2, count * page, jnp.float32), np.zeros(2, np.int32), 64)
    want, last = run(m, plain)
    ordered = m.init_cache(2, 60, page_size=page)
    assert ordered.max_length == 64
    for c in global_caches(ordered.arrays):
        assert c.table_BM.tolist() == np.arange(2 * count).reshape(2, count).tolist()
    other = m.init_cache(2, 60, page_size=page)
    other._arrays = state.with_table(
        state.each(other.arrays, stained), dealt(2, 64, page, seed=3, spare=0)[0]
    )
    for cache in (ordered, other):
        got, after = run(m, cache)
        np.testing.assert_array_equal(got, want)
        for a, b in zip(global_caches(after.arrays), global_caches(last.arrays), strict=True):
            for slot in [None] if a.latent_BSC.ndim == 3 else [jnp.int32(0), jnp.int32(1)]:
                for view in ("latents", "index_keys") if dsa else ("latents",):
                    here, there = (getattr(c, view)(slot).whole() for c in (a, b))
                    for row, n in enumerate(after.lengths_B):
                        np.testing.assert_array_equal(here[row, :n], there[row, :n])


def stained(c):
    """A layer's pools with NaN in every row."""
    if not isinstance(c, state.GlobalCache):
        return c
    return jax.tree.map(lambda a: jnp.full_like(a, jnp.nan), pools(c))


def test_tables_are_split_by_sequence():
    arrays = jax.eval_shape(lambda: state.empty(tiny.config(), 4, 64, jnp.float32, 16))
    names = state.axes(arrays)
    assert [c.table_BM for c in global_caches(names)] == [("batch", "token")]  # a stack has one
    layout = Layout.load("v5p-64-long")
    leaf = resolve.Leaf((8, 64), jnp.int32, ("batch", "token"))
    assert resolve.spec(layout, leaf) == PartitionSpec("data", None)


def test_refused_by_name():
    with pytest.raises(InputError, match="page_size=0"):
        model(True).init_cache(2, 60, page_size=0)
    spread = copy.copy(model(True))
    spread.layout = Layout.load("cpu-8")
    with pytest.raises(InputError, match="page_size=16: caches on a layout"):
        spread.init_cache(2, 60, page_size=16)
