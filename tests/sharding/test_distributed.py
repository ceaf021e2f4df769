"""Two processes of one program: the same logits as one, and each reads only what it holds."""

import socket
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import spread
from flax import nnx

import k3jax
from k3jax import checkpoint, programs
from sharding import resolve


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    module = spread.module()
    place = tmp_path_factory.mktemp("checkpoint")
    checkpoint.save(place, nnx.to_pure_dict(nnx.split(module)[1]), module.config)
    return place


def test_two_processes(folder, tmp_path):
    port, script = free_port(), Path(spread.__file__).with_name("distributed.py")
    outs = [tmp_path / f"{i}.npz" for i in range(2)]
    running = [
        subprocess.Popen(
            [sys.executable, str(script), str(port), str(i), str(folder), str(out)],
            stderr=subprocess.PIPE,
            text=True,
        )
        for i, out in enumerate(outs)
    ]
    for process in running:
        _, errors = process.communicate(timeout=600)
        assert process.returncode == 0, errors[-4000:]
    one, _ = k3jax.load(folder, dtype=jnp.float32, tokenizer=False)
    want = spread.run(one)
    layout = spread.layout("dp2xtp4")
    # A process has one half of the data axis and all of the model axis.
    held = 0
    for variable in programs.variables(one.module):
        halves = "data" in str(resolve.spec(layout, variable))
        held += variable.get_value().nbytes // (2 if halves else 1)
    for out in outs:
        with np.load(out) as got:
            spread.compare(got, want)
            assert held <= got["read"] <= 1.02 * held
