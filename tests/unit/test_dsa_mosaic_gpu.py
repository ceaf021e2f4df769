"""The GPU's selection kernels in interpret mode, sizes cut so that every step of it happens.

Scores and segments run as on the GPU; picking runs as a plain sort (`tests/gpu` has the real one).
"""

import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.ops import dsa
from k3jax.ops.dsa import fp8, mosaic_gpu, mosaic_gpu_collect, mosaic_gpu_pick, reference
from k3jax.ops.dsa.xla import ordered, unordered
from k3jax.ops.rows import Rows, Scaled

H, K, TOPK = 32, 128, 64
SCORE = 2e-6  # of the largest; sums over heads in another order; measured 4e-7


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(mosaic_gpu, "PLACES", 512)
    monkeypatch.setattr(mosaic_gpu, "SAMPLE", 512)
    monkeypatch.setattr(mosaic_gpu, "BLOCKS", 8)


def drawn(queries, keys, seed=0):
    """Whole numbers, whose scores are exact in float32."""
    rng = np.random.default_rng(seed)
    q = rng.integers(-1, 2, (1, queries, H, K))
    k = rng.integers(-1, 2, (1, keys, K)) * 2 ** rng.integers(0, 3, (1, keys, 1))
    w = rng.integers(-511, 512, (1, queries, H))
    return jnp.asarray(q, jnp.bfloat16), jnp.asarray(k, jnp.bfloat16), jnp.asarray(w, jnp.float32)


def select(q, rows, w, positions, topk=TOPK):
    positions = jnp.asarray(positions, jnp.int32)
    rank, at = mosaic_gpu.candidates(q, rows, w, positions, topk, interpret=True)
    np.testing.assert_array_equal(np.asarray(at) == -1, np.asarray(rank) == -np.inf)
    return np.asarray(at[..., :topk])


KINDS = {
    "random": lambda k, n: k,
    "constant": lambda k, n: jnp.broadcast_to(k[:, :1], k.shape),
    "half": lambda k, n: jnp.where((n % 2 == 0)[None, :, None], k[:, :1], k),
    "rising": lambda k, n: k[:, :1] * (1 + n // 256).astype(k.dtype)[None, :, None],
    "nan": lambda k, n: jnp.where((n % 3 == 0)[None, :, None], jnp.nan, k),
}


@pytest.mark.parametrize("kind", KINDS)
def test_exact(kind):
    q, k, w = drawn(3, 1500)
    k = KINDS[kind](k, jnp.arange(1500)).astype(jnp.bfloat16)
    positions = np.int32([[1499, 30, -1]])
    got = select(q, Rows.of(k), w, positions)
    np.testing.assert_array_equal(got, reference.select(q, k, w, positions, TOPK))


def test_poison_behind_the_positions():
    q, k, w = drawn(3, 1500)
    positions = np.int32([[1100, 90, 1200]])
    want = select(q, Rows.of(k), w, positions)
    assert (want[0, 1] == np.arange(27, 91)).sum() < TOPK  # not merely the last ones
    np.testing.assert_array_equal(
        select(q, Rows.of(k.at[:, 1201:].set(jnp.nan)), w, positions), want
    )


@pytest.mark.parametrize("page", [8, 24, 128, 256])
def test_pages_of_a_layer(page):
    pages = 1024 // page
    keys = pages * page
    q, k, w = drawn(3, keys, seed=page)
    positions = np.int32([[keys - 1, 500, 700]])
    table = np.random.default_rng(0).permutation(pages + 3)[:pages].astype(np.int32)
    pool = jnp.full((2, pages + 3, page, K), jnp.nan, jnp.bfloat16)
    pool = pool.at[1, table].set(k[0].reshape(pages, page, K))
    rows = Rows.of(pool, jnp.int32(1), jnp.asarray(table)[None])
    want = reference.select(q, k, w, positions, TOPK)
    np.testing.assert_array_equal(select(q, rows, w, positions), want)


def test_eight_bits():
    """The ranks are those of the codes, and the same rows are best."""
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.standard_normal((1, 2, H, K)), jnp.bfloat16)
    k = jnp.asarray(rng.standard_normal((1, 1024, K)), jnp.float32)
    w = jnp.asarray(rng.standard_normal((1, 2, H)), jnp.float32)
    factor = jnp.abs(k).max(-1, keepdims=True) / 448
    rows = Scaled(Rows.of((k / factor).astype(jnp.float8_e4m3fn)), Rows.of(factor))
    q, rows, w = fp8.meet(q, rows, w)
    positions = jnp.int32([[1023, 900]])
    rank, at = map(np.asarray, mosaic_gpu.candidates(q, rows, w, positions, TOPK, interpret=True))
    want_rank, want_at = map(np.asarray, dsa.streamed(q, rows, w, positions, TOPK))
    for t in range(2):
        order = np.argsort(want_at[0, t])
        np.testing.assert_array_equal(at[0, t, :TOPK], want_at[0, t][order])
        limit = SCORE * np.abs(want_rank).max()
        np.testing.assert_allclose(rank[0, t, :TOPK], want_rank[0, t][order], rtol=0, atol=limit)
    assert (at[0, :, TOPK:] == -1).all()
    assert (rank[0, :, TOPK:] == -np.inf).all()


def test_floor_is_low_enough():
    rng = np.random.default_rng(0)
    rank = jnp.asarray(rng.standard_normal((1, 3, 1024)) * 100, jnp.float32)
    wanted = jnp.int32([[1, 50, 1024]])
    positions = jnp.full((1, 3), 5000, jnp.int32)
    floor = np.asarray(mosaic_gpu_pick.floor(rank, wanted, positions, 512, interpret=True))
    above = (np.asarray(rank) >= floor[..., None]).sum(-1)
    assert (above >= wanted).all()
    assert (above <= np.asarray(wanted) * 1.3 + 1).all()
    short = np.asarray(mosaic_gpu_pick.floor(rank, wanted, positions, 5001, interpret=True))
    assert (short == -np.inf).all()


def test_order_of_ranks():
    values = np.float32([-np.inf, -3e38, -1.5, -1e-40, 0, 1e-40, 2, 3e38, np.inf])
    keys = np.asarray(ordered(jnp.asarray(values)))
    assert (np.diff(keys.astype(np.int64)) > 0).all()
    np.testing.assert_array_equal(np.asarray(unordered(jnp.asarray(keys))), values)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"heads": 16}, "16 heads of 128"),
        ({"dtype": jnp.float32}, "float32"),
        ({"page": 12}, "pages of 12 rows"),
        ({"topk": 5000}, "topk is 5000"),
        ({"keys": 2**21}, "2097152 keys"),
    ],
)
def test_refusals(change, reason):
    shape = {"heads": H, "dtype": jnp.bfloat16, "page": 64, "topk": 2048, "keys": 4096} | change
    zeros = lambda s: jnp.broadcast_to(jnp.zeros((), shape["dtype"]), s)  # noqa: E731
    pages = shape["keys"] // shape["page"]
    rows = Rows.of(zeros((2, shape["page"], K)), None, jnp.zeros((1, pages), jnp.int32))
    said = mosaic_gpu.refusal(zeros((1, 1, shape["heads"], K)), rows, None, shape["topk"])
    assert said is not None
    assert reason in said


def test_factors_need_larger_pages():
    rows = Rows.of(jnp.zeros((4, 16, K), jnp.float8_e4m3fn), None, jnp.zeros((1, 4), jnp.int32))
    factors = Rows.of(jnp.zeros((4, 16, 1), jnp.float32), None, rows.table_BM)
    q = jnp.zeros((1, 1, H, K), jnp.float8_e4m3fn)
    said = mosaic_gpu.refusal(q, Scaled(rows, factors), None, 16)
    assert said == "pages of 16 rows, no multiple of 32"


def test_tiles_change_places():
    """Blocks take every tile once, whatever their number."""
    for splits in (1, 3, 8, 128):
        tiles = [
            n * splits + (split + n * mosaic_gpu_collect.STRIDE) % splits
            for split in range(splits)
            for n in range(5)
        ]
        assert sorted(tiles) == list(range(5 * splits))
