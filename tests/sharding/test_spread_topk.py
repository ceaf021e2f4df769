"""One top-k over a cache whose rows are striped over devices equals the one-device selection."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from k3jax.layers.tokens import Stripe
from k3jax.ops import dsa
from sharding.parallel import Parallel

B, T, S, H, K, TOPK = 2, 5, 192, 2, 8, 16
POSITIONS = np.array([[191, 130, 17, 15, 3], [16, 0, 190, -1, -1]], np.int32)


def inputs(kind: str):
    rng = np.random.default_rng(0)
    q = rng.normal(size=(B, T, H, K)).astype(np.float32)
    w = rng.normal(size=(B, T, H)).astype(np.float32)
    k = rng.normal(size=(B, S, K)).astype(np.float32)
    if kind == "constant":
        k[:] = k[:, :1]
    if kind == "half equal":
        k[:, ::2] = k[:, :1]
    if kind == "NaN":  # in rows that nobody may see, and in some that they may
        k[:, 5] = np.nan
        k[1, 191] = np.nan
    return q, k, w


def spread_selection(devices: int, q, k, w, topk: int):
    """Selected positions of every query, in any order, from striped index keys."""
    stripe = Stripe(Parallel(batch=("x",), cache_sequence=("x",)))

    def select(q, k, w, positions):
        rank, at = dsa.candidates(q, k, w, stripe.visible(positions), topk)
        kept = dsa.keep(rank, stripe.position(at), topk, S, stripe.all_reduce)
        return jnp.where(kept, stripe.position(at), -1)

    # Device d holds the rows d, d + n, d + 2n, ..
    k = k.reshape(B, S // devices, devices, K).swapaxes(1, 2)
    if devices > jax.device_count():  # the same collectives over an axis of one array
        run = jax.vmap(select, (None, 1, None, None), 2, axis_name="x", axis_size=devices)
        return np.asarray(jax.jit(run)(q, k, w, POSITIONS)).reshape(B, T, -1)
    mesh = jax.make_mesh((devices,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    run = jax.shard_map(
        select, mesh=mesh, in_specs=(P(), P(None, "x"), P(), P()), out_specs=P(None, None, "x"),
        check_vma=False,
    )  # fmt: skip
    return np.asarray(jax.jit(run)(q, k.reshape(B, S, K), w, POSITIONS))


@pytest.mark.parametrize("kind", ["random", "constant", "half equal", "NaN"])
@pytest.mark.parametrize("devices", [1, 2, 8, 64])
def test_equal_to_one_device(devices, kind):
    """The best 16, and the best one among them."""
    q, k, w = inputs(kind)
    for topk in (TOPK, 1):
        want = np.asarray(dsa.select(q, k, w, POSITIONS, topk))
        got = spread_selection(devices, q, k, w, topk)
        for b, t in np.ndindex(B, T):
            chosen = sorted(p for p in got[b, t].tolist() if p >= 0)
            assert chosen == [p for p in want[b, t].tolist() if p >= 0]
            assert len(chosen) == max(0, min(topk, POSITIONS[b, t] + 1))
            if kind == "constant":
                assert chosen == [*range(len(chosen))]


def test_stripes_are_the_identity_on_one_device():
    stripe = Stripe(Parallel())
    positions = jnp.asarray(POSITIONS)
    for name in ("visible", "target", "position"):
        assert np.array_equal(getattr(stripe, name)(positions), POSITIONS)


def test_index_keys_of_a_million_tokens_need_no_product_of_sizes():
    """[T, S] has 8,192 x 2^20 entries, more than int32 counts; shapes alone must go through."""
    million, chunk = 2**20, 8192
    spec = lambda *shape, dtype=jnp.float32: jax.ShapeDtypeStruct(shape, dtype)  # noqa: E731
    q, k, w = spec(1, chunk, 4, 16), spec(1, million, 16), spec(1, chunk, 4)
    positions = spec(1, chunk, dtype=jnp.int32)
    rank, at = jax.eval_shape(lambda *a: dsa.candidates(*a, 2048), q, k, w, positions)
    assert rank.shape == at.shape == (1, chunk, 2048)
    assert at.dtype == jnp.int32
