"""Training checkpoints: a folder of numbered npz parts and meta.json, there whole or not at all."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from k3jax.errors import CheckpointError
from k3jax.train.optimizer import path_name

MAX_PART_BYTES = 15 << 20  # small enough for tools that move files of 16 MiB


def flatten(tree) -> dict[str, Any]:
    """Nested tree -> {"head/0/attention/q_proj": leaf}."""
    return {path_name(p): leaf for p, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def save(directory: str | Path, tree, meta: Mapping[str, Any], *, max_bytes: int = MAX_PART_BYTES):
    """Writes every leaf of a tree; a folder of that name is replaced once all parts are on disk.

    Args:
      tree: arrays of dtypes NumPy knows; a part holds whole arrays, split off along axis 0 where
        one array alone is larger than ``max_bytes``.
      meta: JSON values, read back by ``load``.
    """
    directory = Path(directory)
    directory.parent.mkdir(parents=True, exist_ok=True)
    temporary = directory.with_name(f".{directory.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    parts: list[dict[str, np.ndarray]] = [{}]
    size = 0
    pieces: dict[str, int] = {}
    for name, leaf in flatten(jax.device_get(tree)).items():
        value = np.asarray(leaf)
        count = -(-value.nbytes // max_bytes) if value.ndim else 1
        pieces[name] = max(1, min(count, value.shape[0] if value.ndim else 1))
        split = np.array_split(value, pieces[name]) if value.ndim else [value]
        for index, piece in enumerate(split):
            if size and size + piece.nbytes > max_bytes:
                parts.append({})
                size = 0
            parts[-1][f"{name}#{index}"] = piece
            size += piece.nbytes
    for index, part in enumerate(parts):
        np.savez(temporary / f"part-{index:02d}.npz", **part)  # pyright: ignore[reportArgumentType]
    record = {"parts": len(parts), "pieces": pieces, "meta": dict(meta)}
    (temporary / "meta.json").write_text(json.dumps(record), encoding="utf-8")
    if directory.exists():
        old = directory.with_name(f".{directory.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        directory.rename(old)
        temporary.rename(directory)
        shutil.rmtree(old)
    else:
        temporary.rename(directory)


def load(directory: str | Path, like) -> tuple[Any, dict[str, Any]]:
    """Reads a folder back into the structure of ``like`` (arrays or ShapeDtypeStructs).

    Returns:
      (tree of NumPy arrays, meta).

    Raises:
      CheckpointError: every absent, unexpected or ill-shaped array, by name.
    """
    directory = Path(directory)
    meta = read_meta(directory)
    found: dict[str, np.ndarray] = {}
    for index in range(meta["parts"]):
        try:
            with np.load(directory / f"part-{index:02d}.npz") as part:
                found |= {name: part[name] for name in part.files}
        except (OSError, ValueError) as error:
            raise CheckpointError(str(directory), [f"part-{index:02d}.npz: {error}"]) from None
    problems, leaves = [], []
    wanted = flatten(like)
    pieces = meta["pieces"]
    problems += [f"{name}: not part of this run" for name in sorted(set(pieces) - set(wanted))]
    for name, want in wanted.items():
        split = [found.get(f"{name}#{i}") for i in range(pieces.get(name, 1))]
        if any(piece is None for piece in split):
            problems.append(f"{name}: missing")
            continue
        value = split[0] if len(split) == 1 else np.concatenate(split)  # pyright: ignore
        assert value is not None
        if value.shape != want.shape or value.dtype != want.dtype:
            problems.append(
                f"{name}: {value.dtype}{list(value.shape)}, expected {want.dtype}{list(want.shape)}"
            )
        leaves.append(value)
    if problems:
        raise CheckpointError(str(directory), problems)
    return jax.tree.unflatten(jax.tree.structure(like), leaves), meta["meta"]


def read_meta(directory: str | Path) -> dict[str, Any]:
    """``meta.json`` of a checkpoint folder: "parts", "pieces" and ``save``'s "meta"."""
    try:
        return json.loads((Path(directory) / "meta.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(str(directory), [f"meta.json: {error}"]) from None
