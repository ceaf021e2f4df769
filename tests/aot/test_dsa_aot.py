"""Selection and latent attention compile for v5p, v6e and TPU7x at K3's sizes, with bounded
memory and without a copy of a cache.
"""

import re
from functools import partial

import jax.numpy as jnp
import pytest
from tpu_programs import LARGE, array, compiled, one_device

from k3jax.ops import dsa, mla
from k3jax.ops.rows import Rows

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("libtpu")]

MILLION, SHORT, LAYERS, TOPK = 1_048_576, 131_072, 3, 2048
INDEX_HEADS, INDEX_DIM, NOPE, ROPE, LATENT, VALUE = 32, 128, 128, 64, 512, 128
HEADS, SHARE = 96, 12  # all heads of K3, and those of one device among eight
GIB = 2**30
# Bytes of temporaries of a chunk of 4,096 tokens. Measured: 408 MB with 96 heads (absorbed queries
# and attended rows of 1,024 tokens, selected rows), 114 MB with 12.
PREFILL = {HEADS: 0.5e9, SHARE: 0.15e9}
DECODE = 1e6  # measured: 0.46 MB at most
PAGED = 0.02e9  # measured: 16.2 MB (128 queries of two sequences)


@pytest.fixture(params=LARGE, scope="module")
def place(request):
    return one_device(request.param)


def caches(keys, batch=1, page=None):
    """Index keys, latents, and a table when they lie in pages: stacks of layers."""
    if page is None:
        return [array(LAYERS, batch, keys, width) for width in (INDEX_DIM, LATENT + ROPE)]
    pool = [array(LAYERS, batch * keys // page, page, w) for w in (INDEX_DIM, LATENT + ROPE)]
    return [*pool, array(batch, keys // page, dtype=jnp.int32)]


def layer(place, queries, keys, heads, *, batch=1, page=None, sparse=True):
    """One layer's op: selection and sparse attention, or dense attention."""
    int32 = partial(array, dtype=jnp.int32)
    arguments = [
        array(batch, queries, INDEX_HEADS, INDEX_DIM),
        array(batch, queries, INDEX_HEADS, dtype=jnp.float32),
        array(batch, queries, heads, NOPE + ROPE),
        array(heads, NOPE, LATENT), array(heads, VALUE, LATENT),
        int32(batch, queries), int32(), *caches(keys, batch, page),
    ]  # fmt: skip

    def step(index_q, index_w, q, w_k, w_v, positions, slot, index_keys, latents, table=None):
        rows = Rows.of(latents, slot, table)
        scale = (NOPE + ROPE) ** -0.5
        if not sparse:
            # Not "auto": for 12 heads, 4,096 queries and the shorter cache it expands the rows.
            form = {"scale": scale, "implementation": "mosaic_tpu"}
            return mla.mla(q, rows, w_k, w_v, positions, **form)
        index_rows = Rows.of(index_keys, slot, table)
        selected = dsa.select(index_q, index_rows, index_w, positions, TOPK)
        return dsa.attend(q, rows, w_k, w_v, selected, scale=scale)

    done, memory = compiled(place, step, arguments, kernels=1 + sparse)
    copies = re.findall(rf"\[{LAYERS},[\d,]*\][^ ]* (?:copy|dynamic-slice|slice)\(", done.as_text())
    assert not copies
    return memory.temp_size_in_bytes


@pytest.mark.parametrize("heads", [HEADS, SHARE])
def test_prefill_chunk_against_a_million_keys(place, heads):
    """The whole op of one layer, on one device."""
    temporaries = layer(place, 4096, MILLION, heads)
    assert temporaries < PREFILL[heads] < 4 * GIB


@pytest.mark.parametrize("heads", [HEADS, SHARE])
@pytest.mark.parametrize("sparse", [True, False])
def test_decode(place, heads, sparse):
    """One layer of these index keys is 268 MB, one of latents 1,342 MB."""
    assert layer(place, 1, MILLION, heads, sparse=sparse) < DECODE


@pytest.mark.parametrize(
    ("queries", "keys"), [(128, MILLION), (1, SHORT), (128, SHORT), (4096, SHORT)]
)
def test_sparse(place, queries, keys):
    assert layer(place, queries, keys, SHARE) < PREFILL[SHARE]


@pytest.mark.parametrize(("queries", "keys"), [(4096, MILLION), (128, SHORT), (4096, SHORT)])
def test_dense(place, queries, keys):
    assert layer(place, queries, keys, SHARE, sparse=False) < PREFILL[SHARE]


@pytest.mark.parametrize(("page", "queries"), [(16, 1), (64, 128), (6144, 1)])
def test_pages(place, page, queries):
    """Two sequences, each of a million tokens as far as those are whole pages."""
    keys = MILLION // page * page
    assert layer(place, queries, keys, SHARE, batch=2, page=page) < PAGED
