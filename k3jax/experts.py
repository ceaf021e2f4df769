"""Copies of busy experts: from measured loads to a model whose devices share the work evenly."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from k3jax.config import Config
from k3jax.errors import InputError
from k3jax.model import EXPERT_WEIGHTS, Transformer
from sharding import Layout, resolve
from sharding.placement import Placement, propose


def with_copies(
    module: Transformer, loads_LE: np.ndarray | None, layout: Layout, mesh: Mesh
) -> Transformer:
    """The model with the ``extra_experts`` slots of a layout filled with copies of busy experts.

    The numbers it computes are the same; only the devices that compute them change.

    Args:
      module: on the layout, with one slot an expert.
      loads_LE: [MoE layers, experts], any unit, as `k3jax.train.balancing.loads` measures them;
        None for equal loads.
    Raises:
      InputError: loads of another shape, negative or not finite.
    """
    config, shards = module.config, layout.size(layout.experts)
    count = sum(spec.ffn == "moe" for spec in config.layers)
    shape = (count, config.moe.num_experts)
    loads_LE = np.ones(shape) if loads_LE is None else np.asarray(loads_LE)
    if loads_LE.shape != shape:
        raise InputError(f"expert loads of shape {loads_LE.shape}: expected {shape}")
    slots = config.moe.num_experts + layout.extra_experts
    try:
        placements = [propose(loads_E, slots, shards) for loads_E in loads_LE]
    except ValueError as error:
        raise InputError(str(error)) from None
    of_layer = dict(_placements(config, placements))

    new = Transformer.abstract(config, module.embed.dtype, extra_experts=layout.extra_experts,
                               compute_dtype=module.compute_dtype)  # fmt: skip
    old = dict(nnx.to_flat_state(nnx.split(module)[1]))
    graphdef, state = nnx.split(new)
    filled = {}
    for path, variable in nnx.to_flat_state(state):
        where = resolve.sharding(mesh, layout, variable)
        name, stack = path[-1], of_layer.get(path[:2], [])
        if name in ("copies", "slot_order"):
            value = np.stack([getattr(p, name) for p in stack])
            value = jax.device_put(value.reshape(variable.get_value().shape), where)
        else:
            value = old[path].get_value()
            if name in EXPERT_WEIGHTS:
                value = _expand(value, [p.logical_of_slot for p in stack], where)
        filled[path] = variable.replace(value)
    return nnx.merge(graphdef, nnx.from_flat_state(filled))


def _placements(config: Config, placements: list[Placement]) -> Iterator[tuple]:
    """((group, index), placements of its layers), a scanned layer having one a period."""
    groups: dict[tuple, list[Placement]] = {}
    moe = iter(placements)
    for layer, spec in enumerate(config.layers):
        if spec.ffn == "moe":
            group, index, _ = config.schedule.locate(layer)
            groups.setdefault((group, index), []).append(next(moe))
    yield from groups.items()


def _expand(value: jax.Array, slots: list[tuple[int, ...]], where) -> jax.Array:
    """[(layers,) E, out, in] -> [(layers,) S, out, in], on the devices of ``where``."""
    order = np.asarray(slots, np.int32)
    index = (order[0],) if value.ndim == 3 else (np.arange(len(order))[:, None], order)
    return jax.jit(lambda a: a.at[index].get(out_sharding=where))(value)
