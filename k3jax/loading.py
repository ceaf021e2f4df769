"""From a checkpoint folder or a preset name to a model and its tokenizer."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
from flax import nnx

from k3jax import checkpoint
from k3jax.config import Config, resolve
from k3jax.model import Transformer
from k3jax.runtime import Model
from k3jax.vision.loading import has_vision, load_encoder


def load(
    source: str | Path,
    *,
    dtype=jnp.bfloat16,
    shardings=None,
    layers=None,
    tokenizer=True,
    vision: bool | None = None,
):
    """Load a checkpoint in Moonshot's format.

    Args:
      source: a folder, or a preset that ships weights ("nano").
      dtype: of parameters and activations; what is float32 by definition stays float32, experts
        stay packed.
      shardings: ``f(path, shape, axes) -> jax.sharding.Sharding``, for arrays spread over devices;
        None puts everything on the default device.
      layers: load only the first so many layers.
      tokenizer: False skips the tokenizer and returns None in its place.
      vision: True loads the vision tower too and fails where there is none, False skips it; None
        loads it if the checkpoint has one and ``layers`` is not given.
    Returns:
      (`Model`, `Tokenizer`).
    Raises:
      ConfigError, CheckpointError: see `k3jax.checkpoint.safetensors.load`.
    """
    directory = resolve(source)
    config = Config.from_hf(directory)
    words = None
    if tokenizer:
        from k3jax.tokenizer import Tokenizer

        words = Tokenizer.load(directory, config)
    kept = config if layers is None else config.truncated(layers)
    graphdef, state = nnx.split(Transformer.abstract(kept, dtype))
    params = checkpoint.load(
        directory, nnx.to_pure_dict(state), config, dtype=dtype, shardings=shardings, layers=layers
    )
    nnx.replace_by_pure_dict(state, params)
    model = Model(nnx.merge(graphdef, state))
    if vision or (vision is None and layers is None and has_vision(directory, config)):
        model.vision = load_encoder(directory, config, dtype=dtype, layers=layers)
    return model, words
