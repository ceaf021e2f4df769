"""Peak host memory of a load: two layers of K3's real tensor shapes, with fewer experts.

Writes a synthetic checkpoint (layer 0 with its dense FFN, layer 1 with LatentMoE) to a temporary
folder, loads it on the CPU and compares the peak of the resident set with the bound: what stays
resident plus 1.2 times the largest parameter in flight. On a CPU device the buffer of a parameter
becomes the array itself, so the floor is what stays resident.

    python benchmarks/load_memory.py [--experts 96] [--vocabulary 16384] [--divide 1] [--devices 1]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

CODES = 4 << 20  # random bytes drawn once and repeated


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--experts", type=int, default=96, help="of the 896")
    parser.add_argument("--vocabulary", type=int, default=16384, help="of the 163,840")
    parser.add_argument("--divide", type=int, default=1, help="divide every width by this")
    parser.add_argument("--devices", type=int, default=1, help="host devices; experts are sharded")
    parser.add_argument("--folder", type=Path, help="where the checkpoint goes; default temporary")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def shrink(config, options):
    """The first two layers with fewer experts, fewer tokens and perhaps narrower."""
    by = options.divide
    config = config.truncated(2)
    moe, kda = config.moe, config.kda
    return replace(
        config,
        vocab_size=options.vocabulary,
        hidden_size=config.hidden_size // by,
        intermediate_size=config.intermediate_size // by,
        vision=None,
        kda=replace(kda, num_heads=kda.num_heads // by),
        moe=replace(
            moe,
            num_experts=options.experts,
            latent_size=moe.latent_size // by // 32 * 32,
            intermediate_size=moe.intermediate_size // by // 32 * 32,
        ),
    )


def write(folder: Path, config) -> None:
    """One shard a layer and one for the rest, without ever holding more than a tensor."""
    import numpy as np

    from k3jax.checkpoint import names, safetensors

    random = np.random.default_rng(0)
    noise = random.integers(0, 256, CODES, np.uint8)
    table, weight_map, total = names.tensors(config), {}, 0

    def values(name, spec):
        raw = np.resize(noise, spec.nbytes)
        if name.endswith("_scale"):
            raw = 117 + raw % 4
        elif spec.dtype != np.uint8:  # clear an exponent bit: |x| < 2, always finite
            words = raw.view(f"u{spec.dtype.itemsize}")
            words &= ~words.dtype.type(1 << (8 * spec.dtype.itemsize - 2))
        return raw.view(spec.dtype).reshape(spec.shape)

    groups: dict[int | None, list[str]] = {}
    for name, spec in table.items():
        groups.setdefault(spec.layer, []).append(name)
        total += spec.nbytes
    for i, group in enumerate(groups.values()):
        file = f"model-{i + 1:05d}-of-{len(groups):06d}.safetensors"
        header = safetensors.make_header((n, table[n].dtype, table[n].shape) for n in group)
        stream = ((name, values(name, table[name])) for name in group)
        safetensors.write(folder / file, stream, header)
        weight_map |= dict.fromkeys(group, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config.to_hf()))


def memory(field: str) -> int:
    """Bytes of a line of /proc/self/status: VmRSS now, VmHWM at its highest."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {field} in /proc/self/status")


def measure(folder: Path, config, devices: int) -> dict[str, float]:
    import gc

    import jax
    import ml_dtypes
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    from k3jax.checkpoint import load, names, tree

    kinds = {"model": ml_dtypes.bfloat16, "float32": np.float32, "uint8": np.uint8}
    parameters = names.parameters(config)
    leaves = {p: jax.ShapeDtypeStruct(s.shape, kinds[s.kind]) for p, s in parameters.items()}
    shardings, copies = None, 1
    if devices > 1:
        mesh = jax.make_mesh((devices,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
        copies = devices

        def shardings(path, shape, axes):
            return NamedSharding(mesh, PartitionSpec("x") if "experts" in path else PartitionSpec())

    jax.device_put(np.zeros(4, np.float32)).block_until_ready()
    gc.collect()
    base = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again
    start = time.perf_counter()
    params = load(folder, tree.unflatten(leaves), config, shardings=shardings, progress=False)
    seconds = time.perf_counter() - start
    sizes = {path: leaf.nbytes for path, leaf in tree.flatten(params).items()}
    split = {path: size for path, size in sizes.items() if "experts" in path}
    # A CPU device takes a buffer over, so replicas on host devices share one copy.
    resident = sum(sizes.values())
    flight = {path: size // copies if path in split else size for path, size in sizes.items()}
    largest = max(flight, key=flight.__getitem__)
    peak = memory("VmHWM") - base
    return {
        "seconds": seconds,
        "bytes_per_second": resident / seconds,
        "resident": resident,
        "largest": flight[largest],
        "largest_name": names.join(largest),
        "peak": peak,
        "bound": resident + 1.2 * flight[largest],
        "beyond_resident": (peak - resident) / flight[largest],
    }


def main() -> int:
    options = arguments()
    flag = f"--xla_force_host_platform_device_count={options.devices}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}"
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from k3jax.config import Config

    config = shrink(Config.preset("kimi-k3"), options)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        write(Path(folder), config)
        result = measure(Path(folder), config, options.devices)
    if options.json:
        print(json.dumps(result))
        return int(result["peak"] > result["bound"])
    for key, value in result.items():
        if isinstance(value, str) or key in ("seconds", "beyond_resident"):
            print(f"{key:18} {value if isinstance(value, str) else round(value, 3)}")
        else:
            print(f"{key:18} {value / 1e9:.3f} GB")
    print("within the bound" if result["peak"] <= result["bound"] else "BEYOND the bound")
    return int(result["peak"] > result["bound"])


if __name__ == "__main__":
    sys.exit(main())
