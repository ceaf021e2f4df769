"""The TPU's latent attention kernels in interpret mode, below `mla` and `dsa.attend`."""

import contextlib
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.ops import dsa, mla, target
from k3jax.ops.dsa import reference as sparse
from k3jax.ops.mla import latent, mosaic_tpu, reference
from k3jax.ops.rows import Rows

FP32 = 1e-5  # max|d| / max|float64|; measured 1.3e-6
BF16 = 1e-2  # the same with bfloat16 inputs; measured 3.3e-3
CHUNKING = 1e-6  # between groups and blocks of other sizes; measured 2.8e-7
GRADIENT = 1e-6  # of the largest value, to the portable form's; measured 6.8e-7

H, N, R, C, V = 3, 16, 32, 128, 8
SCALE = (N + R) ** -0.5

kernel = functools.partial(mosaic_tpu.attention, interpret=True)
names = {"scale": SCALE, "implementation": "mosaic_tpu"}


@contextlib.contextmanager
def on_tpu():
    with (
        mock.patch.object(target, "device_kind", return_value="TPU v5"),
        mock.patch.dict(latent.LATENT, mosaic_tpu=kernel),
    ):
        yield


@jax.jit
def attend_range(q, cache, w_k, w_v, positions):
    with on_tpu():
        return mla.mla(q, cache, w_k, w_v, positions, **names)


@jax.jit
def attend_selection(q, cache, w_k, w_v, indices):
    with on_tpu():
        return dsa.attend(q, cache, w_k, w_v, indices, **names)


def case(batch, queries, keys, dtype=jnp.float32):
    """Random q, cache, w_k, w_v. Scores have a spread of about 2."""
    rng = np.random.default_rng([batch, queries, keys])
    shapes = (batch, queries, H, N + R), (batch, keys, C + R), (H, N, C), (H, V, C)
    spreads = 2, 1, C**-0.5, C**-0.5
    return tuple(
        jnp.asarray(rng.normal(0, s, x), dtype) for x, s in zip(shapes, spreads, strict=True)
    )


def positions_of(batch, queries, keys):
    """Unequal ends; later sequences begin with a padded query."""
    rows = np.stack([np.arange(queries) + keys - queries - b * (keys // 3) for b in range(batch)])
    rows[1:, 0] = -1
    return np.maximum(rows, -1).astype(np.int32)


def indices_of(batch, queries, keys, count):
    """No row twice; absent ones in between, rows past the cache, a query without any."""
    rng = np.random.default_rng([batch, queries, keys, count])
    rows = (
        np.stack([rng.permutation(keys)[:count] for _ in range(batch * queries)])
        .reshape(batch, queries, count)
        .astype(np.int32)
    )
    rows[:, :, ::5] = -1
    rows[0, -1, 1:4] = keys, keys + 70, 2**31 - 1
    rows[1:, 0] = -1
    return rows


def used(kind, where, keys):
    """Rows that some query of their sequence sees."""
    if kind == "range":
        return np.arange(keys) <= where.max(1, keepdims=True)
    mask = np.zeros((len(where), keys + 1), bool)
    for b, rows in enumerate(where):
        mask[b, np.where((rows >= 0) & (rows < keys), rows, keys)] = True
    return mask[:, :keys]


def relative(got, want):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return np.abs(got - want).max() / np.abs(want).max()


BATCH, QUERIES, KEYS, COUNT = 2, 10, 1104, 300  # two groups of 5, two blocks and a piece


@pytest.mark.parametrize("kind", ["range", "selection"])
class TestBoth:
    @pytest.fixture(autouse=True)
    def _bind(self, kind):
        self.kind = kind
        if kind == "range":
            self.run, self.where = attend_range, positions_of(BATCH, QUERIES, KEYS)
        else:
            self.run, self.where = attend_selection, indices_of(BATCH, QUERIES, KEYS, COUNT)

    def want(self, q, cache, w_k, w_v):
        if self.kind == "range":
            return reference.mla(q, cache, w_k, w_v, self.where, scale=SCALE)
        rows = np.where(self.where < KEYS, self.where, -1)
        return sparse.attend(q, cache, w_k, w_v, rows, scale=SCALE)

    @pytest.mark.parametrize(("dtype", "limit"), [(jnp.float32, FP32), (jnp.bfloat16, BF16)])
    def test_float64(self, dtype, limit):
        """A query that sees nothing gives zeros, whatever it holds."""
        args = case(BATCH, QUERIES, KEYS, dtype)
        q = jnp.asarray(args[0]).at[1:, 0].set(jnp.nan)
        got = self.run(q, *args[1:], self.where)
        assert got.dtype == dtype
        assert (np.asarray(got)[1:, 0] == 0).all()
        assert relative(got, self.want(*args)) < limit

    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
    def test_unused_rows_may_hold_anything(self, dtype):
        q, cache, w_k, w_v = case(BATCH, QUERIES, KEYS, dtype)
        unused = ~used(self.kind, self.where, KEYS)[..., None]
        assert unused.sum() > 20
        seen = [
            np.asarray(
                self.run(q, jnp.where(unused, fill, cache).astype(dtype), w_k, w_v, self.where)
            )
            for fill in (0.0, jnp.nan, jnp.inf)
        ]
        assert seen[0].tobytes() == seen[1].tobytes() == seen[2].tobytes()

    @pytest.mark.parametrize("page", [8, 48, 552])
    def test_pages(self, page):
        """Any order of pages, one layer of a stack, NaN in all that no query sees: bit for bit."""
        dtype = jnp.bfloat16
        q, cache, w_k, w_v = case(BATCH, QUERIES, KEYS, dtype)
        mask, count = used(self.kind, self.where, KEYS), KEYS // page
        table = np.random.default_rng(0).permutation(3 * count)[: BATCH * count]
        table = table.reshape(BATCH, count)
        pool = np.full((2, 3 * count, page, C + R), np.nan, np.float32)
        pool[1, table] = np.where(mask[..., None], cache, np.nan).reshape(BATCH, count, page, -1)
        table = np.where(mask.reshape(BATCH, count, page).any(-1), table, -9)  # free pages
        view = Rows(jnp.asarray(pool, dtype), jnp.int32(1), 0, BATCH, jnp.asarray(table, jnp.int32))
        got = self.run(q, view, w_k, w_v, self.where)
        want = self.run(q, cache, w_k, w_v, self.where)
        assert np.asarray(got).tobytes() == np.asarray(want).tobytes()

    def test_sequences_of_a_view(self):
        """A view that begins at the second of three sequences, and so do its pages."""
        args = case(3, QUERIES, KEYS)
        pages = args[1].reshape(3 * 2, KEYS // 2, C + R)
        table = jnp.arange(6, dtype=jnp.int32).reshape(3, 2)
        want = self.run(args[0][1:], args[1][1:], *args[2:], self.where)
        for view in (Rows.of(args[1]), Rows.of(pages, None, table)):
            got = self.run(args[0][1:], view.sequences(1, 2), *args[2:], self.where)
            np.testing.assert_array_equal(got, want)

    def test_chunked_is_one_shot(self):
        """Queries alone, and together in groups."""
        q, *rest = case(BATCH, QUERIES, KEYS)
        whole = self.run(q, *rest, self.where)
        parts = [self.run(q[:, t : t + 1], *rest, self.where[:, t : t + 1]) for t in range(QUERIES)]
        assert relative(jnp.concatenate(parts, 1), whole) < CHUNKING

    def test_gradient(self):
        """That of the portable form."""
        args = case(BATCH, QUERIES, KEYS)
        weight = jnp.asarray(
            np.random.default_rng(1).normal(size=(BATCH, QUERIES, H, V)), jnp.float32
        )
        portable = dsa.attend if self.kind == "selection" else mla.mla
        name = "gathered" if self.kind == "selection" else "absorbed"

        def other(*args):
            return portable(*args, self.where, scale=SCALE, implementation=name)

        got, want = (
            jax.grad(lambda *a: jnp.sum(f(*a) * weight), (0, 1, 2, 3))(*args)  # noqa: B023
            for f in (lambda *a: self.run(*a, self.where), other)
        )
        for a, b in zip(got, want, strict=True):
            assert relative(a, b) < GRADIENT


def test_groups_over_a_range():
    """300 queries of 3 heads are two groups, the second one padded."""
    args, positions = case(1, 300, 320), positions_of(1, 300, 320)
    got = attend_range(*args, positions)
    assert relative(got, reference.mla(*args, positions, scale=SCALE)) < FP32


@pytest.mark.parametrize("kind", ["positions", "indices"])
def test_log_of_the_sum(kind):
    """What merges partial attention over devices; -inf where a query sees nothing."""
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.normal(size=(BATCH, QUERIES, H, C + R)), jnp.float32)
    rows = jnp.asarray(rng.normal(size=(BATCH, KEYS, C + R)), jnp.float32)
    if kind == "positions":
        where = positions_of(BATCH, QUERIES, KEYS)
        seen = np.arange(KEYS) <= where[..., None]
    else:
        where = indices_of(BATCH, QUERIES, KEYS, COUNT)
        seen = np.stack([[used("selection", x[None, None], KEYS)[0] for x in b] for b in where])
    q = q.at[1:, 0].set(jnp.nan)  # as partial attention over devices may pass
    _, lse = kernel(q, Rows.of(rows), (kind, jnp.asarray(where)), scale=SCALE, width=C)
    lse, scores = (
        np.asarray(lse),
        np.einsum("bthc,bsc->bths", np.float64(q), np.float64(rows)) * SCALE,
    )
    assert (lse[1:, 0] == -np.inf).all()
    with np.errstate(divide="ignore"):
        want = np.log((np.exp(scores) * seen[:, :, None]).sum(-1))
    live = seen.any(-1)
    assert np.abs(lse - want)[live].max() < FP32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 769}, "769 heads"),
        ({"latent": 576}, "576 columns"),
        ({"page": 1, "pages": 64}, "1 rows a page"),
        ({"page": 8, "pages": 131_072}, "131072 pages"),
        ({}, None),
        ({"page": 6144, "pages": 171}, None),
    ],
)
def test_refusals_name_the_value(change, message):
    sizes = {"heads": 96, "latent": 512, "page": 1_048_576, "pages": None} | change
    stack = jax.ShapeDtypeStruct((sizes["pages"] or 1, sizes["page"], 576), jnp.bfloat16)
    table = sizes["pages"] and jax.ShapeDtypeStruct((1, sizes["pages"]), jnp.int32)
    q = jax.ShapeDtypeStruct((1, 1, sizes["heads"], 192), jnp.bfloat16)
    w_k = jax.ShapeDtypeStruct((sizes["heads"], 128, sizes["latent"]), jnp.bfloat16)
    refused = mosaic_tpu.refusal(q, Rows(stack, None, 0, 1, table), w_k, None)
    assert refused is None if message is None else message in refused
