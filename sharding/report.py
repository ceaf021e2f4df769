"""The collectives of a step: read off its jaxpr (what the code asks for) and off compiled HLO.

Nothing here needs a device: a jaxpr can be traced over a `jax.sharding.AbstractMesh`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

# Names of the `jax.named_scope`s in which the model works; the innermost one owns a collective.
COMPONENTS = (
    "embedding",
    "depth",
    "kda",
    "mla",
    "indexer",
    "router",
    "experts",
    "latent",
    "shared",
    "dense",
    "head",
)
OTHER = "other"  # what stands in none of them

_KINDS = {
    "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "unreduced_reduce_scatter": "reduce-scatter",
    "psum": "all-reduce",
    "psum2": "all-reduce",
    "psum_invariant": "all-reduce",
    "unreduced_psum": "all-reduce",
    "pmax": "all-reduce-max",
    "pmin": "all-reduce-min",
    "all_to_all": "all-to-all",
    "ragged_all_to_all": "ragged-all-to-all",
    "ppermute": "permute",
}


@dataclass(frozen=True)
class Collective:
    """One kind of collective of a step, seen by one device.

    Attributes:
      component: one of `COMPONENTS`, or "other".
      kind: "all-gather", "reduce-scatter", "all-reduce", "all-reduce-max", "all-reduce-min",
        "all-to-all", "ragged-all-to-all" or "permute".
      axes: mesh axes it runs over, of more than one device each; ``ranks`` is their product.
      shape: of the local operand; ``result`` of the local result; ``dtype`` of both.
      times: how often a step runs it (the body of a scan counts with its length).
      bytes_sent: by one device and time, with a ring: (n-1)/n of the result of an all-gather, of
        the operand of a reduce-scatter or all-to-all, twice that of an all-reduce. A ragged
        all-to-all counts the smaller of operand and result, buffers of the worst case: what the
        devices send together they also receive, so none needs more on average.
      exact: False where ``bytes_sent`` is a worst case, or ``times`` cannot be known (branches
        count as taken, the body of a loop of unknown length counts once).
    """

    component: str
    kind: str
    axes: tuple[str, ...]
    ranks: int
    shape: tuple[int, ...]
    result: tuple[int, ...]
    dtype: str
    times: int
    bytes_sent: int
    exact: bool = True

    @property
    def total_bytes(self) -> int:
        """Bytes one device sends in a step."""
        return self.times * self.bytes_sent


def ring_bytes(kind: str, operand: int, result: int, ranks: int) -> int:
    """Bytes one device sends in a collective of ``operand`` and ``result`` local bytes."""
    if ranks == 1:
        return 0
    if kind == "ragged-all-to-all":
        return min(operand, result)
    if kind == "permute":
        return operand
    whole = result if kind == "all-gather" else operand
    rounds = 2 if kind.startswith("all-reduce") else 1
    return rounds * whole * (ranks - 1) // ranks


def component_of(name_stack: str, outer: str = OTHER) -> str:
    """The innermost component named in a scope such as ``jit(f)/kda/jvp(experts)``."""
    words = re.findall(r"\w+", name_stack)
    return next((word for word in reversed(words) if word in COMPONENTS), outer)


def collectives(jaxpr: Any, sizes: Mapping[str, int] | None = None) -> list[Collective]:
    """The collectives of a step, equal ones added up, in the order of their first appearance.

    Args:
      jaxpr: what `jax.make_jaxpr` gives.
      sizes: of mesh axes bound outside of the jaxpr; a `shard_map` inside brings its own.
    Raises:
      ValueError: a collective over part of an axis (``axis_index_groups``).
    """
    merged: dict[Collective, int] = {}
    for one in _walk(getattr(jaxpr, "jaxpr", jaxpr), dict(sizes or {}), OTHER, 1, True):
        key = replace(one, times=0)
        merged[key] = merged.get(key, 0) + one.times
    return [replace(key, times=times) for key, times in merged.items()]


def _walk(jaxpr, sizes, component, times, exact) -> Iterator[Collective]:
    for eqn in jaxpr.eqns:
        here = component_of(str(eqn.source_info.name_stack), component)
        name, params = eqn.primitive.name, eqn.params
        if name in _KINDS:
            yield from _of_equation(eqn, sizes, here, times, exact)
            continue
        if name == "pallas_call":  # a kernel's own jaxpr is no part of the step's communication
            continue
        inner, repeat, known = sizes, 1, exact
        if name == "shard_map":
            inner = sizes | dict(params["mesh"].shape)
        elif name == "scan":
            repeat = params["length"]
        elif name in ("while", "cond"):
            known = False
        for value in params.values():
            for one in value if isinstance(value, tuple | list) else (value,):
                one = getattr(one, "jaxpr", one)
                if hasattr(one, "eqns"):
                    yield from _walk(one, inner, here, times * repeat, known)


def _of_equation(eqn, sizes, component, times, exact) -> Iterator[Collective]:
    kind, params = _KINDS[eqn.primitive.name], eqn.params
    if params.get("axis_index_groups") is not None:
        raise ValueError(f"{kind} over parts of an axis: {params['axis_index_groups']}")
    names = params.get("axes", params.get("axis_name"))
    names = names if isinstance(names, tuple | list) else (names,)
    axes = tuple(a for a in names if isinstance(a, str) and sizes[a] > 1)
    ranks = math.prod(sizes[a] for a in axes)
    if ranks == 1:
        return
    ragged = kind == "ragged-all-to-all"
    operands = eqn.invars[:1] if ragged else eqn.invars  # then come offsets and counts
    for source, result in zip(operands, eqn.outvars, strict=True):
        size = source.aval.dtype.itemsize
        yield Collective(
            component,
            kind,
            axes,
            ranks,
            tuple(source.aval.shape),
            tuple(result.aval.shape),
            str(source.aval.dtype),
            times,
            ring_bytes(kind, size * source.aval.size, size * result.aval.size, ranks),
            exact and not ragged,
        )


@dataclass(frozen=True)
class HloCollective:
    """A collective instruction of a compiled module.

    Attributes:
      kind: the HLO opcode without "-start"; "reduce-scatter" for XLA:TPU's fused form of it.
      axes: the mesh axes that its groups span, in the mesh's order; None when no set of axes does.
      results: (dtype, shape) of every array it makes.
      op_name: where in the traced program it comes from; "" if XLA does not say.
    """

    kind: str
    axes: tuple[str, ...] | None
    results: tuple[tuple[str, tuple[int, ...]], ...]
    op_name: str

    @property
    def bytes(self) -> int:
        """Of the results, on one device."""
        return sum(math.prod(shape) * _bits(dtype) // 8 for dtype, shape in self.results)


_OPCODE = re.compile(
    r" (all-gather|all-reduce|reduce-scatter|ragged-all-to-all|all-to-all|collective-permute"
    r"|collective-broadcast)(-start)?\("
)
_SHAPE = re.compile(r"\b([a-z]+[0-9]*[a-z0-9]*)\[([\d,]*)\]")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{\s*$")


def _bits(dtype: str) -> int:
    if dtype == "pred":
        return 8
    found = re.search(r"\d+", dtype)
    return int(found[0]) if found else 0


def hlo_collectives(text: str, mesh: Any) -> list[HloCollective]:
    """Every collective instruction of a compiled module (`Compiled.as_text()`), once each.

    Args:
      text: HLO of one program over all devices of ``mesh``.
      mesh: a `Mesh` or `AbstractMesh`, whose flat order of devices is the program's.
    Raises:
      ValueError: groups of devices in a notation that is not known.
    """
    shape, found, computation = dict(mesh.shape), [], ""
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            computation = header[1]
        opcode = _OPCODE.search(line)
        if opcode is None or " = " not in line[: opcode.start() + 1]:
            continue
        kind = opcode[1]
        typed = line[line.index(" = ") + 3 : opcode.start() + 1]
        results = [
            (dtype, tuple(int(n) for n in dims.split(",") if n))
            for dtype, dims in _SHAPE.findall(typed)
        ]
        if opcode[2] and kind == "ragged-all-to-all":
            results = [max(results, key=lambda r: math.prod(r[1]))]  # of operands, counts, result
        elif opcode[2] and kind in ("all-gather", "collective-permute"):
            # The type of a start lists operands, then results, then what the hardware waits on.
            results = [r for r in results if r != ("u32", ())]
            results = results[len(results) // 2 :]
        if kind == "all-reduce" and "all-reduce-scatter" in computation:
            kind = "reduce-scatter"
        name = re.search(r'op_name="([^"]*)"', line)
        found.append(
            HloCollective(kind, _axes_of(line, shape), tuple(results), name[1] if name else "")
        )
    return found


def _axes_of(line: str, sizes: dict[str, int]) -> tuple[str, ...] | None:
    names = tuple(axis for axis, size in sizes.items() if size > 1)
    ids = np.arange(math.prod(sizes.values()))
    if pairs := re.search(r"source_target_pairs=\{(.*?)\}\}", line):
        numbers = [int(n) for n in re.findall(r"\d+", pairs[1])]
        moved = set()
        coordinates = np.unravel_index(np.array(numbers), tuple(sizes.values()))
        for axis, along in zip(sizes, coordinates, strict=True):
            if (along[::2] != along[1::2]).any():
                moved.add(axis)
        return tuple(axis for axis in names if axis in moved)
    wanted = {frozenset(int(i) for i in group) for group in _groups(line, ids.size)}
    # The module of one of several slices names only its own devices, the first ones.
    named = max(max(group) for group in wanted) + 1
    grid = ids.reshape(tuple(sizes.values()))
    for choice in range(2 ** len(names)):
        axes = tuple(axis for i, axis in enumerate(names) if choice >> i & 1)
        spanned = (frozenset(int(i) for i in g) for g in _spanned(grid, tuple(sizes), axes))
        if {group for group in spanned if min(group) < named} == wanted:
            return axes
    return None


def _spanned(grid: np.ndarray, names: tuple[str, ...], axes: tuple[str, ...]) -> np.ndarray:
    """[groups, members] of the device numbers that differ along ``axes`` only."""
    last = [names.index(axis) for axis in axes]
    rest = [i for i in range(grid.ndim) if i not in last]
    count = math.prod(grid.shape[i] for i in last)
    return grid.transpose(rest + last).reshape(-1, count)


def _groups(line: str, devices: int) -> np.ndarray | list[list[int]]:
    if "replica_groups={}" in line or "replica_groups=" not in line:
        return [list(range(devices))]
    text = line[line.index("replica_groups=") + len("replica_groups=") :]
    if listed := re.match(r"\{(\{[\d, ]*\}(?:, *\{[\d, ]*\})*)\}", text):
        return [
            [int(n) for n in re.findall(r"\d+", g)] for g in re.findall(r"\{(.*?)\}", listed[1])
        ]
    if iota := re.match(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        shape, source, order = ([int(n) for n in (g or "").split(",") if n] for g in iota.groups())
        grid = np.arange(math.prod(source)).reshape(source)
        return (grid.transpose(order) if order else grid).reshape(shape)
    if named := re.match(r"mesh\[([^\]]*)\] \{([^}]*)\}", text):
        sizes = {a: int(n) for a, n in re.findall(r"'([^']+)'=(\d+)", named[1])}
        axes = re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", named[2])
        return _named_groups(sizes, axes)
    raise ValueError(f"replica groups in an unknown notation: {text[:80]}")


def _named_groups(sizes: dict[str, int], axes: list[tuple[str, str, str]]) -> np.ndarray:
    """Groups along axes of a mesh, or along a part 'x':(m)k: k devices after m steps of x."""
    names, shape, chosen = [], [], []
    parts = {axis: (int(before or 1), int(part or sizes[axis])) for axis, before, part in axes}
    for axis, size in sizes.items():
        before, part = parts.get(axis, (size, 1))
        names += [f"{axis}<", axis, f"{axis}>"]
        shape += [before, part, size // before // part]
        if axis in parts:
            chosen.append(axis)
    grid = np.arange(math.prod(shape)).reshape(shape)
    return _spanned(grid, tuple(names), tuple(chosen))


# What a collective of the program may have become.
_BECOMES = {
    "all-gather": ("all-gather",),
    "all-reduce": (
        "all-reduce",
        "all-reduce-max",
        "all-reduce-min",
        "all-gather",
        "reduce-scatter",
    ),
    "reduce-scatter": ("reduce-scatter", "all-reduce"),
    "all-to-all": ("all-to-all",),
    "ragged-all-to-all": ("ragged-all-to-all",),
    "collective-permute": ("permute", "reduce-scatter"),
}
_PADDING = 1.05  # a reduce-scatter's parts are padded to whole tiles


def unlisted(found: list[HloCollective], listed: list[Collective]) -> list[HloCollective]:
    """The collectives of a compiled module that no listed one explains; none, if all is well.

    One is explained by a listed one over the same axes, of a kind that XLA turns into it, with as
    many elements in its operand or result. (Elements, as XLA:CPU widens bfloat16.) XLA:TPU makes
    all-reduces of small all-gathers and reduce-scatters. It pads parts of a reduce-scatter to whole
    tiles and sends the overhang on by permutes, so those may be smaller or a little larger. A
    ragged exchange pads its rows; XLA inserts none, so axes suffice.
    """
    return [one for one in found if one.axes != () and not _explained(one, listed)]


def _explained(one: HloCollective, listed: list[Collective]) -> bool:
    sizes = set()
    for other in listed:
        same = one.axes is not None and set(one.axes) == set(other.axes)
        if same and other.kind in _BECOMES.get(one.kind, ()):
            sizes |= {math.prod(other.shape), math.prod(other.result)}
    made = [math.prod(shape) for _, shape in one.results]
    if not sizes or one.kind == "ragged-all-to-all":
        return bool(sizes)
    if set(made) <= sizes or sum(made) in sizes:
        return True
    if one.kind in ("reduce-scatter", "collective-permute"):
        return max(made) <= _PADDING * max(sizes)
    return False
