"""Streamed load of a sharded checkpoint into (possibly sharded) arrays.

One parameter at a time: its buffer is allocated once, filled by exact reads from the shards, handed
to the device, and freed before the next. With a sharding the unit is one shard of a parameter, and
only the bytes of the shards of this process are read.
"""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from k3jax.checkpoint import names, safetensors, tree
from k3jax.checkpoint.fill import Faults, Filler, Piece, Region, allocate, region_of
from k3jax.checkpoint.plan import Plan, examine
from k3jax.checkpoint.progress import Progress, track
from k3jax.config import Config
from k3jax.errors import CheckpointError

log = logging.getLogger(__name__)
THREADS = 4  # reads in flight; more gained nothing on a local disk

Shardings = Callable[[names.Path, tuple[int, ...], Any], jax.sharding.Sharding | None]


def load(
    directory: str | Path,
    abstract_params: Mapping[Any, Any],
    config: Config,
    *,
    dtype: Any = None,
    shardings: Shardings | None = None,
    layers: int | None = None,
    strict_ignore: bool = False,
    progress: bool | Progress | None = None,
    part: Literal["text", "vision"] = "text",
) -> dict[Any, Any]:
    """Loads the text model, or the vision tower with its projector.

    Scales are read and checked before any other weight. Expert weights stay packed where the tree
    has ``w13_codes``, and are unpacked where it has ``w13``.

    Args:
      directory: holds ``model.safetensors.index.json`` and the shards.
      abstract_params: nested dictionary of leaves with ``.shape`` and ``.dtype`` (and perhaps
        ``.axes``), for the first ``layers`` layers if that is given.
      config: of the whole checkpoint.
      dtype: checked against the leaves that follow the model dtype; None takes what they say.
      shardings: ``(path, shape, axes or None) -> Sharding or None`` (None: the default device).
      layers: load only the first layers; other shards may be absent.
      strict_ignore: refuse entries of the quantisation lists that match nothing.
      progress: True, False, None for a bar on a terminal, or ``(done, total, parameter) -> None``.
      part: whose tree ``abstract_params`` is: Transformer's or VisionTower's.
    Returns:
      The tree of ``abstract_params`` with arrays.
    Raises:
      CheckpointError: everything that is wrong, in one report. What headers can show is reported
        before any data is read; bad scales before any other weight is.
    """
    directory = Path(directory)
    vision = part == "vision"
    plan = examine(directory, config, layers=layers, strict_ignore=strict_ignore, vision=vision)
    keys = tree.flatten(abstract_params)
    leaves = {tree.normal(path): leaf for path, leaf in keys.items()}
    form = tree.form_of(leaves) or plan.form
    problems = list(plan.problems)
    if vision and not plan.vision and not problems:
        problems.append("no vision_tower or mm_projector tensor is here: a text-only checkpoint")
    if form == "mxfp4" and plan.form == "dense" and not vision:
        problems.append("the experts are not packed; build the model with experts='dense'")
    table = names.vision_parameters(config) if vision else names.parameters(plan.config, form)
    problems += tree.compare(leaves, table, None if dtype is None else np.dtype(dtype))
    if problems:
        raise CheckpointError(str(directory), problems)
    for note in plan.notes:
        log.info("%s: %s", directory, note)
    specs = plan.vision if vision else plan.specs
    groups = _groups(plan, specs, unpack=form == "dense" and plan.form == "mxfp4")
    arrays: dict[names.Path, jax.Array | None] = {}
    faults = Faults()
    with _shards(directory) as readers, ThreadPoolExecutor(THREADS) as pool:
        filler = Filler(readers, faults)
        total = sum(_local_bytes(path, leaf, shardings) for path, leaf in leaves.items())
        with track(progress, total) as advance:
            order = sorted(groups, key=lambda path: (not _holds_scales(groups[path]), str(path)))
            for path in order:
                if faults.count and not _holds_scales(groups[path]):
                    break
                arrays[path] = _load_one(
                    path, leaves[path], groups[path], shardings, filler, faults, pool, advance
                )
    if faults.count:
        raise CheckpointError(str(directory), faults.report())
    return tree.unflatten({path: arrays[tree.normal(path)] for path in keys})


def _groups(
    plan: Plan, specs: dict[str, names.TensorSpec], *, unpack: bool
) -> dict[names.Path, list[Piece]]:
    """The tensors of every parameter; packed experts that are to be unpacked under one path."""
    groups: dict[names.Path, list[Piece]] = {}
    for name, spec in specs.items():
        assert spec.target is not None
        target, scale, scale_name = spec.target, None, ""
        if unpack and name.endswith(".weight_scale"):
            continue
        if unpack and name.endswith(".weight_packed"):
            scale_name = name.removesuffix("packed") + "scale"
            scale = plan.stored[scale_name]
            target = (*target[:-1], str(target[-1]).removesuffix("_codes"))
        piece = Piece(name, plan.stored[name], spec.index, scale, scale_name)
        groups.setdefault(target, []).append(piece)
    return groups


def _holds_scales(pieces: list[Piece]) -> bool:
    return pieces[0].scale is not None or pieces[0].name.endswith(".weight_scale")


@contextlib.contextmanager
def _shards(directory: Path) -> Iterator[Callable[[str], safetensors.Reader]]:
    """Readers by file name, opened once. ``setdefault`` keeps it safe under threads."""
    opened: dict[str, safetensors.Reader] = {}

    def reader(file: str) -> safetensors.Reader:
        if file not in opened:
            fresh = safetensors.Reader(directory / file)
            if opened.setdefault(file, fresh) is not fresh:
                fresh.close()
        return opened[file]

    try:
        yield reader
    finally:
        for one in opened.values():
            one.close()


def _regions(
    path: names.Path, leaf: Any, shardings: Shardings | None
) -> tuple[jax.sharding.Sharding | None, dict[Region, list[Any]]]:
    """Every distinct region this process needs, with the devices that hold it."""
    shape = tuple(leaf.shape)
    sharding = shardings(path, shape, getattr(leaf, "axes", None)) if shardings else None
    if sharding is None:
        return None, {region_of((), shape): [None]}
    regions: dict[Region, list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        regions.setdefault(region_of(index or (), shape), []).append(device)
    return sharding, regions


def _local_bytes(path: names.Path, leaf: Any, shardings: Shardings | None) -> int:
    _, regions = _regions(path, leaf, shardings)
    elements = sum(int(np.prod([b - a for a, b in region])) for region in regions)
    return elements * np.dtype(leaf.dtype).itemsize


def _load_one(
    path: names.Path,
    leaf: Any,
    pieces: list[Piece],
    shardings: Shardings | None,
    filler: Filler,
    faults: Faults,
    pool: ThreadPoolExecutor,
    advance: Callable[[int, str], object],
) -> jax.Array | None:
    shape, dtype = tuple(leaf.shape), np.dtype(leaf.dtype)
    sharding, regions = _regions(path, leaf, shardings)
    parts = []
    for region, devices in regions.items():
        buffer = allocate(tuple(b - a for a, b in region), dtype)

        def fill(piece: Piece, buffer=buffer, region=region) -> None:
            try:
                advance(filler.fill(buffer, region, piece, shape), names.join(path))
            except (safetensors.FormatError, OSError) as error:
                raise CheckpointError(str(piece.stored.file), [f"{piece.name}: {error}"]) from error

        list(pool.map(fill, pieces))
        if faults.count:
            continue
        for device in devices:
            parts.append(jax.device_put(buffer, device))
        jax.block_until_ready(parts)  # else the next buffer joins this one in host memory
        del buffer, fill
        gc.collect(0)  # JAX drops its hold on a host buffer at the next collection only
    if faults.count:
        return None
    if sharding is None:
        return parts[0]
    return jax.make_array_from_single_device_arrays(shape, sharding, parts)
