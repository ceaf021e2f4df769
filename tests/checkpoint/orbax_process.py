"""One process of several that convert and restore together; run by test_orbax.py.

Arguments: process, processes, devices a process, port, source, OUT to make or "-", folder to
restore, npz of the whole arrays to compare with. Prints the bytes it holds.
"""

import os
import sys

process, processes, devices, port, source, out, restored, expected = sys.argv[1:]
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"


def main() -> None:
    import jax
    import numpy as np
    from checkpoint_files import abstract
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    from k3jax.checkpoint import names, orbax, tree
    from k3jax.checkpoint.convert import convert
    from k3jax.config import Config

    jax.distributed.initialize(f"localhost:{port}", int(processes), int(process))
    mesh = jax.make_mesh((jax.device_count(),), ("all",), axis_types=(AxisType.Auto,))

    def rules(path, shape, axes):
        spec = [None] * len(shape)
        if str(path[-1]).split("_")[0] in ("w13", "w2"):
            spec[len(shape) - 3] = "all"
        elif shape[-1] % jax.device_count() == 0:
            spec[-1] = "all"
        return NamedSharding(mesh, PartitionSpec(*spec))

    if out != "-":
        convert(source, out)
    want = np.load(expected)
    params = tree.flatten(orbax.load(restored, abstract(Config.from_hf(restored)), rules))
    held = 0
    assert {names.join(path) for path in params} == set(want.files)
    for path, leaf in params.items():
        for shard in leaf.addressable_shards:
            held += shard.data.nbytes
            part = want[names.join(path)][shard.index]
            assert np.asarray(shard.data).tobytes() == part.tobytes(), path
    print("held", held)


main()
