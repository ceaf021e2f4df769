"""Programs for one device of each TPU generation, compiled without one."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sharding.compile import COMPILER_OPTIONS, ENVIRONMENT, row_major

TOPOLOGIES = {  # name: device kind
    "v5e:2x2": "TPU v5 lite",
    "v5p:2x2x1": "TPU v5",
    "v6e:2x2": "TPU v6 lite",
    "tpu7x:2x2x1": "TPU7x",
}

# Those that kernels of K3's are asked for.
LARGE = [name for name in TOPOLOGIES if not name.startswith("v5e")]


def one_device(topology: str) -> NamedSharding:
    """A mesh of one device of a generation, in the way that a step of the model has one."""
    pytest.importorskip("libtpu", reason="needs the extra aot (libtpu, Linux)")
    for variable, value in ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    from jax.experimental import topologies

    device = topologies.get_topology_desc(topology, platform="tpu").devices[0]
    mesh = Mesh(np.array([device]), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    return NamedSharding(mesh, PartitionSpec())


def kind_of(place: NamedSharding) -> str:
    return place.mesh.devices.flat[0].device_kind


def compiled(place, function, arguments, donated=(), kernels=1, free=()):
    """(program, its memory) compiled under shard_map, as the model's steps are, with row-major
    arguments, but for those at ``free``, which lie as the compiler likes. Results are row-major.
    "auto" must have taken ``kernels`` kernels at least.
    """
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
    typed = [
        x if i in free else jax.tree.map(
            lambda a, f: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=f), x, row_major(x)
        )
        for i, x in enumerate(typed)
    ]  # fmt: skip
    step = jax.jit(mapped, donate_argnums=donated, out_shardings=row_major(results))
    done = step.lower(*typed).compile(compiler_options=COMPILER_OPTIONS.get(kind_of(place)))
    memory = done.memory_analysis()
    print(f"\n{kind_of(place)}: temporaries {memory.temp_size_in_bytes / 1e6:.3f} MB")
    assert done.as_text().count('custom_call_target="tpu_custom_call"') >= kernels
    return done, memory


def array(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)
