"""The vision tower of a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from k3jax import checkpoint
from k3jax.checkpoint import names, safetensors
from k3jax.checkpoint.plan import INDEX, SINGLE
from k3jax.config import Config
from k3jax.layers.vision import VisionTower
from k3jax.vision.encoder import Encoder
from k3jax.vision.preprocess import vision_of


def has_vision(directory: str | Path, config: Config) -> bool:
    """Whether vision tensors are stored there. The files must have been checked by a load."""
    index, single = Path(directory) / INDEX, Path(directory) / SINGLE
    if config.vision is None:
        return False
    if not index.is_file() and not single.is_file():
        return False  # a converted checkpoint: the text model alone
    if index.is_file():
        stored = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    else:
        stored = safetensors.read_header(single)
    return any(map(names.is_vision, stored))


def load_encoder(
    directory: str | Path,
    config: Config,
    *,
    dtype=jnp.bfloat16,
    layers: int | None = None,
    devices: Sequence[Any] | None = None,
) -> Encoder:
    """Loads ``vision_tower.*`` and ``mm_projector.*``.

    Args:
      config: of the whole checkpoint.
      dtype: of parameters and activations.
      layers: text shards beyond these layers may be absent.
      devices: of this process, to spread images over; None: the default device.
    Raises:
      CheckpointError: everything that is wrong; InputError: a text-only config.
    """
    graphdef, state = nnx.split(VisionTower.abstract(vision_of(config), dtype))
    params = checkpoint.load(
        directory, nnx.to_pure_dict(state), config, dtype=dtype, layers=layers, part="vision"
    )
    nnx.replace_by_pure_dict(state, params)
    mesh = None if devices is None else Mesh(np.array(devices), ("items",))
    return Encoder(nnx.merge(graphdef, state), mesh)
