"""The training recipe: a yaml file read into frozen dataclasses, unknown keys refused by name."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from pathlib import Path

import yaml

from k3jax.errors import ConfigError


@dataclass(frozen=True)
class DataSettings:
    """What is read, what is held out, how it is tokenised.

    Attributes:
      bpe_ranks: size of the byte-pair vocabulary; the 256 special ids follow it.
      heldout: module or package names whose figure is reported, never trained or selected on.
      dev: module or package names that choose the checkpoint.
      exclude: globs on the path below the library root (machine-made tables, broken sources).
    """

    bpe_ranks: int
    heldout: tuple[str, ...]
    dev: tuple[str, ...]
    exclude: tuple[str, ...] = ()


@dataclass(frozen=True)
class OptimizerSettings:
    """Learning rate shape and the two optimisers.

    The rate rises linearly for ``warmup_steps``, stays at ``learning_rate``, and falls as a half
    cosine to ``final_fraction`` of it over the last ``decay_fraction`` of all steps.
    """

    learning_rate: float
    name: str = "muon"  # "muon": matrices by Per-Head Muon, the rest by AdamW; "adamw": all AdamW
    adam_learning_rate: float | None = None  # of the AdamW group; None: learning_rate
    warmup_steps: int = 100
    decay_fraction: float = 1.0
    final_fraction: float = 0.05
    weight_decay: float = 0.1
    b1: float = 0.9
    b2: float = 0.95
    momentum: float = 0.95
    clip_norm: float = 1.0

    def __post_init__(self):
        if self.name not in ("muon", "adamw"):
            raise ConfigError(f"optimizer.name: {self.name!r} is neither 'muon' nor 'adamw'")
        if not 0 < self.decay_fraction <= 1:
            raise ConfigError(f"optimizer.decay_fraction: {self.decay_fraction} is outside (0, 1]")


@dataclass(frozen=True)
class TrainSettings:
    """One training run. Sizes are in tokens and optimiser steps, times in seconds.

    Attributes:
      model: path of the model's config.json; a relative path starts at the yaml's folder.
      dense_attention_fraction: share of all steps in which global layers attend to every position
        while the indexer learns from them; the selected positions are used after that.
      index_loss_weight: factor of the indexer's loss. Its inputs carry no gradient into the rest of
        the model, so this scales the indexer's own learning only.
      balance_form: "exact" sorts tokens for the router quantiles, "histogram" counts all of them in
        bins, which devices add up (`k3jax.train.balancing`).
      balance_tokens: tokens of the batch that enter the exact quantiles (the sort is O(n log n)).
      balance_momentum: weight of the old router bias in each update; 0 is the published form.
      patience: evaluations without a better dev figure before the run stops; 0 never stops.
    """

    model: str
    data: DataSettings
    optimizer: OptimizerSettings
    batch_size: int
    sequence_length: int
    steps: int
    seed: int = 0
    dtype: str = "bfloat16"
    remat: bool = False
    quantize_experts: bool = True
    dense_attention_fraction: float = 0.0
    index_loss_weight: float = 0.0
    balance_form: str = "exact"
    balance_tokens: int = 8192
    balance_momentum: float = 0.9
    eval_interval: int = 200
    eval_context: int = 1024
    eval_stride: int = 512
    eval_batch: int = 32
    log_interval: int = 20
    save_interval: int = 500
    patience: int = 0

    def __post_init__(self):
        if self.dtype not in ("float32", "bfloat16"):
            raise ConfigError(f"dtype: {self.dtype!r} is neither 'float32' nor 'bfloat16'")
        if self.balance_form not in ("exact", "histogram"):
            raise ConfigError(
                f"balance_form: {self.balance_form!r} is neither 'exact' nor 'histogram'"
            )
        if not 0 < self.eval_stride <= self.eval_context:
            raise ConfigError(
                f"eval_stride: {self.eval_stride} is outside 1..eval_context ({self.eval_context})"
            )
        for name in ("batch_size", "sequence_length", "steps", "eval_interval", "log_interval"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: {getattr(self, name)} is below 1")


def _build(cls, values: object, where: str):
    if not isinstance(values, dict):
        raise ConfigError(f"{where or 'training recipe'}: {values!r} is not a mapping")
    known = {f.name: f for f in fields(cls)}
    unknown = sorted(set(map(str, values)) - set(known))
    if unknown:
        raise ConfigError(f"{where}{unknown[0]}: unknown key (known: {', '.join(known)})")
    nested = {"data": DataSettings, "optimizer": OptimizerSettings}
    result = {}
    for name, value in values.items():
        kind = str(known[name].type)
        if name in nested and cls is TrainSettings:
            value = _build(nested[name], value, f"{name}.")
        elif kind.startswith("tuple"):
            if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
                raise ConfigError(f"{where}{name}: {value!r} is not a list of strings")
            value = tuple(value)
        elif kind in ("bool", "str", "int"):
            if type(value).__name__ != kind:
                raise ConfigError(f"{where}{name}: {value!r} is not of type {kind}")
        elif value is not None or "None" not in kind:
            try:
                value = float(str(value))  # yaml reads 3e-4 as a string
            except (TypeError, ValueError):
                raise ConfigError(f"{where}{name}: {value!r} is not a number") from None
        result[name] = value
    missing = [n for n, f in known.items() if f.default is MISSING and n not in values]
    if missing:
        raise ConfigError(f"{where}{missing[0]}: required and missing")
    return cls(**result)


def load_settings(path: str | Path) -> TrainSettings:
    """Reads a training recipe. ``model`` comes back as a path that stands by itself.

    Raises:
      ConfigError: the file is absent, is no yaml mapping, or holds an unknown, missing or
        ill-typed key, which is named.
    """
    path = Path(path)
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"training recipe {path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"training recipe {path}: not yaml ({error})") from None
    if isinstance(values, dict) and isinstance(values.get("model"), str):
        values["model"] = str((path.parent / values["model"]).resolve())
    return _build(TrainSettings, values, "")
