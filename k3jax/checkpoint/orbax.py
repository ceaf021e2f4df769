"""Checkpoints of our own in Orbax: one Orbax checkpoint a group, one manifest over all of them.

A folder holds ``config.json``, tokenizer files, ``orbax/<group>/`` and the manifest. Parameters are
stored layer by layer, not stacked over periods: the first layers alone are then readable, and no
group is larger than the largest parameter of one layer. :mod:`k3jax.checkpoint.convert` writes it.
"""

from __future__ import annotations

import functools
import json
import os
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from k3jax.checkpoint import names, tree
from k3jax.checkpoint.loading import Shardings
from k3jax.checkpoint.progress import Progress, track
from k3jax.config import Config
from k3jax.errors import CheckpointError

MANIFEST = "k3jax-orbax.json"
FOLDER = "orbax"
FORMAT, VERSION = "k3jax-orbax", 1
CHECKED_BYTES = 1 << 20  # files up to this size are checked by checksum, longer ones by length


class Part(NamedTuple):
    """A parameter of one layer, or one outside the layers: the unit that is stored.

    Attributes:
      target: path of the model's parameter.
      period: its slice of the stacked parameter, None where nothing is stacked.
      shape: of the part, so without periods.
      kind: "model", "float32" or "uint8".
    """

    target: names.Path
    period: int | None
    shape: tuple[int, ...]
    kind: str


def parts(config: Config, form: str) -> dict[str, Part]:
    """Every stored part by its name, ``layers.3.attention.q_proj`` or ``embed``."""
    layer_at = {config.schedule.locate(layer): layer for layer in range(config.num_layers)}
    result = {}
    for target, spec in names.parameters(config, form).items():
        if target[0] not in ("head", "period", "tail"):
            result[names.join(target)] = Part(target, None, spec.shape, spec.kind)
            continue
        stacked = target[0] == "period"
        for period in range(config.schedule.num_periods) if stacked else (None,):
            layer = layer_at[(str(target[0]), int(target[1]), period)]
            shape = spec.shape[1:] if stacked else spec.shape
            name = names.join(("layers", layer, *target[2:]))
            result[name] = Part(target, period, shape, spec.kind)
    return result


def is_orbax(directory: str | Path) -> bool:
    """Whether a folder is in this format."""
    return (Path(directory) / MANIFEST).is_file()


@dataclass
class Manifest:
    """What a folder holds.

    Attributes:
      complete: False while a conversion is under way.
      source: what the files were when the conversion began: name -> [bytes, mtime in ns].
      arguments: of the conversion.
      form: "mxfp4" or "dense" experts.
      groups: finished groups: name -> {"parameters": {part: [dtype, shape]},
        "files": {name: [bytes, crc32]}}.
    """

    complete: bool
    source: dict[str, list[int]]
    arguments: dict[str, Any]
    form: str
    groups: dict[str, dict[str, Any]]


def read_manifest(directory: Path) -> Manifest:
    """Raises CheckpointError for a manifest that is not ours, cut, or of another version."""
    try:
        values = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
        if (values.pop("format"), values.pop("version")) != (FORMAT, VERSION):
            raise ValueError(f"is not version {VERSION} of {FORMAT}")
        manifest = Manifest(**values)
        if not isinstance(manifest.groups, dict):
            raise ValueError("has no groups")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = str(error)[:200]
        raise CheckpointError(str(directory), [f"{MANIFEST}: cannot be read: {reason}"]) from None
    return manifest


def files_of(folder: Path) -> dict[str, list[int]]:
    """Bytes and, for small files, CRC32 of every file of a group; 0 for large ones."""
    result = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        size = path.stat().st_size
        crc = zlib.crc32(path.read_bytes()) if size <= CHECKED_BYTES else 0
        result[path.relative_to(folder).as_posix()] = [size, crc]
    return result


def compare_files(directory: Path, group: str, entry: Mapping[str, Any]) -> list[str]:
    """What is missing or changed among the files of a group."""
    found, problems = files_of(directory / FOLDER / group), []
    for file, (size, crc) in entry["files"].items():
        name = f"{FOLDER}/{group}/{file}"
        if file not in found:
            problems.append(f"{name}: is missing")
        elif found[file][0] != size:
            problems.append(f"{name}: has {found[file][0]} bytes, {size} were written")
        elif found[file][1] != crc:
            problems.append(f"{name}: is corrupt, its checksum is not the one that was written")
    return problems


def checkpointer():
    """The one way groups are written and read.

    Uncompressed, since weights do not compress; not by way of pinned memory, since what is written
    is on the host already.
    """
    import orbax.checkpoint as ocp

    handler = ocp.PyTreeCheckpointHandler(
        use_ocdbt=True, use_compression=False, enable_pinned_host_transfer=False
    )
    return ocp.Checkpointer(handler)


def nested(values: Mapping[str, Any]) -> dict[Any, Any]:
    """The tree of a group: part names cut at their dots."""
    return tree.unflatten({tuple(name.split(".")): value for name, value in values.items()})


def reason_of(error: BaseException) -> str:
    """An error in a line: what the system said, where tensorstore quotes it."""
    if found := re.search(r"os_error_code='(\d+)'", str(error)):
        return os.strerror(int(found[1]))
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def load(
    directory: str | Path,
    abstract_params: Mapping[Any, Any],
    shardings: Shardings | None = None,
    dtype: Any = None,
    layers: int | None = None,
    *,
    progress: bool | Progress | None = None,
) -> dict[Any, Any]:
    """Restores the parameters under any sharding, on any number of processes.

    Every process reads the chunks that its devices hold a part of. A float parameter takes the
    dtype of its leaf; packed experts keep their bytes.

    Args:
      directory, abstract_params, dtype, layers, progress: as in :func:`k3jax.checkpoint.load`,
        but that packed experts stay packed.
      shardings: ``(path, shape, axes or None) -> Sharding or None`` (None: the default device).
        Stacked parameters need a NamedSharding that keeps the first dimension, or one device.
    Returns:
      The tree of ``abstract_params`` with arrays.
    Raises:
      CheckpointError: everything that is missing, damaged or of another model, in one report.
      ConfigError: the folder's config.json is refused.
    """
    directory = Path(directory)
    manifest = read_manifest(directory)
    if not manifest.complete:
        problem = "the conversion did not finish; run it again with the same arguments"
        raise CheckpointError(str(directory), [problem])
    config = Config.from_hf(directory)
    config = config if layers is None else config.truncated(layers)
    keys = tree.flatten(abstract_params)
    leaves = {tree.normal(path): leaf for path, leaf in keys.items()}
    form = tree.form_of(leaves) or manifest.form
    problems = []
    if form != manifest.form:
        problems.append(
            f"the experts are stored as {manifest.form!r}; build the model with "
            f"experts={manifest.form!r}"
        )
    problems += tree.compare(
        leaves, names.parameters(config, form), None if dtype is None else np.dtype(dtype)
    )
    wanted = parts(config, manifest.form)
    groups = _needed(manifest, wanted)
    problems += _compare_parts(groups, wanted, config)
    for group in groups:
        problems += compare_files(directory, group, manifest.groups[group])
    if problems:
        raise CheckpointError(str(directory), problems)
    placed = {path: _sharding(path, leaf, shardings) for path, leaf in leaves.items()}
    arrays = _restore(directory, groups, wanted, leaves, placed, progress)
    return tree.unflatten({path: arrays[tree.normal(path)] for path in keys})


def _needed(manifest: Manifest, wanted: Mapping[str, Part]) -> dict[str, dict[str, Any]]:
    """The groups that hold a wanted part, and their parts."""
    every = {name: entry["parameters"] for name, entry in manifest.groups.items()}
    return {name: held for name, held in every.items() if not wanted.keys().isdisjoint(held)}


def _compare_parts(
    groups: Mapping[str, Mapping[str, Any]], wanted: Mapping[str, Part], config: Config
) -> list[str]:
    held = {name: entry for entries in groups.values() for name, entry in entries.items()}
    problems = [f"{name}: is missing" for name in wanted if name not in held]
    for name, (dtype, shape) in held.items():
        part = wanted.get(name)
        if part is None:
            problems.append(f"{name}: is not a parameter of config.json")
            continue
        if tuple(shape) != part.shape:
            problems.append(
                f"{name}: shape is {shape}, config.json needs {list(part.shape)} "
                f"({config.num_layers} layers)"
            )
        kind = "float" if part.kind == "model" else part.kind
        if (dtype != kind) if kind != "float" else (jnp.dtype(dtype).kind in "iub"):
            problems.append(f"{name}: dtype is {dtype}, must be {kind}")
    return sorted(problems)


def _sharding(path: names.Path, leaf: Any, shardings: Shardings | None) -> Sharding:
    shape = tuple(leaf.shape)
    sharding = shardings(path, shape, getattr(leaf, "axes", None)) if shardings else None
    if sharding is None:
        return jnp.zeros(()).sharding  # what the default device is now
    sharding.shard_shape(shape)  # JAX refuses what does not divide
    return sharding


def slice_sharding(path: names.Path, sharding: Sharding) -> Sharding:
    """The sharding of one period of a stacked parameter. Raises CheckpointError if it has none."""
    if isinstance(sharding, SingleDeviceSharding):
        return sharding
    if isinstance(sharding, NamedSharding) and not any(sharding.spec[:1]):
        spec = PartitionSpec(*sharding.spec[1:])
        return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)
    problem = f"{sharding} splits the periods; only later dimensions of a parameter can be split"
    raise CheckpointError(names.join(path), [problem])


def _restore(
    directory: Path,
    groups: Mapping[str, Mapping[str, Any]],
    wanted: Mapping[str, Part],
    leaves: Mapping[names.Path, Any],
    placed: Mapping[names.Path, Sharding],
    progress: bool | Progress | None,
) -> dict[names.Path, jax.Array]:
    import orbax.checkpoint as ocp

    arrays: dict[names.Path, jax.Array] = {}
    total = sum(_local_bytes(leaves[path], placed[path]) for path in leaves)
    with checkpointer() as reader, track(progress, total) as advance:
        for group, held in groups.items():
            arguments = {}
            for name in held:
                part = wanted[name]
                sharding = placed[part.target]
                if part.period is not None:
                    sharding = slice_sharding(part.target, sharding)
                dtype = np.dtype(leaves[part.target].dtype)
                arguments[name] = ocp.ArrayRestoreArgs(
                    restore_type=jax.Array, dtype=dtype, sharding=sharding, global_shape=part.shape
                )
            args = ocp.args.PyTreeRestore(
                item=nested(dict.fromkeys(arguments, 0)), restore_args=nested(arguments)
            )
            try:
                restored = reader.restore((directory / FOLDER / group).resolve(), args=args)
            except Exception as error:  # tensorstore and Orbax raise many kinds
                problem = f"{FOLDER}/{group}: cannot be restored: {reason_of(error)}"
                raise CheckpointError(str(directory), [problem]) from error
            flat = {".".join(path): leaf for path, leaf in tree.flatten(restored).items()}
            _place(flat, wanted, leaves, placed, arrays)
            for name, leaf in flat.items():
                advance(_local_bytes(leaf, leaf.sharding), name)
    return arrays


def _place(
    flat: Mapping[str, jax.Array],
    wanted: Mapping[str, Part],
    leaves: Mapping[names.Path, Any],
    placed: Mapping[names.Path, Sharding],
    arrays: dict[names.Path, jax.Array],
) -> None:
    """Takes arrays over, or writes them into their slices of the stacked parameters in place."""
    stacked, period = [], 0
    for name, leaf in flat.items():
        part = wanted[name]
        if part.period is None:
            arrays[part.target] = leaf
            continue
        stacked.append((part.target, leaf))
        period = part.period  # a group lies within one layer
    if not stacked:
        return
    for path, _ in stacked:
        if path not in arrays:
            spec = leaves[path]
            arrays[path] = jnp.zeros(spec.shape, spec.dtype, device=placed[path])
    update = _updater(tuple(placed[path] for path, _ in stacked))
    whole = update([arrays[path] for path, _ in stacked], [leaf for _, leaf in stacked], period)
    arrays |= {path: leaf for (path, _), leaf in zip(stacked, whole, strict=True)}


@functools.lru_cache(maxsize=64)
def _updater(shardings: tuple[Sharding, ...]):
    """One program for all parameters of a group; the stacked arrays are updated in place."""

    def update(stacks, slices, period):
        return [
            jax.lax.dynamic_update_index_in_dim(stack, part, period, 0)
            for stack, part in zip(stacks, slices, strict=True)
        ]

    return jax.jit(update, donate_argnums=0, out_shardings=list(shardings))


def _local_bytes(leaf: Any, sharding: Sharding) -> int:
    shape = tuple(leaf.shape)
    regions = {str(i) for i in sharding.addressable_devices_indices_map(shape).values()}
    size = int(np.prod(sharding.shard_shape(shape), dtype=np.int64))
    return len(regions) * size * np.dtype(leaf.dtype).itemsize


def group_parts(sizes: Mapping[str, int], limit: int) -> Iterator[tuple[str, list[str]]]:
    """Part names by group: within a layer, as many as ``limit`` bytes hold, but one at least."""
    by_layer: dict[str, list[str]] = {}
    for name in sizes:
        first, *rest = name.split(".")
        layer = f"layer-{int(rest[0]):05d}" if first == "layers" else "outside"
        by_layer.setdefault(layer, []).append(name)
    for layer, members in sorted(by_layer.items()):
        group, used, count = [], 0, 0
        for name in sorted(members):
            if group and used + sizes[name] > limit:
                yield f"{layer}.{count}", group
                group, used, count = [], 0, count + 1
            group.append(name)
            used += sizes[name]
        yield f"{layer}.{count}", group
