"""Every rule about a layout, as a list of what is wrong with one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sharding.axes import AXES

# chip -> (dimensions of its topologies, JAX devices of a chip); no topology for GPUs and CPUs.
# A tpu7x chip shows its two cores as two devices; a v5p chip joins its two into one.
CHIPS: dict[str, tuple[int, int]] = {
    "v5p": (3, 1),
    "v5e": (2, 1),
    "v6e": (2, 1),
    "tpu7x": (3, 2),
    "h100": (0, 1),
    "h200": (0, 1),
    "b200": (0, 1),
    "cpu": (0, 1),
}
STRATEGIES = ("ragged", "dense", "gather")
PHASES = ("prefill", "decode")
# On two H200 (jax 0.11.2) the exchange alone was right in every test and 100 times slower than the
# others, but a whole layer around it gave wrong numbers, some of them NaN; the cause is not known.
NO_RAGGED = ("h100", "h200", "b200")
REQUIRED = ("name", "why", "chip", "mesh", "rules", "dispatch")
OPTIONAL = ("topology", "slices", "replicated", "extra_experts")

# What a layout decides. Every other axis must be whole on each device.
WITH_HEADS = ("mlp", "shared_mlp", "vocab", "latent")
DECIDED = ("batch", "heads", "head_count", *WITH_HEADS, "experts", "cache_sequence", "embed")


def problems(d: Mapping[str, Any]) -> list[str]:
    """What is wrong with a layout written as a mapping; empty if it can be run."""
    found = [f"unknown key {key!r}" for key in d if key not in (*REQUIRED, *OPTIONAL)]
    found += [f"key {key!r} is missing" for key in REQUIRED if key not in d]
    for key in ("name", "why"):
        if key in d and not (isinstance(d[key], str) and d[key].strip()):
            found.append(f"{key} is {d[key]!r}, must be text")
    if "chip" in d and not (isinstance(d["chip"], str) and d["chip"] in CHIPS):
        found.append(f"chip is {d['chip']!r}, must be one of {', '.join(CHIPS)}")
    found += _whole("extra_experts", d.get("extra_experts", 0), 0)
    found += _dispatch(d["dispatch"], d.get("chip")) if "dispatch" in d else []
    if "mesh" not in d:
        return found
    bad = _mesh(d["mesh"])
    found += bad or _devices(d)
    if "rules" in d:
        mesh = {} if bad else dict(d["mesh"])
        found += _rules(d["rules"], d.get("replicated", []), mesh, known=not bad)
    return found


def _whole(what: str, value: Any, least: int) -> list[str]:
    if isinstance(value, bool) or not isinstance(value, int):
        return [f"{what} is {value!r}, must be a whole number"]
    return [] if value >= least else [f"{what} is {value}, must be at least {least}"]


def _dispatch(dispatch: Any, chip: Any) -> list[str]:
    if not isinstance(dispatch, Mapping):
        return [f"dispatch is {dispatch!r}, must say prefill: and decode:"]
    found = [f"dispatch: unknown phase {p!r}" for p in dispatch if p not in PHASES]
    for phase in PHASES:
        if phase not in dispatch:
            found.append(f"dispatch: {phase} is missing")
        elif dispatch[phase] not in STRATEGIES:
            what = ", ".join(STRATEGIES)
            found.append(f"dispatch: {phase} is {dispatch[phase]!r}, must be one of {what}")
        elif dispatch[phase] == "ragged" and chip in NO_RAGGED:
            found.append(
                f"dispatch: {phase} is 'ragged', which gives wrong numbers on chip {chip!r} "
                "(docs/layouts.md); use 'dense' or 'gather'"
            )
    return found


def _mesh(mesh: Any) -> list[str]:
    if not isinstance(mesh, Mapping) or not mesh:
        return [f"mesh is {mesh!r}, must be a mapping of axis: size"]
    found = []
    for axis, size in mesh.items():
        if not (isinstance(axis, str) and axis.isidentifier()):
            found.append(f"mesh axis {axis!r} is not a name")
        found += _whole(f"size of mesh axis {axis!r}", size, 1)
    return found


def _devices(d: Mapping[str, Any]) -> list[str]:
    """Slices and topology against the mesh."""
    axis, size = next(iter(d["mesh"].items()))
    slices, topology, chip = d.get("slices", 1), d.get("topology"), d.get("chip")
    found = _whole("slices", slices, 1)
    if found:
        return found
    if size % slices:
        found.append(
            f"{slices} slices do not divide mesh axis {axis!r} of size {size}: "
            "the first axis spans the slices"
        )
    if topology is None or not (isinstance(chip, str) and chip in CHIPS):
        return found
    rank, cores = CHIPS[chip]
    if not rank:
        return [*found, f"topology {topology!r}: chip {chip!r} has none"]
    form = f"{chip}:" + "x".join("ABC"[:rank])
    kind, _, dims = topology.partition(":") if isinstance(topology, str) else ("", "", "")
    parts = dims.split("x")
    if kind != chip or len(parts) != rank or not all(p.isdecimal() and int(p) for p in parts):
        return [*found, f"topology {topology!r} is not of the form {form}"]
    chips, devices = math.prod(map(int, parts)), math.prod(d["mesh"].values())
    if slices * chips * cores != devices:
        times = f"{slices} slices x " if slices > 1 else ""
        found.append(
            f"topology {topology} has {times}{chips} chips"
            + (f" of {cores} devices" if cores > 1 else "")
            + f" = {slices * chips * cores} devices, the mesh "
            + " x ".join(f"{a} {n}" for a, n in d["mesh"].items())
            + f" needs {devices}"
        )
    return found


def _rules(rules: Any, replicated: Any, mesh: dict[str, int], *, known: bool) -> list[str]:
    """Coverage of the vocabulary, then each rule, then the roles (where the mesh is ``known``)."""
    if not isinstance(rules, Mapping):
        return [f"rules is {rules!r}, must be a mapping of logical axis: [mesh axes]"]
    if not isinstance(replicated, list | tuple):
        return [f"replicated is {replicated!r}, must be a list of logical axes"]
    found = [
        f"unknown logical axis {name!r}"
        for name in (*rules, *replicated)
        if not (isinstance(name, str) and name in AXES)
    ]
    covered = [*rules, *replicated]
    missing = [name for name in AXES if name not in covered]
    if missing:
        found.append(f"no rule for logical axis {', '.join(map(repr, missing))}")
    twice = [name for name in AXES if covered.count(name) > 1]
    found += [f"logical axis {name!r} has two rules" for name in twice]
    order = list(mesh)
    clean: dict[str, tuple[str, ...]] = {}
    for name, axes in rules.items():
        if not isinstance(axes, list | tuple) or not all(isinstance(a, str) for a in axes):
            found.append(f"rule {name!r} is {axes!r}, must be a list of mesh axes")
            continue
        if not known:
            continue
        unknown = [a for a in axes if a not in mesh]
        found += [
            f"rule {name!r}: {a!r} is no mesh axis; there are {', '.join(order)}" for a in unknown
        ]
        repeated = sorted({a for a in axes if axes.count(a) > 1})
        found += [f"rule {name!r}: mesh axis {a!r} stands twice" for a in repeated]
        if unknown or repeated:
            continue
        if [order.index(a) for a in axes] != sorted(order.index(a) for a in axes):
            found.append(f"rule {name!r}: {list(axes)} must be in the order of the mesh, {order}")
        clean[name] = tuple(a for a in axes if mesh[a] > 1)
    if found or not known:
        return found
    return _roles({name: clean.get(name, ()) for name in AXES}, mesh)


def _roles(rules: dict[str, tuple[str, ...]], mesh: dict[str, int]) -> list[str]:
    """The forms the model runs; axes of size 1 do not count."""

    def show(axes) -> str:
        return "[" + ", ".join(f"{a} ({mesh[a]})" for a in axes) + "]"

    batch, heads = rules["batch"], rules["heads"]
    found = [
        f"mesh axis {a!r} of size {n} is idle: neither 'batch' nor 'heads' uses it"
        for a, n in mesh.items()
        if n > 1 and a not in batch + heads
    ]
    found += [
        f"mesh axis {a!r} of size {mesh[a]} splits both 'batch' and 'heads'; they must be disjoint"
        for a in batch
        if a in heads
    ]
    if rules["head_count"] != heads:
        found.append(
            f"'head_count' over {show(rules['head_count'])} must equal 'heads' over {show(heads)}"
        )
    for name in WITH_HEADS:
        if rules[name] not in ((), heads):
            found.append(
                f"{name!r} over {show(rules[name])} must be [] or equal 'heads' over {show(heads)}"
            )
    found += [
        f"'experts': mesh axis {a!r} of size {mesh[a]} is in neither 'batch' nor 'heads'"
        for a in rules["experts"]
        if a not in batch + heads
    ]
    both = tuple(a for a in mesh if a in batch + heads)
    if rules["cache_sequence"] not in ((), batch, heads, both):
        choices = ", ".join(dict.fromkeys(["[]", show(batch), show(heads), show(both)]))
        found.append(f"'cache_sequence' over {show(rules['cache_sequence'])} is none of {choices}")
    if rules["embed"] not in ((), batch):
        found.append(
            f"'embed' over {show(rules['embed'])} must be [] or equal 'batch' over {show(batch)}"
        )
    found += [
        f"logical axis {name!r} over {show(axes)} must be whole: the model does not split it"
        for name, axes in rules.items()
        if axes and name not in DECIDED
    ]
    return found
