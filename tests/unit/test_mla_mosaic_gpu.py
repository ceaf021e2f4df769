"""Latent attention for Hopper GPUs on a CPU: interpreted, eagerly, and lowered for a GPU that is
not here. Interpret mode is slow, so cases are few; the contract of the other implementations runs
on the hardware, in tests/gpu."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dsa_kernels import stacked, wide
from jax.sharding import AbstractDevice, AbstractMesh

from k3jax.ops.mla import mosaic_gpu
from k3jax.ops.rows import Rows

SCALE = 192**-0.5
# Measured: 1.4e-3 for o, 7e-7 for lse.
LIMIT, LIMIT_LSE = 2e-3, 2e-6


def float64(q, data, seen):
    """o and lse of the rows that are seen, [B, T, S]."""
    score = np.einsum("bthc,bsc->bths", wide(q), data) * SCALE
    score = np.where(seen[:, :, None], score, -np.inf)
    with np.errstate(divide="ignore"):
        lse = np.log(np.exp(score).sum(-1))
    weight = np.exp(score - np.where(np.isinf(lse), 0, lse)[..., None])
    return np.einsum("bths,bsw->bthw", weight, data[..., :512]), lse


@pytest.mark.parametrize(
    ("kind", "heads", "page", "splits"),
    [
        ("indices", 16, None, 1),
        ("indices", 12, 3, 2),
        ("positions", 16, 1, 3),
        ("positions", 12, 64, 1),
    ],
)
def test_rows_of_a_stack(kind, heads, page, splits):
    """Rows that nobody sees hold NaN, as does a query without rows."""
    rng, keys = np.random.default_rng(0), 192
    q = rng.normal(0, 1, (1, 3, heads, 576))
    q[0, 1] = np.nan
    if kind == "indices":
        where = np.stack([rng.permutation(keys // 2)[:70] for _ in range(3)])[None]
        where[0, 0, ::3] = [-1, keys, 2**31 - 1, -(2**31)] * 6
        where[0, 1] = -1
        seen = (np.arange(keys) == where[..., None]).any(2)
    else:
        where = np.array([[130, -1, 63]])
        seen = np.arange(keys) <= where[..., None]
    data = jnp.asarray(rng.normal(0, 1, (1, keys, 576)), jnp.bfloat16)
    data = jnp.where(seen.any(1)[..., None], data, jnp.asarray(jnp.nan, jnp.bfloat16))
    q = jnp.asarray(q, jnp.bfloat16)
    rows = stacked(Rows.of(data), page)
    assert isinstance(rows, Rows)
    o, lse = mosaic_gpu.latent(
        q, rows, (kind, jnp.asarray(where, jnp.int32)),
        scale=SCALE, width=512, splits=splits, interpret=True,
    )  # fmt: skip
    assert o.dtype == lse.dtype == jnp.float32
    assert not np.asarray(o)[:, 1].any()
    assert (np.asarray(lse)[:, 1] == -np.inf).all()
    live = np.array([0, 2])
    want, want_lse = float64(q[:, live], np.nan_to_num(wide(data)), seen[:, live])
    worst = np.abs(np.asarray(o)[:, live] - want).max() / np.abs(want).max()
    worst_lse = np.abs(np.asarray(lse)[:, live] - want_lse).max()
    print(worst, worst_lse)
    assert worst < LIMIT
    assert worst_lse < LIMIT_LSE


def test_merge():
    """Parts without a row have no share; of none at all, zeros and -inf."""
    rng = np.random.default_rng(1)
    o, lse = rng.normal(size=(2, 5, 3, 512)), rng.normal(size=(2, 5, 3))
    lse[0, 2], lse[1, :, 1] = -np.inf, -np.inf
    o[np.isinf(lse)] = 0
    got, total = mosaic_gpu._merge(jnp.float32(o), jnp.float32(lse), interpret=True)
    weight = np.exp(lse)
    whole = weight.sum(1)
    assert (np.asarray(got)[1, 1] == 0).all()
    assert np.asarray(total)[1, 1] == -np.inf
    live = whole > 0
    want = (o * (weight / np.where(live, whole, 1)[:, None])[..., None]).sum(1)
    assert np.abs(np.asarray(got) - want).max() < 1e-6
    assert np.abs(np.asarray(total)[live] - np.log(whole[live])).max() < 1e-6


@pytest.mark.parametrize("heads", [12, 48, 96, 128])
@pytest.mark.parametrize("kind", ["indices", "positions"])
def test_lowers_for_a_gpu(kind, heads):
    """Two kernels, attention and the merge of splits."""
    array = jax.ShapeDtypeStruct
    device = AbstractDevice("NVIDIA H200", 132, "cuda")
    where = array((1, 1, 2048) if kind == "indices" else (1, 1), jnp.int32)
    call = lambda q, stack, layer, where: mosaic_gpu.latent(  # noqa: E731
        q, Rows.of(stack, layer), (kind, where), scale=SCALE, width=512
    )
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
        traced = jax.jit(call).trace(
            array((1, 1, heads, 576), jnp.bfloat16),
            array((2, 1, 131072, 576), jnp.bfloat16),
            array((), jnp.int32),
            where,
        )
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 2
