"""The TPU's selection kernel in interpret mode: exact against a stable sort."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.ops import dsa, target
from k3jax.ops.dsa import mosaic_tpu, reference, xla
from k3jax.ops.rows import Rows

H, K = 4, 128
RANK = (
    1e-6  # of the largest score, between the kernel's sum over heads and another; measured 7.7e-8
)

kernel = functools.partial(mosaic_tpu.select, interpret=True)


@functools.partial(jax.jit, static_argnames="topk")
def candidates(q, rows, w, positions, topk):
    """(rank, at) of the kernel itself."""
    return kernel(q, Rows.of(rows), w, positions, topk)


@functools.partial(jax.jit, static_argnames="topk")
def select(q, rows, w, positions, topk):
    """`dsa.select` as on a TPU, down to the kernel."""
    with (
        mock.patch.object(target, "device_kind", return_value="TPU v5"),
        mock.patch.dict(dsa.SELECT, mosaic_tpu=kernel),
    ):
        return dsa.select(q, rows, w, positions, topk, implementation="mosaic_tpu")


def case(batch, queries, keys, dtype=jnp.float32, whole=False):
    """q, k, w. ``whole`` numbers make scores exact, with many ties."""
    rng = np.random.default_rng([batch, queries, keys])
    shapes = (batch, queries, H, K), (batch, keys, K), (batch, queries, H)
    draw = (lambda s: rng.integers(-1, 2, s)) if whole else (lambda s: rng.normal(size=s))
    q, k, w = map(draw, shapes)
    return jnp.asarray(q, dtype), jnp.asarray(k, dtype), jnp.asarray(w, jnp.float32)


def keyed(score_BS, queries):
    """q, k, w whose scores are ``score_BS`` for every query: relu(k[0]) - relu(k[1])."""
    batch, keys = score_BS.shape
    k = np.zeros((batch, keys, K), np.float32)
    k[..., 0], k[..., 1] = score_BS, -score_BS
    q, w = np.zeros((batch, queries, H, K), np.float32), np.zeros((batch, queries, H))
    q[..., 0, 0], q[..., 1, 1] = 1, 1
    w[..., 0], w[..., 1] = 1, -1
    return jnp.asarray(q), jnp.asarray(k), jnp.asarray(w, jnp.float32)


def positions_of(batch, queries, keys):
    """Unequal ends; later rows begin with a padded query, and the second query sees 8 keys."""
    rows = np.stack([np.arange(queries) + keys - queries - b * (keys // 3) for b in range(batch)])
    rows[1:, 0] = -1
    rows[0, 1:2] = 7
    return jnp.asarray(np.maximum(rows, -1), jnp.int32)


# 9 queries are a group of 8 and one alone; 2,064 keys are two blocks and a piece.
SMALL = 2, 9, 2064, 16


class TestOneShape:
    """Cases of one shape, and so of one program."""

    @pytest.mark.parametrize("whole", [False, True])
    def test_float64(self, whole):
        *sizes, topk = SMALL
        inputs, positions = case(*sizes, whole=whole), positions_of(*sizes)
        want = reference.select(*inputs, positions, topk)
        np.testing.assert_array_equal(select(*inputs, positions, topk), want)

    @pytest.mark.parametrize("kind", ["constant", "half equal", "negative", "extreme"])
    def test_hand_made_scores(self, kind):
        batch, queries, keys, topk = SMALL
        rng = np.random.default_rng(3)
        score = rng.normal(size=(batch, keys)).astype(np.float32)
        if kind == "constant":
            score[:] = 0.25
        elif kind == "half equal":
            score[:, ::2] = np.float32(1.5)
        elif kind == "negative":
            score = np.minimum(score, np.float32(-1))
        else:
            values = [0.0, -0.0, 1e-30, -1e-30, 3e38, -3e38]
            score = np.asarray(rng.choice(values, (batch, keys)), np.float32)
        inputs, positions = keyed(score, queries), positions_of(batch, queries, keys)
        got = np.asarray(select(*inputs, positions, topk))
        for b, t in np.ndindex(batch, queries):
            want = reference.top_positions(score[b], int(positions[b, t]), topk)
            assert got[b, t].tolist() == want.tolist() + [-1] * (topk - len(want))

    def test_nan_is_the_last_choice(self):
        """15 finite keys and NaN else: those are all selected, then the first NaN key."""
        batch, queries, keys, topk = SMALL
        score = np.full((batch, keys), np.nan, np.float32)
        finite = np.arange(40, 40 + 15 * 60, 60)
        score[:, finite] = -3e38
        positions = jnp.full((batch, queries), keys - 1, jnp.int32)
        got = np.asarray(select(*keyed(score, queries), positions, topk))
        assert (got == np.concatenate([[0], finite])).all()

    def test_keys_behind_the_positions_may_hold_anything(self):
        batch, queries, keys, topk = SMALL
        (q, k, w), positions = case(batch, queries, keys), positions_of(batch, queries, keys)
        unused = jnp.arange(keys) > positions.max(1, keepdims=True)
        assert unused.sum() > keys // 4
        seen = [
            candidates(q, jnp.where(unused[..., None], fill, k), w, positions, topk)
            for fill in (0.0, jnp.nan, jnp.inf)
        ]
        for rank, at in seen[1:]:
            assert np.asarray(rank).tobytes() == np.asarray(seen[0][0]).tobytes()
            np.testing.assert_array_equal(at, seen[0][1])

    def test_ranks(self):
        """Finite and that of `xla.ranked` for what is kept; -inf where there is none."""
        *sizes, topk = SMALL
        (q, k, w), positions = case(*sizes), positions_of(*sizes)
        rank, at = map(np.asarray, candidates(q, k, w, positions, topk))
        kept = np.minimum(np.asarray(positions) + 1, topk)[..., None]
        np.testing.assert_array_equal(at >= 0, np.arange(at.shape[-1]) < kept)
        np.testing.assert_array_equal(rank > -np.inf, at >= 0)
        score = np.asarray(dsa.scores(q, k, w))
        here = np.take_along_axis(score, np.maximum(at, 0), -1)
        assert np.abs(rank - here)[at >= 0].max() < RANK * np.abs(score).max()


@pytest.mark.parametrize(
    ("queries", "keys", "topk", "dtype"),
    [(3, 2064, 2048, jnp.float32), (1, 40_008, 200, jnp.bfloat16)],
)
def test_sizes(queries, keys, topk, dtype):
    """The real top-k; several superchunks, and slots beyond the top-k."""
    inputs, positions = case(1, queries, keys, dtype, whole=True), positions_of(1, queries, keys)
    want = reference.select(*inputs, positions, topk)
    assert (want[0, -1] != np.arange(topk)).any()
    np.testing.assert_array_equal(select(*inputs, positions, topk), want)


@pytest.mark.parametrize("page", [8, 48, 1536])
def test_pages(page):
    """Page tables in any order, one layer of a stack, NaN in all that is not of this view."""
    batch, queries, keys, topk = 2, 9, 3072, 16
    (q, k, w), positions = case(batch, queries, keys, whole=True), positions_of(2, 9, keys)
    count = keys // page
    table = np.random.default_rng(0).permutation(2 * batch * count)[: batch * count]
    table = table.reshape(batch, count)
    pool = np.full((2, 2 * batch * count, page, K), np.nan, np.float32)
    written = np.arange(keys) <= np.asarray(positions).max(1, keepdims=True)
    filled = np.where(written[..., None], k, np.nan).reshape(batch, count, page, K)
    pool[1, table] = filled
    table = np.where(written.reshape(batch, count, page).any(-1), table, -7)  # free pages
    view = Rows(jnp.asarray(pool), jnp.int32(1), 0, batch, jnp.asarray(table, jnp.int32))
    want = reference.select(q, k, w, positions, topk)
    np.testing.assert_array_equal(select(q, view, w, positions, topk), want)


def test_chunk_sizes_change_nothing():
    """Positions and the bits of ranks, for queries alone, in part of a group, and in groups."""
    (q, k, w), positions = case(1, 200, 200), jnp.arange(200, dtype=jnp.int32)[None]
    rank, at = map(np.asarray, candidates(q, k, w, positions, 16))
    want = reference.select(q, k, w, positions, 16)
    np.testing.assert_array_equal(at[..., :16], want)
    for chunk, first in ((1, 184), (7, 0), (64, 0)):  # chunks of a size ride on the batch axis
        count = -(-(200 - first) // chunk)
        here = first + np.arange(count * chunk, dtype=np.int32).reshape(count, chunk)
        take, here = np.minimum(here, 199), np.where(here < 200, here, -1)
        written = np.arange(200) <= here.max(1, keepdims=True)
        cache = jnp.asarray(np.where(written[..., None], k, np.nan), jnp.float32)
        parts = candidates(q[0, take], cache, w[0, take], jnp.asarray(here), 16)
        for got, whole in zip(parts, (rank, at), strict=True):
            np.testing.assert_array_equal(np.asarray(got)[here >= 0], whole[0, first:])


def test_keys_over_devices():
    """Candidates of two halves of the keys, merged by `dsa.keep`: the selection of one device."""
    batch, queries, keys, topk = 2, 9, 2064, 16
    (q, k, w), positions = case(batch, queries, keys, whole=True), positions_of(2, 9, keys)
    half = keys // 2
    parts = [
        candidates(q, k[:, d * half :][:, :half], w, jnp.clip(positions - d * half, -1), topk)
        for d in range(2)
    ]
    rank, at = (jnp.stack(x) for x in zip(*parts, strict=True))
    place = at + jnp.asarray([0, half], jnp.int32)[:, None, None, None]

    def keep(rank, place):
        return dsa.keep(rank, place, topk, keys, functools.partial(jax.lax.psum, axis_name="d"))

    kept = jax.vmap(keep, axis_name="d")(rank, place)
    best = jnp.concatenate(jnp.where(kept, rank, -jnp.inf), -1), jnp.concatenate(place, -1)
    want = reference.select(q, k, w, positions, topk)
    np.testing.assert_array_equal(xla.ascending(*best)[..., :topk], want)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 24}, "24 heads, no power of two"),
        ({"width": 64}, "K is 64"),
        ({"keys": 2**24}, "16777216 keys"),
        ({"keys": 1_048_580}, "1048580 rows a page"),
        ({"dtype": jnp.float8_e4m3fn}, "float8_e4m3fn"),
        ({"page": 8, "pages": 131_072}, "131072 pages"),
        ({}, None),
        ({"page": 6144, "pages": 171}, None),
    ],
)
def test_refusals_name_the_value(change, message):
    sizes = {"heads": 32, "width": 128, "keys": 1_048_576, "dtype": jnp.bfloat16} | change
    page, pages = sizes.get("page", sizes["keys"]), sizes.get("pages")
    stack = jax.ShapeDtypeStruct((pages or 1, page, sizes["width"]), sizes["dtype"])
    table = None if pages is None else jax.ShapeDtypeStruct((1, pages), jnp.int32)
    q = jax.ShapeDtypeStruct((1, 1, sizes["heads"], sizes["width"]), jnp.bfloat16)
    refused = mosaic_tpu.refusal(q, Rows(stack, None, 0, 1, table), None, 2048)
    assert refused is None if message is None else message in refused
