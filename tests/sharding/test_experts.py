"""Expert dispatch on eight devices against a dense float64 oracle."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from k3jax.ops import grouped_matmul
from k3jax.quantization.mxfp4 import pack
from sharding import collectives, experts
from sharding.placement import propose

L, K = 8, 4
TOKENS = (1, 2, 63, 64)  # a device
LOCAL_EXPERTS = (1, 3, 7, 14)  # a device
ROUTINGS = ("uniform", "one shard", "one empty", "padding")
# Sizes and names of the mesh, and the axes experts are split over.
MESHES = {
    "8": ((8,), ("a",), ("a",)),
    "4x2": ((4, 2), ("a", "b"), ("a", "b")),
    "4x2 over a": ((4, 2), ("a", "b"), ("a",)),
    "4x2 over b": ((4, 2), ("a", "b"), ("b",)),
}


def make_mesh(name):
    """The mesh, the axes of the experts, and the number of devices along them."""
    shape, names, axes = MESHES[name]
    mesh = jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(shape))
    return mesh, axes, int(np.prod([mesh.shape[a] for a in axes]))


def on_devices(mesh_name, step):
    """Jitted ``step(z, ids, weights, w)``: tokens split over all devices, w over the experts'."""
    mesh, axes, _ = make_mesh(mesh_name)
    own = PartitionSpec(mesh.axis_names)
    specs = (own, own, own, PartitionSpec(axes))
    mapped = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=own, check_vma=False)
    return jax.jit(mapped)


def plain(w_ELL, z_ML, ids_Mk, weights_Mk):
    """Every local expert for every row. Two columns count instead: the assignments that reached
    their expert, and the devices a token went to."""
    held_MkE = ids_Mk[:, :, None] == jnp.arange(w_ELL.shape[0], dtype=jnp.int32)
    scale_ME1 = jnp.where(held_MkE, weights_Mk[:, :, None], 0.0).sum(1)[:, :, None]
    y_MEL = jnp.einsum("ml,elo->meo", z_ML.astype(jnp.float32), w_ELL, precision="highest")
    # A row without a local id may hold anything, and must not use it.
    r_ML = jnp.where(held_MkE.any(1)[:, :, None], scale_ME1 * y_MEL, 0.0).sum(1)
    r_ML = r_ML.at[:, -1].set(held_MkE.sum((1, 2)).astype(jnp.float32))
    return r_ML.at[:, -2].set(held_MkE.any((1, 2)).astype(jnp.float32))


@cache
def run(mesh_name, local_experts, forms=experts.FORMS):
    """(z, ids, weights, w) -> [forms, N, L] in one program, all of them global."""
    _, axes, shards = make_mesh(mesh_name)

    def step(z_NL, ids_Nk, weights_Nk, w_ELL):
        def compute(*rows):
            return plain(w_ELL, *rows)

        rows = (z_NL, ids_Nk, weights_Nk)
        r = [experts.dispatch(f, axes, *rows, shards * local_experts, compute) for f in forms]
        return jnp.stack(r, axis=1)

    return on_devices(mesh_name, step)


def draw(rng, tokens, shards, local_experts, routing):
    """z, ids, weights and expert matrices of eight devices."""
    N, E = 8 * tokens, shards * local_experts
    z_NL = rng.normal(size=(N, L)).astype(np.float32)
    weights_Nk = rng.uniform(0.1, 1.0, size=(N, K)).astype(np.float32)
    w_ELL = rng.normal(size=(E, L, L)).astype(np.float32)
    allowed = {
        "one shard": np.arange(local_experts) + local_experts * (shards // 2),
        "one empty": np.arange(local_experts, E),
    }.get(routing, np.arange(E))
    # Different experts for a token, as a router gives; fewer than K where there are no more.
    some = allowed[np.argsort(rng.uniform(size=(N, allowed.size)), axis=1)][:, :K]
    ids_Nk = np.full((N, K), -1, np.int32)
    ids_Nk[:, : some.shape[1]] = some
    if routing == "padding":
        padding_N = rng.uniform(size=N) < 0.5
        ids_Nk[padding_N] = -1
        ids_Nk[-1, 0] = E  # outside on the other side
        z_NL[padding_N] = np.nan
        weights_Nk[padding_N] = np.nan
    return z_NL, ids_Nk, weights_Nk, w_ELL


def oracle(shards, z_NL, ids_Nk, weights_Nk, w_ELL):
    r_NL = np.zeros(z_NL.shape)
    seen = [set() for _ in z_NL]
    for n, j in np.ndindex(*ids_Nk.shape):
        e = int(ids_Nk[n, j])
        if 0 <= e < len(w_ELL):
            r_NL[n] += weights_Nk[n, j] * (z_NL[n].astype(float) @ w_ELL[e].astype(float))
            seen[n].add(e // (len(w_ELL) // shards))
    r_NL[:, -1] = ((ids_Nk >= 0) & (ids_Nk < len(w_ELL))).sum(1)
    r_NL[:, -2] = [len(s) for s in seen]
    return r_NL


def check(r_NFL, expected_NL, words):
    r_NFL = np.asarray(r_NFL)
    assert r_NFL.dtype == np.float32
    limit = 1e-6 * np.abs(expected_NL).max() + 1e-30
    for f in range(r_NFL.shape[1]):
        r_NL, form = r_NFL[:, f], experts.FORMS[f]
        # Nothing is dropped, and a token visits a device once.
        np.testing.assert_array_equal(r_NL[:, -2:], expected_NL[:, -2:], err_msg=f"{form} {words}")
        assert np.abs(r_NL - expected_NL).max() <= limit, (form, words)
        assert np.abs(r_NL - r_NFL[:, 0]).max() <= limit, (form, words)


# Every number of tokens with every number of experts, and each of them on every mesh.
@pytest.mark.parametrize(
    ("mesh_name", "tokens", "local_experts"),
    [
        (list(MESHES)[(i + j) % 4], tokens, local_experts)
        for i, tokens in enumerate(TOKENS)
        for j, local_experts in enumerate(LOCAL_EXPERTS)
    ],
)
def test_equals_dense_oracle_and_drops_nothing(mesh_name, tokens, local_experts):
    _, _, shards = make_mesh(mesh_name)
    rng = np.random.default_rng(tokens * 100 + local_experts)
    for routing in ROUTINGS:
        arrays = draw(rng, tokens, shards, local_experts, routing)
        check(run(mesh_name, local_experts)(*arrays), oracle(shards, *arrays), routing)


def test_what_buffers_held_before_never_reaches_the_result(monkeypatch):
    poisoned = []

    def nan(shape, dtype):
        poisoned.append(shape)
        return jnp.full(shape, jnp.nan, dtype)

    monkeypatch.setattr(experts, "_buffer", nan)
    run.cache_clear()
    step = run("8", 3)
    rng = np.random.default_rng(7)
    for routing in ROUTINGS:
        arrays = draw(rng, 2, 8, 3, routing)
        check(step(*arrays), oracle(8, *arrays), routing)
    run.cache_clear()
    # Latents and routing of 8 x 2 rows, and the returned 2 x 4.
    assert poisoned == [(16, L), (16, 2 * K), (8, L)]


def test_gradients_equal_the_oracle():
    rng = np.random.default_rng(3)
    z_NL, ids_Nk, weights_Nk, w_ELL = draw(rng, 2, 8, 3, "one empty")
    ids_Nk[3] = -1
    pull_NL = rng.normal(size=z_NL.shape).astype(np.float32)
    pull_NL[:, -2:] = 0  # columns that count
    dz_NL, dweights_Nk, dw_ELL = (np.zeros(a.shape) for a in (z_NL, weights_Nk, w_ELL))
    for n, j in np.ndindex(*ids_Nk.shape):
        if (e := ids_Nk[n, j]) >= 0:
            dz_NL[n] += weights_Nk[n, j] * (w_ELL[e] @ pull_NL[n])
            dweights_Nk[n, j] = z_NL[n] @ w_ELL[e] @ pull_NL[n]
            dw_ELL[e] += weights_Nk[n, j] * np.outer(z_NL[n], pull_NL[n])

    step = run("8", 3)

    @jax.jit
    def gradients(z_NL, weights_Nk, w_ELL):
        def one_form(f):
            def loss(*a):
                return (step(a[0], ids_Nk, a[1], a[2])[:, f] * pull_NL).sum()

            return jax.grad(loss, argnums=(0, 1, 2))(z_NL, weights_Nk, w_ELL)

        return [one_form(f) for f in range(len(experts.FORMS))]

    for form, got in zip(experts.FORMS, gradients(z_NL, weights_Nk, w_ELL), strict=True):
        for ours, expected in zip(got, (dz_NL, dweights_Nk, dw_ELL), strict=True):
            np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-5, err_msg=form)


def test_packed_experts_with_copies_of_hot_ones():
    """The grouped matmul on MXFP4, bfloat16 latents, and a placement, as in the model."""
    E, F, W, N = 12, 32, 64, 16
    rng = np.random.default_rng(11)
    w13, w2 = (
        pack(jnp.asarray(rng.normal(size=s), jnp.float32)) for s in ((E, 2 * F, W), (E, W, F))
    )
    z_NL = jnp.asarray(rng.normal(size=(N, W)), jnp.bfloat16)
    ids_Nk = np.argsort(rng.uniform(size=(N, E)), axis=1)[:, :K].astype(np.int32)
    ids_Nk[5] = -1
    weights_Nk = jnp.asarray(rng.uniform(size=(N, K)), jnp.float32)

    def compute(w, z_ML, ids_Mk, weights_Mk):
        z_ML = z_ML.astype(jnp.float32)  # what the op returns is as wide as z
        return grouped_matmul.experts(
            z_ML, ids_Mk, weights_Mk, *w, situ_beta=1.0, situ_linear_beta=None
        )

    expected_NL = jax.jit(compute)((w13, w2), z_NL, ids_Nk, weights_Nk)
    placement = propose(np.bincount(ids_Nk[ids_Nk >= 0], minlength=E), 16, 8)
    w = jax.tree.map(lambda a: placement.expand(a, 0), (w13, w2))
    slots_Nk = placement.physical(jnp.asarray(ids_Nk), jnp.arange(N, dtype=jnp.int32))

    def step(z_NL, ids_Nk, weights_Nk, w):
        rows = (z_NL, ids_Nk, weights_Nk)
        forms = [
            experts.dispatch(f, ("a",), *rows, 16, lambda *rows: compute(w, *rows))
            for f in experts.FORMS
        ]
        return jnp.stack(forms, axis=1)

    r_NFL = on_devices("8", step)(z_NL, slots_Nk, weights_Nk, w)
    limit = 1e-6 * np.abs(expected_NL).max()
    for f in range(3):
        np.testing.assert_allclose(r_NFL[:, f], expected_NL, rtol=0, atol=limit)


def test_ragged_all_to_all_as_documented_by_jax():
    """The example of `jax.lax.ragged_all_to_all`, on the two devices of axis b."""
    mesh = make_mesh("4x2 over b")[0]
    device_2 = [
        [[1, 2, 2], [0, 1], [1, 2], [0, 0], [1, 1]],
        [[3, 4, 0], [0, 1], [1, 1], [1, 2], [2, 1]],
    ]
    arrays = [jnp.asarray(column, jnp.int32) for column in zip(*device_2, strict=True)]

    def step(rows, begin, size, target, received):
        buffer = jnp.zeros((4,), jnp.int32)
        offsets = begin[0], size[0], target[0], received[0]
        return collectives.ragged_all_to_all(rows[0], buffer, *offsets, ("b",))[None]

    spec = PartitionSpec("b")
    mapped = jax.shard_map(step, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    np.testing.assert_array_equal(jax.jit(mapped)(*arrays), [[1, 3, 0, 0], [2, 2, 4, 0]])


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("cpu", {"all_gather": 3, "all_to_all": 4}),
        ("not a cpu", {"all_to_all": 1, "ragged_all_to_all": 3}),
    ],
)
def test_jaxpr_holds_the_collective_of_the_platform(device, expected):
    mesh = make_mesh("8")[0]
    if device != "cpu":
        mesh = AbstractMesh((8,), ("a",), axis_types=(AxisType.Auto,))  # of no device

    def step(z_NL, ids_Nk, weights_Nk):
        return experts.dispatch("ragged", ("a",), z_NL, ids_Nk, weights_Nk, 8, lambda z, *_: z)

    spec = PartitionSpec("a")
    mapped = jax.shard_map(step, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    rows = [
        jax.ShapeDtypeStruct((16, n), t) for n, t in ((L, "float32"), (K, "int32"), (K, "float32"))
    ]
    (outer,) = jax.make_jaxpr(mapped)(*rows).eqns
    names = [eqn.primitive.name for eqn in outer.params["jaxpr"].eqns]
    communication = ("all_gather", "all_to_all", "ragged_all_to_all", "reduce_scatter", "psum")
    assert {n: names.count(n) for n in communication if n in names} == expected


@pytest.mark.parametrize("form", experts.FORMS)
def test_no_axes_and_no_tokens_communicate_nothing(form):
    rng = np.random.default_rng(0)
    z_NL, ids_Nk, weights_Nk, w_ELL = draw(rng, 1, 1, 6, "padding")

    def alone(z_NL, ids_Nk, weights_Nk):
        return experts.dispatch(form, (), z_NL, ids_Nk, weights_Nk, 6, lambda *r: plain(w_ELL, *r))

    r_NL = jax.jit(alone)(z_NL, ids_Nk, weights_Nk)
    check(r_NL[:, None], oracle(1, z_NL, ids_Nk, weights_Nk, w_ELL), form)
    none = run("8", 1, (form,))(z_NL[:0], ids_Nk[:0], weights_Nk[:0], w_ELL[:1].repeat(8, 0))
    assert none.shape == (0, 1, L)


def test_refuses_what_does_not_fit():
    rows = jnp.zeros((2, L)), jnp.zeros((2, K), jnp.int32), jnp.zeros((2, K))
    with pytest.raises(ValueError, match=r"expert dispatch 'sparse' is not one of \['gather'"):
        experts.dispatch("sparse", (), *rows, 8, lambda z, *_: z)

    def step(z_NL, ids_Nk, weights_Nk, w):
        return experts.dispatch("dense", ("a",), z_NL, ids_Nk, weights_Nk, 9, lambda z, *_: z)

    z_NL, ids_Nk, weights_Nk, w_ELL = draw(np.random.default_rng(0), 1, 8, 1, "uniform")
    with pytest.raises(
        ValueError, match=r"9 experts do not divide over 8 devices of axes \('a',\)"
    ):
        on_devices("8", step)(z_NL, ids_Nk, weights_Nk, w_ELL)
