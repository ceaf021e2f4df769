"""Layers, the links and a slice of the model on all GPUs of this host, against one of them.

    python -m benchmarks.multi_device [--sections links,moe] [--out FILE] [--small]

A row says whether the numbers equal those of one device (`ok`, `rms`), the time there and here,
the scaling efficiency t1 / (n tn), megabytes that a device sends and what they take at the measured
rates of the links, and the time that `k3jax plan` estimates. A section that fails says why, and the
next one runs. `--small` runs everything at toy sizes in float32, on host devices:

    JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=8 \\
        python -m benchmarks.multi_device --small
"""

from __future__ import annotations

import argparse
import datetime
import functools
import gc
import json
import os
import platform
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp

from benchmarks.harness.run import environment, versions
from benchmarks.multi_device import layers, links, whole
from benchmarks.multi_device.common import Bench, Side, Sizes
from k3jax.config import Config
from sharding import Layout

LAYOUT = "h200-2"  # its mesh axis takes all devices
MIB = 2**20


def toy(config: Config) -> Config:
    """Kimi K3.1 Pro with every width cut down, for at most eight devices."""
    assert config.dsa is not None
    return replace(
        config,
        vocab_size=256,
        hidden_size=64,
        intermediate_size=64,
        kda=replace(config.kda, num_heads=8, head_dim=16),
        mla=replace(
            config.mla,
            num_heads=8,
            q_lora_rank=32,
            kv_lora_rank=32,
            qk_nope_head_dim=16,
            qk_rope_head_dim=8,
            v_head_dim=16,
        ),
        dsa=replace(config.dsa, num_heads=2, head_dim=8, topk=16),
        moe=replace(
            config.moe,
            num_experts=56,
            num_experts_per_token=4,
            latent_size=64,
            intermediate_size=64,
        ),
        vision=None,
        bos_token_id=250,
        eos_token_id=251,
        pad_token_id=255,
        media_token_id=252,
    )


def sizes(small: bool) -> Sizes:
    full = Config.preset("kimi-k3.1-pro")
    if small:
        return Sizes(
            config=toy(full),
            dtype=jnp.float32,
            tolerance=1e-5,
            moe_tokens=(3,),
            batch=4,
            prompt=16,
            context=64,
            long_context=128,
            long_batches=(1,),
            buffers=(MIB,),
            layers=8,
            slice_experts=56,
        )
    return Sizes(
        config=full,
        dtype=jnp.bfloat16,
        tolerance=1e-2,
        moe_tokens=(64, 512, 4096),
        batch=64,
        prompt=4096,
        context=131_072,
        long_context=1_048_576,
        long_batches=(1, 8),
        buffers=(MIB // 16, 64 * MIB, 1024 * MIB),
        layers=12,  # a dense layer, one global layer more, and two periods
        slice_experts=224,
    )


def sections(bench: Bench) -> dict[str, Callable[[], None]]:
    small = toy(bench.sizes.config).truncated(8)
    return {
        "links": functools.partial(links.links, bench),
        "dispatch-check": functools.partial(links.dispatch_check, bench),
        "attention": functools.partial(layers.attention, bench),
        "striped": functools.partial(layers.striped, bench),
        "moe": functools.partial(layers.moe, bench),
        "slice": functools.partial(whole.sliced, bench),
        "float32": functools.partial(whole.exact, bench, small),
    }


NAMES = ("links", "dispatch-check", "attention", "striped", "moe", "slice", "float32")


def about(bench: Bench) -> dict:
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "versions": versions("nvidia-nccl-cu13"),
        "devices": [d.device_kind for d in bench.all.mesh.devices.flat],
        "layout": bench.all.layout.to_dict(),
        "environment": environment("XLA_FLAGS", "XLA_PYTHON_CLIENT_", "NCCL_", "JAX_"),
    }


def run(bench: Bench, chosen: Sequence[str], budget: float, save: Callable) -> list[dict]:
    """Runs sections in order; gives what failed or was left out, with the reason. What there is
    so far is saved after each."""
    begin, failed = time.perf_counter(), []
    for name, section in sections(bench).items():
        if name not in chosen:
            continue
        spent = time.perf_counter() - begin
        if spent > budget:
            failed.append({"section": name, "error": f"left out after {spent:.0f} s"})
            print(f"{name}: left out, {spent:.0f} s are over the budget", flush=True)
            continue
        try:
            section()
        except Exception as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
            failed.append({"section": name, "error": reason, "trace": traceback.format_exc()})
            print(f"{name}: FAILED: {reason}", flush=True)
        gc.collect()
        peak = max((d.memory_stats() or {}).get("peak_bytes_in_use", 0) for d in jax.devices())
        seconds = time.perf_counter() - begin - spent
        print(f"{name}: {seconds:.0f} s; peak so far {peak / 1e9:.1f} GB a device", flush=True)
        save(failed)
    return failed


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sections", default=",".join(NAMES), help="comma-separated")
    parser.add_argument("--devices", type=int, help="the first ones; all if left out")
    parser.add_argument("--small", action="store_true", help="toy sizes in float32")
    parser.add_argument("--budget", type=float, default=420, help="start no section after seconds")
    parser.add_argument("--out", type=Path, help="JSON; $OUT/multi-device.json if that is set")
    options = parser.parse_args(arguments)
    chosen = options.sections.split(",")
    if unknown := sorted(set(chosen) - set(NAMES)):
        parser.error(f"unknown sections {', '.join(unknown)}: there are {', '.join(NAMES)}")
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    layout = Layout.load(LAYOUT)
    count = options.devices or len(jax.devices())
    bench = Bench(sizes(options.small), Side.of(layout, 1), Side.of(layout, count))
    begin, info = time.perf_counter(), about(bench)
    kinds = ", ".join(sorted(set(info["devices"])))
    print(f"{count} x {kinds}; {info['versions']}; {info['date']}", flush=True)
    out = options.out
    if out is None and "OUT" in os.environ:
        out = Path(os.environ["OUT"]) / "multi-device.json"

    def save(failed):
        said = info | {"small": options.small, "seconds": time.perf_counter() - begin}
        if out is not None:
            text = json.dumps(said | {"rows": bench.rows, "failed": failed}, indent=1)
            out.write_text(text + "\n")

    failed = run(bench, chosen, options.budget, save)
    save(failed)
    wrong = [row["name"] for row in bench.rows if row.get("ok") is False]
    print(f"{len(bench.rows)} rows, {len(wrong)} beyond their tolerance, {len(failed)} failures")
    return bool(wrong or failed)


if __name__ == "__main__":
    raise SystemExit(main())
