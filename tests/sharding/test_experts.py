"""Expert dispatch on eight devices against a dense float64 oracle."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from sharding import experts

L, K = 8, 4
TOKENS = (1, 2, 63, 64)  # a device
LOCAL_EXPERTS = (1, 3, 7, 14)  # a device
MESHES = {
    "8": ((8,), ("a",), ("a",)),
    "4x2": ((4, 2), ("a", "b"), ("a", "b")),
    "4x2 over a": ((4, 2), ("a", "b"), ("a",)),
}


def make_mesh(name):
    shape, names, axes = MESHES[name]
    mesh = jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(shape))
    shards = int(np.prod([mesh.shape[a] for a in axes]))
    return mesh, axes, shards


def plain(w_ELL, z_ML, ids_Mk, weights_Mk):
    """Every local expert for every row, and the assignments that count, as one more column."""
    local = (ids_Mk >= 0) & (ids_Mk < w_ELL.shape[0])
    y_EML = jnp.einsum("elm,nl->enm", w_ELL, z_ML, precision="highest")
    one_MkE = jax.nn.one_hot(ids_Mk, w_ELL.shape[0]) * weights_Mk[:, :, None]
    # A row without a local id may hold anything; nothing of it may be used.
    scale_EM = one_MkE.sum(1).T
    r_ML = jnp.where(scale_EM[:, :, None] == 0, 0.0, scale_EM[:, :, None] * y_EML).sum(0)
    return r_ML.at[:, -1].set(local.sum(1).astype(jnp.float32))


@cache
def run(mesh_name, form, num_experts):
    """(z, ids, weights, w) -> r, all of them global."""
    mesh, axes, _ = make_mesh(mesh_name)
    own, held = PartitionSpec(mesh.axis_names), PartitionSpec(axes)

    def step(z_NL, ids_Nk, weights_Nk, w_ELL):
        def compute(*rows):
            return plain(w_ELL, *rows)

        return experts.dispatch(form, axes, z_NL, ids_Nk, weights_Nk, num_experts, compute)

    specs = (own, own, own, held)
    return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=own, check_vma=False))


def draw(rng, tokens, shards, local_experts, routing):
    """z, ids, weights and expert matrices of eight devices; the last column of z is not used."""
    N, E = 8 * tokens, shards * local_experts
    z_NL = rng.normal(size=(N, L)).astype(np.float32)
    weights_Nk = rng.uniform(0.1, 1.0, size=(N, K)).astype(np.float32)
    w_ELL = rng.normal(size=(E, L, L)).astype(np.float32)
    allowed = {
        "one shard": np.arange(local_experts) + local_experts * (shards // 2),
        "one empty": np.setdiff1d(np.arange(E), np.arange(local_experts)),
    }.get(routing, np.arange(E))
    order_NE = np.argsort(rng.uniform(size=(N, allowed.size)), axis=1)
    ids_Nk = np.full((N, K), -1, np.int32)
    some = allowed[order_NE][:, :K]  # different experts for a token, as a router gives
    ids_Nk[:, : some.shape[1]] = some
    if routing == "padding":
        ids_Nk[rng.uniform(size=N) < 0.5] = -1
        ids_Nk[-1, 0] = E  # outside on the other side
    return z_NL, ids_Nk, weights_Nk, w_ELL


def oracle(z_NL, ids_Nk, weights_Nk, w_ELL):
    r_NL = np.zeros(z_NL.shape)
    for n, j in np.ndindex(*ids_Nk.shape):
        e = ids_Nk[n, j]
        if 0 <= e < w_ELL.shape[0]:
            r_NL[n] += weights_Nk[n, j] * (z_NL[n].astype(float) @ w_ELL[e].astype(float))
    r_NL[:, -1] = ((ids_Nk >= 0) & (ids_Nk < w_ELL.shape[0])).sum(1)
    return r_NL


@pytest.mark.parametrize("form", experts.FORMS)
@pytest.mark.parametrize(
    ("mesh_name", "tokens", "local_experts"),
    [
        ("8", 1, 1),
        ("8", 2, 14),
        ("8", 63, 7),
        ("4x2", 64, 3),
        ("4x2", 1, 14),
        ("4x2 over a", 63, 1),
        ("4x2 over a", 2, 7),
    ],
)
def test_equals_dense_oracle_and_drops_nothing(form, mesh_name, tokens, local_experts):
    _, _, shards = make_mesh(mesh_name)
    rng = np.random.default_rng(tokens * 100 + local_experts)
    for routing in ("uniform", "one shard", "one empty", "padding"):
        arrays = draw(rng, tokens, shards, local_experts, routing)
        r_NL = np.asarray(run(mesh_name, form, shards * local_experts)(*arrays))
        expected_NL = oracle(*arrays)
        assert r_NL.dtype == np.float32
        # The last column counts the assignments that reached their expert.
        np.testing.assert_array_equal(r_NL[:, -1], expected_NL[:, -1], err_msg=routing)
        error = np.abs(r_NL - expected_NL).max()
        assert error <= 1e-6 * np.abs(expected_NL).max() + 1e-30, routing
