"""The GPU kernels of the routed experts, interpreted: two blocks, few tiles."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from moe_contract import BETAS, Implementation, check, inputs, weights

from k3jax.ops.grouped_matmul import mosaic_gpu, rows
from k3jax.ops.grouped_matmul import mosaic_gpu_unpack as parts
from k3jax.quantization.mxfp4 import MXFP4

KERNEL = Implementation(
    "mosaic_gpu", jnp.bfloat16, sizes=(4, 2, 512, 512), limit=1e-2, same_bits=0.99
)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(mosaic_gpu, "BLOCKS", 2)


def experts(*arguments, first=None, activations=None):
    return mosaic_gpu.experts(
        *arguments,
        first=first,
        num_experts=KERNEL.sizes[0],
        out_dtype=arguments[0].dtype,
        activations=activations,
        interpret=True,
        **BETAS,
    )


def test_segments_of_two_blocks(monkeypatch):
    """Tiles are cut where a segment of rows ends; the last one has rows to spare."""
    monkeypatch.setattr(mosaic_gpu, "SEGMENT", 32)
    z, ids, weight = inputs(KERNEL, 12, "uneven")
    assert rows.bound(ids.size, KERNEL.sizes[0]) % 32
    arguments = z, ids.at[3, 1].set(-1), weight, *weights(KERNEL.sizes)
    check(KERNEL, experts(*arguments), *arguments)


def test_two_teams_in_a_layer_of_a_stack(monkeypatch):
    monkeypatch.setattr(mosaic_gpu.Shape, "of", lambda size, tiles: mosaic_gpu.Shape(size, 2))
    z, ids, weight = inputs(KERNEL, 3)
    w = weights(KERNEL.sizes)
    ids = ids.at[1, 0].set(-1)
    stacks = jax.tree.map(lambda a: jnp.concatenate([255 - a, a]), w)
    got = experts(z, ids, weight, *stacks, first=jnp.int32(KERNEL.sizes[0]))
    check(KERNEL, got, z, ids, weight, *w)


def test_spread_and_gather_are_inverse():
    x = np.arange(2 * 256).reshape(2, 256)
    np.testing.assert_array_equal(parts.gather(parts.spread(x)), x)
    assert sorted(parts.spread(x)[0, :128]) == list(range(128))


@pytest.mark.parametrize("compared", [0, rows.COMPARED])
@pytest.mark.parametrize("kind", ["uniform", "one", "uneven"])
def test_rows_and_tiles(monkeypatch, kind, compared):
    """Each assignment has a row of its own, in a tile of its expert, and none is left out."""
    monkeypatch.setattr(rows, "COMPARED", compared)
    ids = inputs(KERNEL, 24, kind)[1].at[5, 1].set(-1).at[6, 0].set(99)
    found = rows.sort(ids, 4)
    ids, place = np.asarray(ids), np.asarray(found.place_Nk)
    total = rows.bound(ids.size, 4)
    real = (ids >= 0) & (ids < 4)
    assert (place[~real] == rows.NOWHERE).all()
    assert len(set(place[real])) == real.sum()
    np.testing.assert_array_equal(np.asarray(found.token_R)[place[real]], np.nonzero(real)[0])
    assert (np.asarray(found.begin_E) % rows.ALIGNMENT == 0).all()
    seen = {}
    for first in range(0, total, 40):
        tiles = rows.cut(found.begin_E, found.end_E, first, 40, 16)
        used = int(tiles.used[0])
        assert used <= len(tiles.expert_T)
        for expert, start, count in zip(*(np.asarray(x)[:used] for x in tiles[:3]), strict=True):
            assert 0 < count <= 16
            assert start + count <= 40
            seen |= {int(first + start + r): expert for r in range(count)}
    assert seen == {int(p): e for p, e in zip(place[real], ids[real], strict=True)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda z, w: (z.astype(jnp.float32), *w), "z is float32, not bfloat16"),
        (lambda z, w: (z, w[0].unpack(), w[1]), "weights are not packed"),
        (
            lambda z, w: (z[:, :256], MXFP4(w[0].codes[..., :128], w[0].scales[..., :8]), w[1]),
            "latent width 256 is no multiple of 512",
        ),
    ],
)
def test_refusals(change, message):
    z, ids, _ = inputs(KERNEL, 3)
    z, w13, w2 = change(z, weights(KERNEL.sizes))
    assert mosaic_gpu.refusal(z, ids, w13, w2, None) == message
