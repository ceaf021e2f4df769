"""A tiny model on any layout, and what is compared between layouts.

`python spread.py CASE...` runs cases of `CASES` in a process of its own with 64 host devices, for
the layouts that the eight of the test process cannot hold.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = (
        "--xla_force_host_platform_device_count=64 --xla_backend_optimization_level=0"
    )

import jax
import numpy as np
import tiny
import tolerances as tol
from flax import nnx

from k3jax.experts import with_copies
from k3jax.runtime import Model
from sharding import AXES, Layout, make_mesh, resolve
from sharding.experts import FORMS

BATCH, LENGTHS, STEPS = 3, (21, 16, 12), 3
DP2_TP4 = {"mesh": {"data": 2, "model": 4}, "batch": ["data"], "heads": ["model"]}

CASES = {
    "dp2xtp4": {**DP2_TP4, "experts": ["data", "model"]},
    "tp8": {"mesh": {"model": 8}, "heads": ["model"], "experts": ["model"]},
    "ep8": {"mesh": {"data": 8}, "batch": ["data"], "experts": ["data"]},
    "ep7": {"mesh": {"data": 7}, "batch": ["data"], "experts": ["data"]},
    "striped-all": {
        **DP2_TP4, "experts": ["data", "model"], "cache_sequence": ["data", "model"],
    },
    "striped-heads": {
        **DP2_TP4, "experts": ["model"], "cache_sequence": ["model"], "embed": ["data"],
        "whole": ["latent"],
    },
    "striped-batch": {**DP2_TP4, "experts": ["data"], "cache_sequence": ["data"]},
    "dp2xep28": {
        "mesh": {"data": 2, "expert": 28}, "batch": ["data", "expert"], "experts": ["expert"],
    },
    "dp4xtp2xep8": {
        "mesh": {"data": 4, "model": 2, "expert": 8}, "batch": ["data", "expert"],
        "heads": ["model"], "experts": ["expert"],
    },
    "striped-64": {
        "mesh": {"data": 8, "model": 8}, "batch": ["data"], "heads": ["model"],
        "experts": ["model"], "cache_sequence": ["data", "model"],
    },
}  # fmt: skip


def layout(name: str, dispatch: str = "gather", extra_experts: int = 0) -> Layout:
    """A case as a layout; what goes with the heads does, but for ``whole``."""
    case = dict(CASES[name])
    mesh, whole, heads = case.pop("mesh"), case.pop("whole", []), case.get("heads", [])
    with_heads = ("head_count", "mlp", "shared_mlp", "vocab", "latent")
    rules = case | {axis: heads for axis in with_heads if axis not in whole}
    rules = {axis: over for axis, over in rules.items() if over}
    return Layout.from_dict(
        {
            "name": name,
            "why": "For a test.\nNothing more.",
            "chip": "cpu",
            "mesh": mesh,
            "rules": rules,
            "replicated": [axis for axis in AXES if axis not in rules],
            "dispatch": {"prefill": dispatch, "decode": dispatch},
            "extra_experts": extra_experts,
        }
    )


def module(dsa: bool = True):
    """Five layers, 56 experts, 8 heads of both kinds; weights drawn as the models' own."""
    config = tiny.config(dsa=dsa, initializer_range=0.02)
    moe = dataclasses.replace(config.moe, num_experts=56)
    mla = dataclasses.replace(config.mla, num_heads=8)
    return tiny.module(dataclasses.replace(config, moe=moe, mla=mla))


def spread(module, layout: Layout) -> Model:
    """The module's arrays on the first devices, as the layout says."""
    mesh = make_mesh(layout)
    graphdef, state = nnx.split(module)

    def place(variable):
        where = resolve.sharding(mesh, layout, variable)
        return variable.replace(jax.device_put(variable.get_value(), where))

    state = jax.tree.map(place, state, is_leaf=lambda v: isinstance(v, nnx.Variable))
    return Model(nnx.merge(graphdef, state), layout=layout, mesh=mesh)


def spread_copies(module, layout: Layout, loads) -> Model:
    """As `spread`, with copies of busy experts in the extra slots of the layout."""
    plain = spread(module, dataclasses.replace(layout, extra_experts=0))
    copied = with_copies(plain.module, loads, layout, plain.mesh)
    return Model(copied, layout=layout, mesh=plain.mesh)


def run(model: Model, forward: bool = True) -> dict[str, np.ndarray]:
    """Logits of a padded batch in one piece and what was chosen (``forward``, a third of the time),
    then prefill and greedy decode."""
    ids = tiny.tokens(BATCH, max(LENGTHS))
    cache = model.init_cache(BATCH, 64)
    last, cache = model.prefill(ids, cache, LENGTHS)
    steps, tokens = [np.asarray(last)], []
    for _ in range(STEPS):
        tokens.append(steps[-1].argmax(-1))
        last, cache = model.decode(tokens[-1], cache)
        steps.append(np.asarray(last))
    result = {"steps": np.stack(steps), "tokens": np.stack(tokens)}
    if forward:
        logits, chosen = model.forward(ids, lengths_B=LENGTHS, collect=("routing", "index"))
        names = [name for name in ("expert_ids", "selected") if name in chosen]
        result |= {"logits": logits, **{name: chosen[name] for name in names}}
    return {name: np.asarray(value) for name, value in result.items()}


def compare(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
    """Logits to a tolerance, decisions exactly; only at real tokens."""
    for b, length in enumerate(LENGTHS if "logits" in got else ()):
        error = np.abs(got["logits"][b, :length] - want["logits"][b, :length]).max()
        assert error <= tol.LAYOUT_FP32 * np.abs(want["logits"][b, :length]).max()
        for name in ("expert_ids", "selected"):
            if name in want:
                assert np.array_equal(got[name][:, b, :length], want[name][:, b, :length]), name
    assert (
        np.abs(got["steps"] - want["steps"]).max() <= tol.LAYOUT_FP32 * np.abs(want["steps"]).max()
    )
    assert np.array_equal(got["tokens"], want["tokens"])


def main():
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    one = module()
    want = run(Model(one))
    for case in sys.argv[1:]:
        name, form = case.split("/")
        compare(run(spread(one, layout(name, form)), forward=form == FORMS[0]), want)
        print(case, flush=True)


if __name__ == "__main__":
    main()
