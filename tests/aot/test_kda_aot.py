"""The KDA kernels compile for every TPU generation at K3's sizes, and copy nothing."""

import os
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from k3jax.ops import kda as kda_op
from k3jax.ops import target
from k3jax.ops.kda.packing import num_chunks
from sharding.compile import COMPILER_OPTIONS, ENVIRONMENT, row_major

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("libtpu")]

D, HEADS, LAYERS, EPS = 128, 96, 4, 1e-5
TOPOLOGIES = {  # name: (device kind, heads whose million tokens fit in the memory of a chip)
    "v5e:2x2": ("TPU v5 lite", 6),
    "v5p:2x2x1": ("TPU v5", 12),
    "v6e:2x2": ("TPU v6 lite", 12),
    "tpu7x:2x2x1": ("TPU7x", 12),
}
# Measured: 0.79 MB on a v5p at most (filters and gates of all heads), none elsewhere.
TEMPORARIES = 1e6


@pytest.fixture(params=TOPOLOGIES, scope="module")
def place(request):
    """A mesh of one device of a generation, in the way that a step of the model has one."""
    pytest.importorskip("libtpu", reason="needs the extra aot (libtpu, Linux)")
    for variable, value in ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    from jax.experimental import topologies

    device = topologies.get_topology_desc(request.param, platform="tpu").devices[0]
    mesh = Mesh(np.array([device]), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    return NamedSharding(mesh, PartitionSpec())


def compiled(place, function, arguments, donated=()):
    """Compiled under shard_map, as the model's steps are, with row-major arguments and results."""
    typed = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), arguments
    )
    mapped = jax.shard_map(
        function, mesh=place.mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(),
        check_vma=False,
    )  # fmt: skip
    with jax.sharding.set_mesh(place.mesh):
        results = jax.eval_shape(mapped, *typed)
    results = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), results
    )
    typed = jax.tree.map(
        lambda a, f: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=f), typed, row_major(typed)
    )
    step = jax.jit(mapped, donate_argnums=donated, out_shardings=row_major(results))
    kind = place.mesh.devices.flat[0].device_kind
    done = step.lower(*typed).compile(compiler_options=COMPILER_OPTIONS.get(kind))
    memory = done.memory_analysis()
    print(f"\n{kind}: temporaries {memory.temp_size_in_bytes / 1e6:.3f} MB")
    assert "tpu_custom_call" in done.as_text()  # "auto" took the kernel
    return done, memory


def array(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def prefill(place, batch, length, heads, dtype=jnp.bfloat16, lower_bound=-5.0):
    """With q, k, v, z and o as projections have them, [B, T, H K]."""
    f32 = partial(array, dtype=jnp.float32)
    wide = array(batch, length, heads * D, dtype=dtype)
    arguments = [
        [wide] * 4, array(batch, length, heads, dtype=dtype), f32(heads), f32(heads, D),
        f32(batch, heads, D, D), array(batch, dtype=jnp.int32),
    ]  # fmt: skip

    def step(qkvz, b, A_log, dt_bias, state, lengths):
        qkvz = [x.reshape(batch, length, heads, D) for x in qkvz]
        o, state = kda_op.gated_kda(
            *qkvz, b, A_log, dt_bias, state, lower_bound=lower_bound, lengths_B=lengths
        )
        return o.reshape(batch, length, -1), state

    return compiled(place, step, arguments)


def test_names_of_generations(place):
    kind = place.mesh.devices.flat[0].device_kind
    assert kind in [kind for kind, _ in TOPOLOGIES.values()]
    assert target.is_tpu(kind)


@pytest.mark.parametrize("length", [1, 64, 4096])
@pytest.mark.parametrize("heads", [HEADS, HEADS // 8])
def test_prefill(place, length, heads):
    _, memory = prefill(place, 2, length, heads)
    assert memory.temp_size_in_bytes <= TEMPORARIES


def test_prefill_of_a_million_tokens(place):
    kind = place.mesh.devices.flat[0].device_kind
    (heads,) = (heads for name, heads in TOPOLOGIES.values() if name == kind)
    _, memory = prefill(place, 1, 1_048_576, heads)
    assert memory.temp_size_in_bytes <= TEMPORARIES


def test_prefill_in_float32_without_a_bound(place):
    _, memory = prefill(place, 1, 1000, 5, jnp.float32, None)
    assert memory.temp_size_in_bytes <= TEMPORARIES


@pytest.mark.parametrize(("length", "sequences"), [(100, 3), (4096, 16)])
@pytest.mark.parametrize("heads", [HEADS, HEADS // 8])
def test_packed_prefill(place, length, sequences, heads):
    """Lengths are traced. Rows move to whole chunks and back, states stay where they are."""
    f32 = partial(array, dtype=jnp.float32)
    arguments = [
        [array(1, length, heads * D)] * 4, array(1, length, heads), f32(heads), f32(heads, D),
        f32(sequences, heads, D, D), array(sequences, dtype=jnp.int32),
    ]  # fmt: skip

    def step(qkvz, b, A_log, dt_bias, state, lengths):
        qkvz = [x.reshape(1, length, heads, D) for x in qkvz]
        o, state = kda_op.gated_kda(
            *qkvz, b, A_log, dt_bias, state, lower_bound=-5.0, packed_lengths_N=lengths
        )
        return o.reshape(1, length, -1), state

    _, memory = compiled(place, step, arguments, donated=(4,))
    assert memory.alias_size_in_bytes >= sequences * heads * D * D * 4
    rows = num_chunks(sequences, length, 64) * 64
    padded = rows * (5 * heads + 1) * D * 2  # q, k, v, z, o, and b on 128 lanes
    # Measured: 1.1 MB more at most, with the table of rows (v5p).
    assert memory.temp_size_in_bytes <= padded + 2 * TEMPORARIES


def test_gradient(place):
    """The forward pass is the kernel, the backward pass the portable form: one program."""
    arguments = [[array(1, 128, 2, D)] * 4, array(1, 128, 2), array(2, D, dtype=jnp.float32)]

    def loss(qkvz, b, dt_bias):
        o, _ = kda_op.gated_kda(*qkvz, b, dt_bias[:, 0], dt_bias, lower_bound=-5.0)
        return jnp.sum(jnp.square(o.astype(jnp.float32)))

    compiled(place, jax.grad(loss, (0, 1, 2)), arguments)


@pytest.mark.parametrize(
    ("batch", "heads"), [(1, HEADS), (256, HEADS), (12, HEADS // 8), (512, HEADS // 8)]
)
def test_decode(place, batch, heads):
    """State and tails of a stack of layers stay where they are."""
    f32 = partial(array, dtype=jnp.float32)
    wide = array(batch, heads * D)
    arguments = [
        [wide] * 3, wide, array(batch, heads), wide, [f32(heads * D, 4)] * 3, f32(heads),
        f32(heads, D), f32(D), f32(LAYERS, batch, heads, D, D),
        array(LAYERS, 3, batch, 3, heads * D), array(batch, dtype=jnp.bool_),
        array(dtype=jnp.int32),
    ]  # fmt: skip

    def step(qkv, z, b, gate, conv, A_log, dt_bias, norm, state, tails, valid, slot):
        z, gate = (x.reshape(batch, heads, D) for x in (z, gate))
        o, state, tails = kda_op.kda_decode(
            tuple(qkv), z, b, gate, tuple(conv), A_log, dt_bias, norm, state, tails,
            lower_bound=-5.0, eps=EPS, valid_B=valid, slot=slot,
        )  # fmt: skip
        return o.reshape(batch, -1), state, tails

    done, memory = compiled(place, step, arguments, donated=(8, 9))
    stack = LAYERS * batch * heads * D * D * 4
    assert memory.alias_size_in_bytes >= stack + LAYERS * 3 * batch * 3 * heads * D * 2
    assert memory.temp_size_in_bytes <= TEMPORARIES
    shape = f"f32[{LAYERS},{batch},{heads},{D},{D}]"
    text = done.as_text()
    assert not [x for x in text.splitlines() if shape in x and (" copy(" in x or "slice(" in x)]
