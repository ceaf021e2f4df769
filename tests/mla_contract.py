"""What every implementation of latent attention must satisfy, at the sizes that it takes: dense
(`mla.mla`, a query sees the rows up to its position) and sparse (`dsa.attend`, a selection)."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dsa_kernels import Latent, check_sizes, stacked, wide

from k3jax.ops import dsa, mla
from k3jax.ops.dsa import reference as sparse_reference
from k3jax.ops.mla import latent
from k3jax.ops.mla import reference as dense_reference
from k3jax.ops.rows import Rows

TOPK = 16
PROMPT, CHUNKS = 200, (1, 17, 64, 200)
PAGES = (1, 7, 63)  # tiles of a page, of a cache of 63
SLOPE = 1e-6  # directional derivative / (norm of gradient * norm of step)
KINDS = ("dense", "sparse")


def call(implementation: Latent, kind: str, **options):
    name = getattr(implementation, kind) or implementation.name
    options |= {"scale": implementation.scale, "implementation": name}
    return functools.partial(mla.mla if kind == "dense" else dsa.attend, **options)


@functools.cache
def exact_form(implementation: Latent) -> Latent:
    """A portable one of the same sizes in float32."""
    return dataclasses.replace(
        Latent("absorbed", dense="absorbed", sparse="gathered"),
        **{name: getattr(implementation, name) for name in ("heads", "latent", "rope")},
    )


def runner(implementation: Latent, kind: str, sizes: tuple = ()):
    """Compiled attention; traced, and therefore patched, when a new shape comes. With a weight for
    every output, the gradients of their sum too."""
    return _runner(implementation, kind, sizes)


@functools.cache  # of all arguments: left out or given, a default is one entry
def _runner(implementation: Latent, kind: str, sizes: tuple):
    sizes = dict(sizes)
    named = call(implementation, kind, **implementation.options(kind, sizes))

    def function(q, rows, w_k, w_v, where):
        rows = rows if isinstance(rows, Rows) else implementation.filled(rows)
        return named(q, rows, w_k, w_v, where)

    compiled = jax.jit(lambda args, where: function(*args, where))

    @jax.jit
    def gradients(args, where, weight):
        loss = lambda args: jnp.sum(function(*args, where).astype(jnp.float32) * weight)  # noqa: E731
        return jax.grad(loss)(args)

    def run(args, where, weight=None):
        where = jnp.asarray(where, jnp.int32)
        with implementation.running(**sizes):
            if weight is not None:
                return gradients(args, where, jnp.asarray(weight, jnp.float32))
            got = compiled(args, where)
        assert got.dtype == implementation.dtype
        return np.asarray(got)

    return run


def drawn(implementation, batch, queries, keys, seed=0):
    """q, cache, w_k, w_v, on the host. Scores have a spread of about 2."""
    rng = np.random.default_rng([seed, batch, queries, keys])
    heads, width, rope = implementation.heads, implementation.latent, implementation.rope
    spreads_shapes = (
        (2, (batch, queries, heads, implementation.NOPE + rope)),
        (1, (batch, keys, width + rope)),
        (width**-0.5, (heads, implementation.NOPE, width)),
        (width**-0.5, (heads, implementation.VALUE, width)),
    )
    return tuple(rng.normal(0, *a).astype(implementation.dtype) for a in spreads_shapes)


def positions_of(batch, queries, keys):
    """Unequal ends per row; row 0 ends at the last key, later rows begin with a pad query."""
    ends = [max(0, keys - 1 - 3 * b - b * keys // 4) for b in range(batch)]
    rows = np.stack([np.arange(e - queries + 1, e + 1) for e in ends])
    rows[1:, 0] = -1
    return np.maximum(rows, -1)


def selections_of(batch, queries, keys, topk=TOPK):
    """Rows up to the positions, drawn, ascending, and -1 at the end."""
    rng, positions = np.random.default_rng(keys), positions_of(batch, queries, keys)
    out = np.full((batch, queries, topk), -1)
    for b, t in np.ndindex(*positions.shape):
        legal = np.arange(positions[b, t] + 1)
        chosen = np.sort(rng.permutation(legal)[:topk])
        out[b, t, : len(chosen)] = chosen
    return out


def where_of(kind, batch, queries, keys):
    make = positions_of if kind == "dense" else selections_of
    return make(batch, queries, keys)


def float64(implementation, kind, args, where):
    args = [wide(x) for x in args]
    module = dense_reference.mla if kind == "dense" else sparse_reference.attend
    return module(*args, where, scale=implementation.scale)


def error(got, want):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    return np.abs(got - want).max() / np.abs(want).max()


def cosine(a, b):
    a, b = (np.asarray(x, np.float64).ravel() for x in (a, b))
    return a @ b / np.linalg.norm(a) / np.linalg.norm(b)


def check(implementation, got, want):
    assert error(got, want) < implementation.limit  # false for a NaN
    if implementation.cosine is not None:
        assert cosine(got, want) > implementation.cosine


@pytest.mark.parametrize("kind", KINDS)
class LatentContract:
    """What every implementation of latent attention must satisfy."""

    @pytest.mark.parametrize("keys", [1, TOPK - 1, TOPK, TOPK + 1, 2 * TOPK, 4 * TOPK, 300])
    def test_float64(self, implementation, kind, keys):
        """A selection of everything is what dense attention sees."""
        args, where = drawn(implementation, 3, 5, keys), where_of(kind, 3, 5, keys)
        got = runner(implementation, kind)(args, where)
        check(implementation, got, float64(implementation, kind, args, where))
        if kind == "sparse" and keys <= TOPK:
            dense = runner(implementation, "dense")(args, positions_of(3, 5, keys))
            assert error(got, dense) < implementation.blocking

    def test_real_sizes(self, implementation, kind):
        """4,096 rows, or 2,048 of them, for two queries."""
        args = drawn(implementation, 1, 2, 4096)
        where = positions_of(1, 2, 4096) if kind == "dense" else selections_of(1, 2, 4096, 2048)
        got = runner(implementation, kind)(args, where)
        check(implementation, got, float64(implementation, kind, args, where))

    def test_queries_without_rows_are_exact_zeros(self, implementation, kind):
        """They may hold NaN. Negative entries and rows past the cache are absent, anywhere."""
        q, *rest = drawn(implementation, 3, 5, 64)
        if kind == "dense":
            where = np.array([[-1, 0, -1, 6, 63], [-1] * 5, [3, 2, 1, -1, 40]])
            kept, dead = where, where < 0
        else:
            where = selections_of(3, 5, 64)
            where[1:, 0] = -1
            where[:, 2, ::2] = -1
            where[:, 4, 9:] = [64, 70, 2**30, 2**31 - 1, -5, -(2**31), -1]
            kept = np.where((where >= 0) & (where < 64), where, -1)
            dead = (kept < 0).all(-1)
            assert dead.sum() == 2
        poisoned = np.where(dead[..., None, None], np.asarray(np.nan, q.dtype), q)
        got = runner(implementation, kind)((poisoned, *rest), where)
        assert (got[dead] == 0).all()
        check(implementation, got, float64(implementation, kind, (q, *rest), kept))

    def test_unused_rows_may_hold_anything(self, implementation, kind):
        """Output and gradients, bit for bit. Nobody sees row 0 of a selection, which may stand in
        for an absent one."""
        q, cache, w_k, w_v = drawn(implementation, 3, 5, 64)
        where = where_of(kind, 3, 5, 64)
        if kind == "dense":
            where[2] = -1
            used = np.arange(64) <= where.max(1, keepdims=True)
        else:
            where[where == 0] = 1
            where[1:, 3, 10:] = -1
            used = np.stack([np.isin(np.arange(64), rows) for rows in where])
            assert not used[:, 0].any()
        assert (~used).sum() > 20
        weight = np.random.default_rng(2).normal(size=(*q.shape[:3], implementation.VALUE))
        for sizes in ({}, *implementation.blocks[:1]):
            run, seen = runner(implementation, kind, (*sizes.items(),)), []
            for fill in (0.0, np.nan, np.inf):
                rows = np.where(used[..., None], cache, np.asarray(fill, cache.dtype))
                args = (q, rows, w_k, w_v)
                seen.append([run(args, where), *run(args, where, weight)])
                assert np.isfinite(seen[-1][0]).all()
            for poisoned in seen[1:]:
                for a, b in zip(seen[0], poisoned, strict=True):
                    assert np.asarray(a).tobytes() == np.asarray(b).tobytes()

    def test_block_sizes_change_nothing(self, implementation, kind):
        args, where = drawn(implementation, 2, 37, 300), where_of(kind, 2, 37, 300)
        whole = runner(implementation, kind)(args, where)
        check(implementation, whole, float64(implementation, kind, args, where))
        for sizes in implementation.blocks:
            cut = runner(implementation, kind, (*sizes.items(),))(args, where)
            assert error(cut, whole) < implementation.blocking

    def test_batch_mates_and_chunks_change_nothing(self, implementation, kind):
        """Every query alone, and the batch rows alone, in the precision of the output."""
        args, where = drawn(implementation, 3, 5, 64), where_of(kind, 3, 5, 64)
        (q, cache, *weights), run = args, runner(implementation, kind)
        together = run(args, where)
        for b, t in np.ndindex(3, 5):
            query = np.s_[b : b + 1, t : t + 1]
            alone = run((q[query], cache[b : b + 1], *weights), where[query])
            assert np.abs(alone - together[query]).max() <= implementation.blocking * np.abs(
                together[query]
            ).max(initial=1)
        for b in range(3):
            row = np.s_[b : b + 1]
            alone = run((q[row], cache[row], *weights), where[row])
            assert error(alone, together[row]) < implementation.blocking

    @pytest.mark.parametrize("chunk", CHUNKS)
    def test_chunks_of_a_prompt(self, implementation, kind, chunk):
        """Of any size, which ride on the batch axis; rows of later chunks are not written yet."""
        q, cache, *weights = drawn(implementation, 1, PROMPT, PROMPT)
        where = np.arange(PROMPT)[None]
        if kind == "sparse":
            where = selections_of(1, PROMPT, PROMPT)
        want = float64(implementation, kind, (q, cache, *weights), where)
        count = -(-PROMPT // chunk)
        at = np.arange(count * chunk).reshape(count, chunk)
        take = np.minimum(at, PROMPT - 1)
        here = where[0, take]
        here[at >= PROMPT] = -1
        written = np.arange(PROMPT) <= at[:, -1:]
        rows = np.where(written[..., None], cache, np.asarray(np.nan, cache.dtype))
        got = runner(implementation, kind)((q[0, take], rows, *weights), here)
        got = got.reshape(1, -1, *got.shape[2:])[:, :PROMPT]
        check(implementation, got, want)

    def test_later_rows_have_no_influence(self, implementation, kind):
        """Not a bit; and the row of a query has."""
        q, cache, w_k, w_v = drawn(implementation, 2, 12, 12)
        where = np.broadcast_to(np.arange(12), (2, 12))
        if kind == "sparse":
            everything = np.broadcast_to(np.arange(TOPK), (2, 12, TOPK))
            where = np.where(everything <= where[..., None], everything, -1)
        run = runner(implementation, kind)
        before = run((q, cache, w_k, w_v), where)
        changed = cache.copy()
        changed[:, 5] *= np.asarray(-3, cache.dtype)
        after = run((q, changed, w_k, w_v), where)
        np.testing.assert_array_equal(before[:, :5], after[:, :5])
        moved = np.abs(np.float64(before) - np.float64(after))
        assert (moved[:, 5:].max((0, 2, 3)) > 1e-3).all()

    @pytest.mark.parametrize("page", [None, *PAGES])
    def test_rows_of_a_stack(self, implementation, kind, page):
        """One layer, from the third sequence on; in a row each, or in pages in any order."""
        tile = implementation.tile
        keys = PAGES[-1] * tile
        q, cache, *weights = drawn(implementation, 2, 5, keys)
        where = where_of(kind, 2, 5, keys)
        want = float64(implementation, kind, (q, cache, *weights), where)
        used = np.arange(keys) <= where.reshape(2, -1).max(1, keepdims=True)
        cache = np.where(used[..., None], cache, np.asarray(np.nan, cache.dtype))
        rows = stacked(Rows.of(cache), page and page * tile)
        check(implementation, runner(implementation, kind)((q, rows, *weights), where), want)

    def test_log_sum_exp(self, implementation, kind):
        """What a kernel itself gives: attention within its rows and their log-sum-exp, from which
        shares of the rows are merged."""
        if implementation.entry is None and implementation.name not in latent.LATENT:
            pytest.skip("a portable form, which has no such value")
        rows, where = drawn(implementation, 3, 5, 64)[1], where_of(kind, 3, 5, 64)
        width, scale = implementation.latent, implementation.scale
        q = np.random.default_rng(3).normal(size=(3, 5, implementation.heads, rows.shape[2]))
        q = jnp.asarray(q, rows.dtype)
        with implementation.running():
            kernel = latent.LATENT[implementation.name]
            name = "positions" if kind == "dense" else "indices"
            o, lse = jax.jit(
                lambda q, rows, at: kernel(q, Rows.of(rows), (name, at), scale=scale, width=width)
            )(q, rows, jnp.asarray(where, jnp.int32))
        assert o.dtype == lse.dtype == jnp.float32
        score = np.einsum("bthc,bsc->bths", wide(q), wide(rows)) * scale
        if kind == "dense":
            seen = np.arange(64) <= where[..., None]
        else:
            seen = (np.arange(64)[:, None] == where[..., None, :]).any(-1)
        score = np.where(seen[:, :, None], score, -np.inf)
        with np.errstate(divide="ignore"):
            want = np.log(np.exp(score).sum(-1))
        none = ~seen.any(-1)
        assert (np.asarray(lse)[none] == -np.inf).all()
        assert (np.asarray(o)[none] == 0).all()
        assert np.abs(np.asarray(lse)[~none] - want[~none]).max() < implementation.limit
        weight = np.exp(score - np.where(none[..., None], 0, want)[..., None])
        check(implementation, o, np.einsum("bths,bsw->bthw", weight, wide(rows)[..., :width]))

    def test_gradients(self, implementation, kind):
        """Those of float64 along one random direction per argument; in bfloat16, the angle to
        float32's."""
        args, where = drawn(implementation, 3, 5, 64), where_of(kind, 3, 5, 64)
        rng = np.random.default_rng(1)
        weight = rng.normal(size=(3, 5, implementation.heads, implementation.VALUE))
        for sizes in ({}, *implementation.blocks[:1]):
            got = runner(implementation, kind, (*sizes.items(),))(args, where, weight)
            assert {g.dtype for g in got} == {jnp.dtype(implementation.dtype)}
            if implementation.dtype != jnp.float32:
                assert implementation.cosine is not None
                exact = [jnp.float32(x) for x in args]
                exact = runner(exact_form(implementation), kind)(exact, where, weight)
                assert min(map(cosine, got, exact)) > implementation.cosine
                continue
            for i in range(4):
                step, sides = rng.normal(size=args[i].shape), []
                for sign in (1, -1):
                    moved = [wide(a) for a in args]
                    moved[i] += sign * 1e-5 * step
                    sides.append((float64(implementation, kind, moved, where) * weight).sum())
                want = (sides[0] - sides[1]) / 2e-5
                size = np.linalg.norm(wide(got[i])) * np.linalg.norm(step)
                assert abs((wide(got[i]) * step).sum() - want) / size < SLOPE

    def test_sizes_past_int32(self, implementation, kind):
        """8,192 queries x 2^20 rows, and caches of 2^33 numbers, by shapes alone."""
        queries, keys, dtype = 8192, 2**20, implementation.dtype
        heads, width, rope = implementation.heads, implementation.latent, implementation.rope
        shape = jax.ShapeDtypeStruct
        layers = -(-(2**33) // (4 * keys * (width + rope)))
        rows = Rows(shape((layers, 4, keys, width + rope), dtype), shape((), jnp.int32), 3, 1)
        args = (
            shape((1, queries, heads, implementation.NOPE + rope), dtype),
            rows,
            shape((heads, implementation.NOPE, width), dtype),
            shape((heads, implementation.VALUE, width), dtype),
        )
        where = shape((1, queries, *(() if kind == "dense" else (2048,))), jnp.int32)
        with implementation.running():
            traced = jax.make_jaxpr(call(implementation, kind))(*args, where)
        check_sizes(traced.jaxpr, queries * keys // 8, [rows.stack.shape])
