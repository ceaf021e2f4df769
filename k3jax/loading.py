"""From a checkpoint folder or a preset name to a model and its tokenizer."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from k3jax import checkpoint, programs
from k3jax.checkpoint.tree import normal
from k3jax.config import Config, resolve
from k3jax.experts import with_copies
from k3jax.model import Transformer
from k3jax.runtime import Model
from k3jax.vision.loading import has_vision, load_encoder
from sharding import Layout, make_mesh
from sharding import resolve as arrays


def load(
    source: str | Path,
    *,
    dtype=jnp.bfloat16,
    layout: Layout | str | Path | None = None,
    mesh: Mesh | None = None,
    expert_loads=None,
    layers: int | None = None,
    tokenizer: bool = True,
    vision: bool | None = None,
):
    """Load a checkpoint in Moonshot's format, or one that `k3jax convert` wrote.

    Args:
      source: a folder, or a preset that ships weights ("nano").
      dtype: of parameters and activations; what is float32 by definition stays float32, experts
        stay packed.
      layout: how the model is spread over devices: a `sharding.Layout`, its file, or the name of a
        shipped one. Each process reads only what its devices hold. None: the default device.
      mesh: the layout's mesh; `sharding.make_mesh` of all devices if None.
      expert_loads: [MoE layers, experts], measured; which experts get the layout's extra slots.
      layers: load only the first so many layers.
      tokenizer: False skips the tokenizer and returns None in its place.
      vision: True loads the vision tower too and fails where there is none, False skips it; None
        loads it if the checkpoint has one and ``layers`` is not given.
    Returns:
      (`Model`, `Tokenizer`).
    Raises:
      ConfigError, CheckpointError: see `k3jax.checkpoint.load`.
      LayoutError: the layout is not legal, or the model does not divide over it; nothing is read.
    """
    directory = resolve(source)
    config = Config.from_hf(directory)
    words = None
    if tokenizer:
        from k3jax.tokenizer import Tokenizer

        words = Tokenizer.load(directory, config)
    kept = config if layers is None else config.truncated(layers)
    module = Transformer.abstract(kept, dtype)
    graphdef, state = nnx.split(module)
    shardings = None
    if layout is not None:
        layout = layout if isinstance(layout, Layout) else Layout.load(layout)
        plain = dataclasses.replace(layout, extra_experts=0)
        programs.check(kept, module, plain)
        mesh = mesh or make_mesh(layout)
        shardings = _shardings(state, plain, mesh)
    params = checkpoint.read(
        directory, nnx.to_pure_dict(state), config, dtype=dtype, shardings=shardings, layers=layers
    )
    nnx.replace_by_pure_dict(state, params)
    module = nnx.merge(graphdef, state)
    if layout is not None and mesh is not None and layout.extra_experts:
        module = with_copies(module, expert_loads, layout, mesh)
    model = Model(module, layout=layout, mesh=mesh)
    if vision or (vision is None and layers is None and has_vision(directory, config)):
        # Each process encodes on its own devices, so that all have the features.
        devices = mesh.local_devices if layout is not None and mesh is not None else None
        model.vision = load_encoder(directory, config, dtype=dtype, layers=layers, devices=devices)
    return model, words


def _shardings(state: nnx.State, layout: Layout, mesh: Mesh):
    """Where the loader puts each parameter: ``(path, shape, axes) -> Sharding``."""
    axes = {normal(path): variable.axes for path, variable in nnx.to_flat_state(state)}

    def sharding(path, shape, _):
        leaf = arrays.Leaf(shape, None, axes[normal(path)])
        return arrays.sharding(mesh, layout, leaf)

    return sharding
