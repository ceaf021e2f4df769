"""Nested dictionaries of parameters as paths and back; the abstract tree against the table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from k3jax.checkpoint import names


def normal(path: tuple[Any, ...]) -> names.Path:
    """A path with its positions as integers, however the tree spells its keys."""
    return tuple(int(part) if str(part).isdigit() else str(part) for part in path)


def flatten(tree: Mapping[Any, Any], path: tuple[Any, ...] = ()) -> dict[tuple[Any, ...], Any]:
    """Leaves by path, keys as they are in the tree."""
    result: dict[tuple[Any, ...], Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            result |= flatten(value, (*path, key))
        else:
            result[*path, key] = value
    return result


def unflatten(leaves: Mapping[tuple[Any, ...], Any]) -> dict[Any, Any]:
    """The nested dictionary of leaves by path."""
    result: dict[Any, Any] = {}
    for path, value in leaves.items():
        node = result
        for part in path[:-1]:
            node = node.setdefault(part, {})
        node[path[-1]] = value
    return result


def form_of(paths: Any) -> str | None:
    """How a tree holds experts: "mxfp4", "dense", or None without any."""
    last = {path[-1] for path in paths}
    return "mxfp4" if "w13_codes" in last else "dense" if "w13" in last else None


def compare(
    leaves: Mapping[names.Path, Any],
    table: Mapping[names.Path, names.ParameterSpec],
    dtype: np.dtype | None,
) -> list[str]:
    """What is wrong with a tree for ``table``: paths, shapes, dtypes (None: any float)."""
    problems = [
        f"parameter {names.join(path)}: the model lacks it" for path in table.keys() - leaves
    ]
    for path in leaves.keys() - table.keys():
        problems.append(f"parameter {names.join(path)}: no tensor of the checkpoint fills it")
    for path, spec in table.items():
        if path not in leaves:
            continue
        shape, found = tuple(leaves[path].shape), np.dtype(leaves[path].dtype)
        if shape != spec.shape:
            problems.append(
                f"parameter {names.join(path)}: shape is {list(shape)}, "
                f"the config needs {list(spec.shape)}"
            )
        wanted = dtype if spec.kind == "model" else names.STORED[spec.kind]
        if (wanted is not None and found != wanted) or (wanted is None and found.kind in "iub"):
            problems.append(
                f"parameter {names.join(path)}: dtype is {found}, must be {wanted or 'a float'}"
            )
    return sorted(problems)
