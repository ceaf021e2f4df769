"""Arrays under a layout: partition specs, shards, bytes, and what does not fit.

A leaf is anything with ``.shape``, ``.dtype`` and ``.axes``, one logical axis a dimension:
a variable of a model, abstract or not, or a `Leaf`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sharding.axes import split
from sharding.errors import LayoutError
from sharding.layout import Layout

GROUP = 32  # values under one MXFP4 scale


class HasAxes(Protocol):
    """What every function here reads of an array."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> Any: ...
    @property
    def axes(self) -> tuple[str, ...]: ...


@dataclass(frozen=True)
class Leaf:
    """An array by its description."""

    shape: tuple[int, ...]
    dtype: Any
    axes: tuple[str, ...]


def spec(layout: Layout, leaf: HasAxes) -> PartitionSpec:
    """The mesh axes of each dimension; mesh axes of size 1 are left out.

    A mesh axis splits an array once. Where ``cache_sequence`` takes the batch axes, the array's
    ``batch`` dimension stays whole over them; any other double use is refused.

    Raises:
      LayoutError: unknown logical axis, axes that do not name every dimension, or a mesh axis used
        by two dimensions.
    """
    parts = _parts(layout, leaf)
    return PartitionSpec(*(p if len(p) > 1 else p[0] if p else None for p in parts))


def sharding(mesh: Mesh, layout: Layout, leaf: HasAxes) -> NamedSharding:
    """`spec` on a mesh of the layout (`sharding.make_mesh`)."""
    return NamedSharding(mesh, spec(layout, leaf))


def local_shape(layout: Layout, leaf: HasAxes) -> tuple[int, ...]:
    """The shape one device holds. Raises LayoutError as `check` does for one array."""
    check(layout, {"array": leaf})
    parts = _parts(layout, leaf)
    return tuple(n // layout.size(p) for n, p in zip(leaf.shape, parts, strict=True))


def bytes_per_device(layout: Layout, leaf: HasAxes) -> int:
    """Bytes of the shard one device holds, without padding by the device."""
    return math.prod(local_shape(layout, leaf)) * np.dtype(leaf.dtype).itemsize


def stored(layout: Layout, leaves: Mapping[str, HasAxes]) -> dict[str, HasAxes]:
    """The leaves with ``extra_experts`` more entries along ``experts``; others as they are."""

    def one(leaf: HasAxes) -> HasAxes:
        if not layout.extra_experts or "experts" not in leaf.axes:
            return leaf
        at = tuple(leaf.axes).index("experts")
        shape = list(leaf.shape)
        shape[at] += layout.extra_experts
        return Leaf(tuple(shape), leaf.dtype, tuple(leaf.axes))

    return {name: one(leaf) for name, leaf in leaves.items()}


def check(layout: Layout, leaves: Mapping[str, HasAxes], heads: Iterable[int] = ()) -> None:
    """Every array must split evenly, MXFP4 groups and attention heads stay whole.

    Args:
      leaves: by name, as they are stored (`stored`).
      heads: numbers of heads that no ``head_count`` dimension of the leaves tells.
    Raises:
      LayoutError: everything wrong, each with the array, the axis, its size and the divisor;
        arrays of equal name with equal problems in one line.
    """
    alike: dict[tuple[str, str], list[str]] = {}
    counts = set(heads)
    for name, leaf in leaves.items():
        problems = _uneven(layout, leaf)
        for line in problems:
            alike.setdefault((_short(name), line), []).append(name)
        axes = getattr(leaf, "axes", None) or ()
        counts |= {n for a, n in zip(axes, leaf.shape, strict=False) if a == "head_count"}
    found = [
        f"{names[0]}{f' and {len(names) - 1} like it' * (len(names) > 1)}: {line}"
        for (_, line), names in alike.items()
    ]
    divisor = layout.size(layout.tensor)
    # What follows is said once a number of heads, not once an array.
    for count in sorted(counts):
        if count % divisor:
            found.append(
                f"{count} heads: {_over(layout, layout.tensor)} = {divisor} devices would cut "
                "through a head"
            )
    if found:
        raise LayoutError(f"layout {layout.name}", found)


def explain(layout: Layout, leaves: Mapping[str, HasAxes]) -> str:
    """A table ``name[axis_mesh, axis]  copies  global -> local  MB of a device``.

    The subscript of a dimension is the mesh axes that split it. Arrays of equal name and shape in
    several layers stand in one line, with how many there are; a stack counts its layers. MB are
    10^6 bytes, of all copies.

    Raises:
      LayoutError: see `check`.
    """
    check(layout, leaves)
    groups: dict[tuple, list[int]] = {}
    for name, leaf in leaves.items():
        axes, shape = tuple(leaf.axes), tuple(leaf.shape)
        local, size = local_shape(layout, leaf), bytes_per_device(layout, leaf)
        count = 1
        if axes[:1] == ("layers",):
            count, axes, shape, local = shape[0], axes[1:], shape[1:], local[1:]
        dtype = np.dtype(leaf.dtype).name
        key = (_short(name), _notation(layout, axes), dtype, shape, local)
        total = groups.setdefault(key, [0, 0])
        total[0] += count
        total[1] += size
    rows = [
        (
            name + dims,
            f"{count} x",
            dtype,
            f"{_dims(shape)} -> {_dims(local)}" if shape != local else _dims(shape),
            f"{size / 1e6:,.2f} MB",
        )
        for (name, dims, dtype, shape, local), (count, size) in groups.items()
    ]
    total = sum(size for _, size in groups.values())
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(5)]
    mesh = " x ".join(f"{axis} {size}" for axis, size in layout.mesh.items())
    lines = [f"{layout.name}: {layout.num_devices} devices ({mesh}) of {layout.chip}"]
    for a, b, c, d, e in rows:
        w = widths
        lines.append(f"{a:<{w[0]}}  {b:>{w[1]}}  {c:<{w[2]}}  {d:<{w[3]}}  {e:>{w[4]}}")
    lines.append(f"{total / 1e6:,.2f} MB a device")
    return "\n".join(lines)


def named(tree: Any) -> dict[str, Any]:
    """Leaves by dotted path, of a module, a state or a nested mapping; of a handle, its module."""
    tree = getattr(tree, "module", tree)
    pairs, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: hasattr(x, "axes"))
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in pairs}


def _parts(layout: Layout, leaf: HasAxes) -> tuple[tuple[str, ...], ...]:
    problems = _axis_problems(layout, leaf)
    if problems:
        raise LayoutError(f"layout {layout.name}", problems)
    names = [split(axis)[0] for axis in leaf.axes]
    parts = [layout.over(name) for name in names]
    if "cache_sequence" in names:
        taken = layout.cache_sequence
        for i, name in enumerate(names):
            if name == "batch":
                parts[i] = tuple(a for a in parts[i] if a not in taken)
    return tuple(parts)


def _axis_problems(layout: Layout, leaf: HasAxes) -> list[str]:
    axes = tuple(getattr(leaf, "axes", None) or ())
    if len(axes) != len(leaf.shape):
        return [f"axes {axes} do not name the dimensions of {tuple(leaf.shape)}"]
    found, used = [], {}
    for axis in axes:
        try:
            name, _ = split(axis)
        except ValueError as error:
            found.append(str(error))
            continue
        if name not in layout.rules:
            found.append(f"unknown logical axis {axis!r}")
            continue
        if name == "batch" and "cache_sequence" in axes:
            continue
        for a in layout.over(name):
            if a in used:
                found.append(f"mesh axis {a!r} would split both {used[a]!r} and {axis!r}")
            used[a] = axis
    return found


def _uneven(layout: Layout, leaf: HasAxes) -> list[str]:
    found = _axis_problems(layout, leaf)
    if found:
        return found
    for axis, size, part in zip(leaf.axes, leaf.shape, _parts(layout, leaf), strict=True):
        divisor, packed = layout.size(part), split(axis)[1]
        if divisor == 1:
            continue
        by = f"not divisible by {_over(layout, part)} = {divisor}"
        if packed == 1:
            if size % divisor:
                found.append(f"axis {axis!r} of size {size} is {by}")
            continue
        groups, rest = divmod(size * packed, GROUP)
        if rest or groups % divisor:
            found.append(
                f"axis {axis!r} of size {size} holds {groups} groups of {GROUP} values, "
                f"{by}: a group would be cut"
            )
    return found


def _over(layout: Layout, axes: Iterable[str]) -> str:
    return " x ".join(f"{a} {layout.mesh[a]}" for a in axes)


def _notation(layout: Layout, axes: tuple[str, ...]) -> str:
    dims = []
    for axis, part in zip(axes, _parts(layout, Leaf((0,) * len(axes), None, axes)), strict=True):
        sub = part[0] if len(part) == 1 else "{" + ",".join(part) + "}"
        dims.append(f"{axis}_{sub}" if part else axis)
    return "[" + ", ".join(dims) + "]"


def _dims(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _short(name: str) -> str:
    """The name inside its layer: what follows the last number of the path."""
    parts = name.split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdecimal()]
    return ".".join(parts[numbers[-1] + 1 :] if numbers else parts) or name
