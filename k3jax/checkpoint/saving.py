"""Writing a checkpoint in the published format: shards, index, config.json."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from k3jax.checkpoint import names, safetensors, tree
from k3jax.checkpoint.plan import INDEX, examine
from k3jax.checkpoint.progress import Progress, track
from k3jax.config import Config
from k3jax.errors import CheckpointError

MAX_SHARD_BYTES = 5 * 10**9


class _Host:
    """Host copies of one slice of one parameter at a time: a leaf may be many layers long."""

    def __init__(self, leaves: Mapping[names.Path, Any]):
        self._leaves = leaves
        self._key: tuple[Any, ...] | None = None
        self._value = np.empty(0)

    def get(self, spec: names.TensorSpec) -> np.ndarray:
        assert spec.target is not None
        index = spec.index
        stacked = spec.target[0] == "period"
        key = (spec.target, index[:1] if stacked else ())
        if key != self._key:
            leaf = self._leaves[spec.target]
            self._key, self._value = key, np.asarray(leaf[index[0]] if stacked else leaf)
        value = self._value[index[1:] if stacked else index]
        if str(spec.target[-1]) == "A_log":
            value = np.pad(value, (0, spec.shape[0] - len(value)))
        return value.reshape(spec.shape)


def _shards(
    specs: dict[str, names.TensorSpec], dtypes: dict[str, np.dtype], limit: int, least: int
) -> list[list[str]]:
    """Names by shard, layers in order, the rest last; data is aligned in every file."""
    last = max((spec.layer or 0 for spec in specs.values()), default=0) + 1
    order = sorted(specs, key=lambda n: last if specs[n].layer is None else specs[n].layer or 0)
    sizes = {name: specs[name].size * dtypes[name].itemsize for name in specs}
    total = sum(sizes.values())
    count = max(least, -(-total // limit))  # even shards, unless tensors are too big for that
    shards: list[list[str]] = [[]]
    used = written = 0
    for place, name in enumerate(order):
        due = written >= total * len(shards) / count or used + sizes[name] > limit
        if shards[-1] and (due or len(order) - place <= least - len(shards)):
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += sizes[name]
        written += sizes[name]

    def inside(name: str) -> tuple[Any, ...]:
        # widest dtype first, then one parameter after another so that each is fetched once
        spec = specs[name]
        assert spec.target is not None
        return -dtypes[name].itemsize, names.join(spec.target), spec.layer or 0, name

    return [sorted(shard, key=inside) for shard in shards]


def save(
    directory: str | Path,
    params: Mapping[Any, Any],
    config: Config,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    min_shards: int = 1,
    vision_from: str | Path | None = None,
    progress: bool | Progress | None = None,
) -> None:
    """Writes a checkpoint; a failure leaves the folder as it was.

    Everything goes to a temporary folder beside ``directory``, which then takes its place. Files
    that are not part of a checkpoint (tokenizer, model card) are kept. Weights are stored in the
    dtype they have; ``load(save(x))`` equals ``x`` bit for bit.

    Args:
      params: nested dictionary of arrays, as :func:`k3jax.checkpoint.load` returns it.
      config: written as ``config.json``; without a quantisation section if experts are plain.
      max_shard_bytes: a shard is closed before it grows beyond this (one tensor may).
      min_shards: at least this many shards, as far as there are tensors.
      vision_from: a checkpoint folder whose vision tensors are copied byte for byte.
    Raises:
      CheckpointError: parameters that do not fit ``config``, in one report.
    """
    directory = Path(directory).resolve()
    leaves = {tree.normal(path): leaf for path, leaf in tree.flatten(params).items()}
    form = tree.form_of(leaves) or names.expert_form(config)
    problems = tree.compare(leaves, names.parameters(config, form), None)
    vision = _vision(vision_from, config, problems)
    for path, leaf in leaves.items():
        if np.dtype(leaf.dtype) not in safetensors.CODE:
            problems.append(f"parameter {names.join(path)}: dtype {leaf.dtype} cannot be stored")
    if problems:
        raise CheckpointError(str(directory), problems)
    specs = {n: s for n, s in names.tensors(config, form).items() if s.target is not None}
    dtypes = {n: np.dtype(leaves[s.target].dtype) for n, s in specs.items() if s.target}
    shards = _shards(specs, dtypes, max_shard_bytes, min_shards)
    host = _Host(leaves)
    total = sum(specs[n].size * dtypes[n].itemsize for n in specs)
    directory.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        weight_map: dict[str, str] = {}
        count = len(shards) + bool(vision)
        with track(progress, total, "Saving") as advance:
            for i, shard in enumerate(shards):
                file = f"model-{i + 1:05d}-of-{count:06d}.safetensors"

                def stream(shard: list[str] = shard) -> Iterator[tuple[str, np.ndarray]]:
                    for name in shard:
                        value = host.get(specs[name])
                        yield name, value
                        advance(value.nbytes, names.join(specs[name].target or ()))

                header = safetensors.make_header((n, dtypes[n], specs[n].shape) for n in shard)
                safetensors.write(temporary / file, stream(), header)
                weight_map |= dict.fromkeys(shard, file)
        if vision:
            file = f"model-{count:05d}-of-{count:06d}.safetensors"
            header = safetensors.make_header((n, v.dtype, v.shape) for n, v in vision.items())
            safetensors.write(temporary / file, iter(vision.items()), header)
            weight_map |= dict.fromkeys(vision, file)
            total += sum(value.nbytes for value in vision.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        _write_json(temporary / INDEX, index)
        _write_json(temporary / "config.json", _config_json(config, form, dtypes))
        _swap(temporary, directory)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _vision(
    source: str | Path | None, config: Config, problems: list[str]
) -> dict[str, np.ndarray]:
    if source is None:
        return {}
    plan = examine(source, config)
    problems += plan.problems
    result: dict[str, np.ndarray] = {}
    for name, stored in plan.stored.items():
        if names.is_vision(name):
            value = np.empty(stored.entry.shape, safetensors.NUMPY[stored.entry.dtype])
            reader = safetensors.Reader(plan.directory / stored.file)
            try:
                reader.read_into(memoryview(value.reshape(-1).view(np.uint8)), stored.entry.start)
            finally:
                reader.close()
            result[name] = value
    return result


def _config_json(config: Config, form: str, dtypes: dict[str, np.dtype]) -> dict[str, Any]:
    values = config.to_hf()
    if form == "dense":
        values["text_config"].pop("quantization_config", None)
    dtype = dtypes[names.PREFIX + "model.embed_tokens.weight"].name
    values["dtype"] = values["text_config"]["dtype"] = dtype
    return values


def _write_json(path: Path, values: dict[str, Any]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        json.dump(values, file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def _swap(temporary: Path, directory: Path) -> None:
    """Puts ``temporary`` in the place of ``directory`` with two renames, undone if one fails."""
    os.chmod(temporary, 0o755)  # mkdtemp made it private
    if not directory.exists():
        temporary.rename(directory)
        return
    for entry in directory.iterdir():
        if entry.suffix == ".safetensors" or entry.name in (INDEX, "config.json"):
            continue
        if entry.is_dir():
            shutil.copytree(entry, temporary / entry.name, symlinks=True)
        else:
            shutil.copy2(entry, temporary / entry.name, follow_symlinks=False)
    old = temporary.with_name(temporary.name + ".old")
    directory.rename(old)
    try:
        temporary.rename(directory)
    except OSError:
        old.rename(directory)
        raise
    shutil.rmtree(old, ignore_errors=True)
