"""What every shipped layout makes of Kimi K3.1 Pro, as files to review.

`python -m tests.sharding.golden_layouts` in the root of the repository writes them anew.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.cache import state
from k3jax.config import Config
from k3jax.model import Transformer
from sharding import Layout, resolve

GOLDEN = Path(__file__).parent / "golden"
MODEL = "kimi-k3.1-pro"
COMMAND = "python -m tests.sharding.golden_layouts"


@functools.cache
def parameters(model: str) -> Mapping[str, resolve.Leaf]:
    """The parameters of a preset by dotted name."""
    tree = Transformer.abstract(Config.preset(model))
    return resolve.named(tree)


@functools.cache
def caches(model: str, batch: int, length: int) -> Mapping[str, resolve.Leaf]:
    """The decode state of ``batch`` sequences by dotted name."""
    make = functools.partial(state.empty, Config.preset(model), batch, length, jnp.bfloat16)
    leaves = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(jax.eval_shape(make)):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        axes = state.AXES[name.rsplit(".", 1)[-1]]
        stacked = len(leaf.shape) > len(axes)
        leaves["cache." + name] = resolve.Leaf(
            tuple(leaf.shape), leaf.dtype, ("layers",) * stacked + axes
        )
    return leaves


def workload(name: str) -> tuple[int, int]:
    """Sequences and tokens of the caches in the golden file of a layout."""
    return (8, 1_048_576) if name.endswith("-long") else (64, 131_072)


def leaves(name: str) -> dict[str, resolve.Leaf]:
    return {**parameters(MODEL), **caches(MODEL, *workload(name))}


def render(name: str) -> str:
    """The golden file of a layout: one line for arrays of equal name and description."""
    layout = Layout.load(name)
    arrays = resolve.stored(layout, leaves(name))
    resolve.check(layout, arrays)
    total, groups = 0, {}
    for full, leaf in arrays.items():
        *places, last = full.split(".")
        at = max((i for i, part in enumerate(places) if part.isdecimal()), default=-1) + 1
        size = resolve.bytes_per_device(layout, leaf)
        total += size
        line = {
            "array": ".".join([*places[at:], last]),
            "dtype": np.dtype(leaf.dtype).name,
            "shape": leaf.shape,
            "axes": leaf.axes,
            "spec": [
                [p] if isinstance(p, str) else list(p or ()) for p in resolve.spec(layout, leaf)
            ],
            "local_shape": resolve.local_shape(layout, leaf),
            "bytes_per_device": size,
        }
        groups.setdefault(json.dumps(line), []).append(".".join(places[:at]))
    lines = [
        f'{line[:-1]}, "in": {json.dumps(" ".join(places))}}}' for line, places in groups.items()
    ]
    batch, length = workload(name)
    head = {
        "layout": name, "model": MODEL, "batch": batch, "length": length, "bytes_per_device": total,
    }  # fmt: skip
    return json.dumps(head)[:-1] + ', "arrays": [\n' + ",\n".join(lines) + "\n]}\n"


def main():
    for old in GOLDEN.glob("*.json"):
        old.unlink()
    for name in Layout.shipped():
        (GOLDEN / f"{name}.json").write_text(render(name))


if __name__ == "__main__":
    main()
