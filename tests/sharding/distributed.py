"""One of two processes of four devices each: loads a checkpoint onto a layout and runs it.

`python distributed.py PORT PROCESS FOLDER OUT` writes logits, and how many bytes of shards it read.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"
)

import jax
import jax.numpy as jnp
import numpy as np
import spread

import k3jax
from k3jax.checkpoint import safetensors
from sharding import initialize


def main():
    port, process, folder, out = sys.argv[1:]
    initialize(f"127.0.0.1:{port}", 2, int(process))
    read, total = safetensors.Reader.read_into, []

    def count(self, buffer, offset):
        total.append(len(buffer))
        read(self, buffer, offset)

    safetensors.Reader.read_into = count
    layout = spread.layout("dp2xtp4", "ragged")
    model, _ = k3jax.load(folder, dtype=jnp.float32, layout=layout, tokenizer=False)
    assert len(jax.devices()) == 8
    assert len(jax.local_devices()) == 4
    result = spread.run(model)
    np.savez(out, read=np.int64(sum(total)), **result)


if __name__ == "__main__":
    main()
