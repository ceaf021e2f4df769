"""From the published safetensors format to Orbax, one group at a time, resumable.

Everything is written to ``OUT.partial``; the manifest there names the finished groups and what the
source was. The last step is a rename, so ``OUT`` is whole or absent.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec, Sharding

from k3jax.checkpoint import loading, names, orbax
from k3jax.checkpoint.fill import Faults, Filler, Piece
from k3jax.checkpoint.orbax import FOLDER, MANIFEST, Manifest, Part
from k3jax.checkpoint.plan import INDEX, Plan, examine
from k3jax.checkpoint.progress import Progress, track
from k3jax.checkpoint.safetensors import NUMPY, Reader
from k3jax.config import Config, resolve
from k3jax.errors import CheckpointError, K3Error

GROUP_BYTES = 2 << 30
CHUNK_BYTES = 16 << 20  # what one read fetches; an expert is a chunk of its own


def convert(
    source: str | Path,
    out: str | Path,
    *,
    dtype: Any = None,
    layers: int | None = None,
    shardings: loading.Shardings | None = None,
    overwrite: bool = False,
    group_bytes: int = GROUP_BYTES,
    progress: bool | Progress | None = None,
) -> Path:
    """Writes the parameters of a published checkpoint as Orbax, and copies the other files.

    Run again with the same arguments it goes on where it stopped. Called in every process of a
    distributed JAX it shares out the work; ``out`` is then on a file system that all of them see.

    Args:
      source: a folder in the published format, or a preset that ships weights.
      out: the folder to make. Host memory holds one group at a time.
      dtype: of the parameters that follow the model; None keeps what is stored.
      layers: only the first layers; ``config.json`` then says so.
      shardings: how parameters are spread while they are written; by default host memory of the
        one process, or the first dimension that the devices of all processes divide. It is called
        with the path and shape of the model's parameter, and None for the axes.
      overwrite: replace an ``out`` that this function has written.
      group_bytes: parameters of a layer are written together up to this size.
    Returns:
      ``out``.
    Raises:
      CheckpointError: what is wrong with the source; an ``out`` that exists; a partial one of
        another source or other arguments; a disk that is full or cannot be written.
    """
    source, out, everyone = Path(source), Path(out).expanduser().resolve(), _Everyone()
    partial = out.with_name(out.name + ".partial")
    with everyone.agrees(source, "cannot be read"):
        source = resolve(source).resolve()
        if orbax.is_orbax(source):
            raise CheckpointError(str(source), ["is in Orbax format already"])
        plan = examine(source, Config.from_hf(source), layers=layers)
        if plan.problems:
            raise CheckpointError(str(source), plan.problems)
        wanted = orbax.parts(plan.config, plan.form)
        pieces = _pieces(plan)
        dtypes = {name: _dtype(wanted[name], pieces[name], dtype) for name in wanted}
        sizes = {name: _nbytes(wanted[name].shape, dtypes[name]) for name in wanted}
        arguments = {
            "dtype": None if dtype is None else np.dtype(dtype).name,
            "layers": layers,
            "group_bytes": group_bytes,
        }
        fresh = Manifest(False, _fingerprint(plan), arguments, plan.form, {})
        manifest = _check_target(source, out, partial, fresh, overwrite)
    groups = dict(orbax.group_parts(sizes, group_bytes))
    todo = {name: members for name, members in groups.items() if name not in manifest.groups}
    left = sum(sizes[name] for members in todo.values() for name in members)
    with everyone.agrees(out, "the folder cannot be written"):
        if jax.process_index() == 0:
            _prepare(partial, manifest, left)
    with (
        loading._shards(source) as readers,
        ThreadPoolExecutor(loading.THREADS) as pool,
        orbax.checkpointer() as writer,
        track(progress, left, "Converting") as advance,
    ):
        for group, members in todo.items():
            faults = Faults()
            with everyone.agrees(source, "cannot be read"):
                read = functools.partial(
                    _read, readers=readers, faults=faults, pool=pool, shardings=shardings
                )
                values = {
                    name: read(name, wanted[name], pieces[name], dtypes[name]) for name in members
                }
                if faults.count:
                    raise CheckpointError(str(source), faults.report())
            with everyone.agrees(out, f"group {group} cannot be written"):
                _write(writer, partial, group, values, wanted)
                values.clear()
                if jax.process_index() == 0:
                    _record(partial, manifest, group, members, wanted, dtypes)
            for name in members:
                advance(sizes[name], name)
    with everyone.agrees(out, "the folder cannot be finished"):
        if jax.process_index() == 0:
            _finish(source, out, partial, manifest, plan.config if layers else None)
    return out


class _Everyone:
    """Steps that all processes take or none: one that fails stops the others too."""

    def __init__(self) -> None:
        self._directory, self._what = Path(), ""

    def agrees(self, directory: Path, what: str) -> _Everyone:
        self._directory, self._what = directory, what
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        failed = error is not None
        if jax.process_count() > 1 and (error is None or isinstance(error, Exception)):
            from jax.experimental import multihost_utils

            failed = bool(np.any(multihost_utils.process_allgather(np.asarray(failed))))
        if isinstance(error, K3Error) or not failed:
            return
        if error is None:
            raise CheckpointError(str(self._directory), [f"{self._what}: another process failed"])
        if isinstance(error, Exception):
            reason = orbax.reason_of(error)
            raise CheckpointError(str(self._directory), [f"{self._what}: {reason}"]) from error


def _pieces(plan: Plan) -> dict[str, list[Piece]]:
    """The tensors of every part, with their places in it."""
    result: dict[str, list[Piece]] = {}
    for name, spec in plan.specs.items():
        assert spec.target is not None
        target, index = spec.target, spec.index
        if spec.layer is not None:
            index = index[1:] if target[0] == "period" else index
            target = ("layers", spec.layer, *target[2:])
        result.setdefault(names.join(target), []).append(Piece(name, plan.stored[name], index))
    return result


def _dtype(part: Part, pieces: list[Piece], dtype: Any) -> np.dtype:
    if part.kind != "model":
        return names.STORED[part.kind]
    if dtype is not None:
        return np.dtype(dtype)
    stored = {NUMPY[piece.stored.entry.dtype] for piece in pieces}
    return stored.pop() if len(stored) == 1 else np.dtype(np.float32)


def _nbytes(shape: tuple[int, ...], dtype: np.dtype) -> int:
    return int(np.prod(shape, dtype=np.int64)) * dtype.itemsize


def _fingerprint(plan: Plan) -> dict[str, list[int]]:
    files = {stored.file for stored in plan.stored.values()} | {INDEX, "config.json"}
    result = {}
    for file in sorted(files):
        if (plan.directory / file).is_file():
            stat = (plan.directory / file).stat()
            result[file] = [stat.st_size, stat.st_mtime_ns]
    return result


def _check_target(
    source: Path, out: Path, partial: Path, fresh: Manifest, overwrite: bool
) -> Manifest:
    """The manifest to go on with. Changes nothing, so that every process finds the same."""
    if out == source or source in out.parents:
        raise CheckpointError(str(out), [f"lies in the source {source}"])
    if out.exists():
        if not orbax.is_orbax(out):
            raise CheckpointError(str(out), ["exists, and is not an Orbax checkpoint of k3jax"])
        if not overwrite:
            raise CheckpointError(str(out), ["exists; --overwrite replaces it"])
    if not partial.exists():
        return fresh
    if not orbax.is_orbax(partial):
        raise CheckpointError(str(partial), [f"is in the way and has no {MANIFEST}; remove it"])
    old = orbax.read_manifest(partial)
    problems = [
        f"{key} was {old.arguments.get(key)!r}, now it is {value!r}"
        for key, value in fresh.arguments.items()
        if old.arguments.get(key) != value
    ]
    for file in sorted(old.source.keys() | fresh.source.keys()):
        if old.source.get(file) != fresh.source.get(file):
            problems.append(f"{file} of the source is not the one the conversion began with")
    if problems:
        problems.append("use the same source and arguments, or remove this folder to start over")
        raise CheckpointError(str(partial), problems)
    sound = {
        name: entry
        for name, entry in old.groups.items()
        if not orbax.compare_files(partial, name, entry)
    }
    return Manifest(False, old.source, old.arguments, old.form, sound)


def _prepare(partial: Path, manifest: Manifest, needed: int) -> None:
    """Makes the partial folder and clears what an interruption left half-written."""
    (partial / FOLDER).mkdir(parents=True, exist_ok=True)
    for folder in (partial / FOLDER).iterdir():
        if folder.name not in manifest.groups:
            shutil.rmtree(folder)
    _write_manifest(partial, manifest)
    free = shutil.disk_usage(partial).free
    if free < needed:
        raise OSError(f"{needed / 1e9:.3f} GB are needed, {free / 1e9:.3f} GB are free")


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    temporary = path.with_name(path.name + ".new")
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(values, file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _write_manifest(directory: Path, manifest: Manifest) -> None:
    head = {"format": orbax.FORMAT, "version": orbax.VERSION}
    _write_json(directory / MANIFEST, head | vars(manifest))


def _read(
    name: str,
    part: Part,
    pieces: list[Piece],
    dtype: np.dtype,
    *,
    readers: Callable[[str], Reader],
    faults: Faults,
    pool: ThreadPoolExecutor,
    shardings: loading.Shardings | None,
) -> jax.Array | None:
    leaf, sharding = jax.ShapeDtypeStruct(part.shape, dtype), _spread(part, shardings)
    path: names.Path = tuple(name.split("."))
    filler = Filler(readers, faults)
    with jax.default_device(_host()):
        return loading._load_one(
            path, leaf, pieces, lambda *_: sharding, filler, faults, pool, lambda *_: None
        )


def _host() -> Any:
    """Host memory, of which an array there takes none but its own."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS leaves it out; parts then go through the accelerator
        return None


def _spread(part: Part, shardings: loading.Shardings | None) -> Sharding | None:
    if shardings is not None:
        lead = () if part.period is None else (part.period + 1,)
        sharding = shardings(part.target, (*lead, *part.shape), None)
        if sharding is None or part.period is None:
            return sharding
        return orbax.slice_sharding(part.target, sharding)
    if jax.process_count() == 1:
        return None
    count = jax.device_count()
    mesh = jax.make_mesh((count,), ("all",), axis_types=(AxisType.Auto,))
    split = next((i for i, size in enumerate(part.shape) if size % count == 0), None)
    spec = [None] * (split or 0) + ["all"] if split is not None else []
    return NamedSharding(mesh, PartitionSpec(*spec))


def _write(
    writer: Any, partial: Path, group: str, values: Mapping[str, Any], wanted: Mapping[str, Part]
) -> None:
    import orbax.checkpoint as ocp

    how = {
        name: ocp.SaveArgs(
            chunk_byte_size=CHUNK_BYTES,
            shard_axes=(0,) if len(wanted[name].shape) == 3 else (),
        )
        for name in values
    }
    args = ocp.args.PyTreeSave(orbax.nested(values), save_args=orbax.nested(how))
    with _quiet_threads():
        writer.save(partial / FOLDER / group, args=args)


@contextlib.contextmanager
def _quiet_threads() -> Iterator[None]:
    """Orbax prints tracebacks of its threads that fail, and then raises the error here as well.

    Writes under way report to an event loop that is closed by then, some of them after the error
    has left this function: that filter stays where a save has failed.
    """
    hook, late, logger = threading.excepthook, sys.unraisablehook, logging.getLogger("absl")
    disabled = logger.disabled

    def unraisable(what: Any) -> None:
        if str(what.exc_value) != "Event loop is closed":
            late(what)

    threading.excepthook, sys.unraisablehook = lambda args: None, unraisable
    logger.disabled = True
    try:
        yield
        sys.unraisablehook = late
    finally:
        threading.excepthook, logger.disabled = hook, disabled


def _record(
    partial: Path,
    manifest: Manifest,
    group: str,
    members: list[str],
    wanted: Mapping[str, Part],
    dtypes: Mapping[str, np.dtype],
) -> None:
    manifest.groups[group] = {
        "parameters": {n: [dtypes[n].name, list(wanted[n].shape)] for n in members},
        "files": orbax.files_of(partial / FOLDER / group),
    }
    _write_manifest(partial, manifest)


def _finish(
    source: Path, out: Path, partial: Path, manifest: Manifest, truncated: Config | None
) -> None:
    for entry in source.iterdir():
        if entry.suffix == ".safetensors" or entry.name.startswith("."):
            continue
        if entry.name in (INDEX, MANIFEST, FOLDER):
            continue
        if entry.is_dir():
            shutil.copytree(entry, partial / entry.name, dirs_exist_ok=True)
        else:
            shutil.copyfile(entry, partial / entry.name)
    if truncated is not None:
        _write_json(partial / "config.json", truncated.to_hf())
    manifest.complete = True
    _write_manifest(partial, manifest)
    old = out.with_name(out.name + ".old")
    if out.exists():
        shutil.rmtree(old, ignore_errors=True)
        out.rename(old)
    try:
        partial.rename(out)
    except OSError:
        if old.exists():
            old.rename(out)
        raise
    shutil.rmtree(old, ignore_errors=True)
