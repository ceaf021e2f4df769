"""Time of the vision tower at K3's size (401 M + 46 M random weights), and its floor.

    python benchmarks/vision.py                                   # the GPU table
    python benchmarks/vision.py --sizes 1792 --counts 1 --repeats 0   # memory on a CPU

Square images go through `k3jax.vision.Encoder` from pixels on the host to features on the host; a
second column is the device alone. Floor: the larger of FLOPs / 790 TFLOP/s and bytes / 4.28 TB/s,
what one H200 reaches in bf16, counted on the real patches (padding is not work). The share says
how much of the device time that is. The features must be finite.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import resource
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from k3jax.config import Config
from k3jax.generate.timing import CompileClock
from k3jax.layers.vision import VisionTower
from k3jax.vision import Encoder, Item
from k3jax.vision.cost import flops, moved_bytes, parameters
from k3jax.vision.encoder import bucket
from k3jax.vision.preprocess import grid_of

FLOPS_PER_SECOND = 790e12  # H200, bf16, measured on large products
BYTES_PER_SECOND = 4.28e12  # H200, measured
SIZES, COUNTS = (1024, 3584), (1, 16)


def vision_config():
    config = Config.preset("kimi-k3").vision
    assert config is not None
    return config


def square(side: int, seed: int) -> Item:
    """A square image of noise, already cut into patches."""
    config = vision_config()
    grid = grid_of(side, side, config)
    noise = np.random.default_rng(seed).integers(
        0, 256, (grid[1] * grid[2], config.patch_width), np.uint8
    )
    return Item(f"image {seed}", side, side, (side, side), grid, config.merge, noise)


def encoder(implementation: str = "auto", dtype=jnp.bfloat16) -> Encoder:
    tower = VisionTower(vision_config(), nnx.Rngs(0), dtype=dtype, implementation=implementation)
    return Encoder(tower)


def best(run, repeats: int) -> float:
    """Seconds of the quickest of ``repeats`` runs; of the first, without compiling, if 0."""
    with CompileClock() as clock:
        begin = time.perf_counter()
        run()
        end = time.perf_counter()
        first = end - begin - clock.seconds(begin, end)
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return min(times, default=first)


def rows(
    sizes: Sequence[int] = SIZES,
    counts: Sequence[int] = COUNTS,
    repeats: int = 3,
    implementation: str = "auto",
    dtype=jnp.bfloat16,
) -> list[dict]:
    """One dictionary a size and count; times in milliseconds."""
    config, model, result = vision_config(), encoder(implementation, dtype), []
    for side in sizes:
        items = [square(side, seed) for seed in range(max(counts))]
        grid, size = items[0].grid, bucket(len(items[0].patches_NP))
        for count in counts:
            features: list[np.ndarray] = []

            def whole(count=count, items=items, features=features):
                features[:] = model(items[:count])

            whole_s, device_s = best(whole, repeats), None
            if repeats:
                staged = [jax.device_put(model.stage(size, [item])) for item in items[:count]]
                jax.block_until_ready(staged)

                def device(staged=staged):
                    jax.block_until_ready([model.run(*arrays) for arrays in staged])

                device_s = best(device, repeats)
                del staged, device
            work, moved = count * flops(config, grid), moved_bytes(config, grid)
            moved += (count - 1) * (moved - sum(parameters(config)) * 2)  # weights once
            floor = max(work / FLOPS_PER_SECOND, moved / BYTES_PER_SECOND)
            result.append(
                {
                    "image": f"{side} x {side}",
                    "count": count,
                    "patches": grid[1] * grid[2],
                    "bucket": size,
                    "tokens": items[0].tokens,
                    "tflop": work / 1e12,
                    "floor_ms": 1e3 * floor,
                    "device_ms": None if device_s is None else 1e3 * device_s,
                    "whole_ms": 1e3 * whole_s,
                    "share": None if device_s is None else floor / device_s,
                    "finite": bool(all(np.isfinite(f.astype(np.float32)).all() for f in features)),
                    "host_peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
                    "implementation": implementation,
                }
            )
    return result


def disagreement(side: int = 1024) -> float:
    """rms of the difference between "auto" and "xla" over the standard deviation of "xla"."""
    item = square(side, 0)
    a, b = (encoder(form)([item])[0].astype(np.float32) for form in ("auto", "xla"))
    return float(np.sqrt(np.mean((a - b) ** 2)) / b.std())


def environment() -> dict:
    """What the numbers belong to."""
    device = jax.devices()[0]
    return {
        "date": datetime.date.today().isoformat(),
        "device": device.device_kind,
        "jax": jax.__version__,
        "platform": getattr(device.client, "platform_version", "").replace("\n", " ").strip(),
        "python": platform.python_version(),
        "parameters": sum(parameters(vision_config())),
    }


def show(table: list[dict]) -> None:
    def cell(value) -> str:
        if value is None:
            return "-"
        return (
            f"{value:.3g}"
            if isinstance(value, float) and value < 10
            else (f"{value:.1f}" if isinstance(value, float) else str(value))
        )

    cells = [list(table[0])] + [[cell(value) for value in row.values()] for row in table]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        print("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="pixels a side")
    parser.add_argument("--counts", type=int, nargs="+", default=list(COUNTS))
    parser.add_argument("--repeats", type=int, default=3, help="0: time the first call")
    parser.add_argument("--implementation", default="auto", help="auto, xla or cudnn")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    table = rows(
        options.sizes,
        options.counts,
        options.repeats,
        options.implementation,
        jnp.dtype(options.dtype),
    )
    report = {**environment(), "rows": table}
    if jax.default_backend() == "gpu" and options.implementation == "auto":
        report["auto_against_xla_rms"] = disagreement()
    if options.json:
        print(json.dumps(report))
        return
    for name, value in report.items():
        if name != "rows":
            print(f"{name}: {value}")
    show(table)
    if not all(row["finite"] for row in table):
        raise SystemExit("features are not finite")


if __name__ == "__main__":
    main()
