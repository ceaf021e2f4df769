"""Which part of a program each kernel belongs to: launches in their order beside the compiled HLO.

XLA names a kernel after the fusion it comes from, whose metadata have the `jax.named_scope`s of the
model. Hand-written kernels and those of libraries have names of their own: they are matched by
order, the n-th launch with the n-th custom call, where the numbers agree.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from sharding.report import OTHER, component_of

_COMMENT = re.compile(r"/\*.*?\*/")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = [^=]*? ([a-z][\w\-]*)\(")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_CALLED = re.compile(r"(?:calls|to_apply|body)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_TRIPS = re.compile(r"known_trip_count\W+n\W+(\d+)")
_LIBRARY = re.compile(r"nvjet|gemm|gemv|cutlass|splitK|cublas|cudnn")
MOSAIC, LIBRARY = "Mosaic", "library"


@dataclass(frozen=True)
class _Instruction:
    name: str
    operation: str
    part: str
    called: tuple[str, ...]
    kind: str  # of a custom call that is a kernel
    trips: int


@dataclass(frozen=True)
class Scopes:
    """Parts of the kernels of a compiled program.

    Attributes:
      fusions: kernel name -> part.
      custom: `MOSAIC` or `LIBRARY` -> the parts of its custom calls in the order they run.
    """

    fusions: dict[str, str]
    custom: dict[str, list[str]]


def scopes(text: str) -> Scopes:
    """Read off the text of a compiled module, which lists instructions in the order they run."""
    module: dict[str, list[_Instruction]] = {}
    entry = here = ""
    for line in map(_strip, text.splitlines()):
        head = _COMPUTATION.match(line)
        found = _INSTRUCTION.match(line)
        if found and here:
            module[here].append(_instruction(line, *found.groups()))
        elif head:
            here = head[2]
            module[here] = []
            entry = here if head[1] else entry
    fusions = {}
    for lines in module.values():
        for one in lines:
            inside = (x.part for name in one.called for x in module.get(name, ()))
            most = Counter(part for part in inside if part != OTHER).most_common(1)
            part = most[0][0] if one.part == OTHER and most else one.part
            fusions[re.sub(r"[.\-]", "_", one.name)] = part
    custom: dict[str, list[str]] = {MOSAIC: [], LIBRARY: []}
    for one in _run(module, entry):
        if one.kind:
            custom[one.kind].append(one.part)
    return Scopes(fusions, custom)


def _strip(line: str) -> str:
    return _COMMENT.sub("", line)


def _instruction(line: str, name: str, operation: str) -> _Instruction:
    scope, target, trips = _OP_NAME.search(line), _TARGET.search(line), _TRIPS.search(line)
    called = _CALLED.findall(line)
    for names in _BRANCHES.findall(line):
        called += re.findall(r"[\w.\-]+", names)
    part = component_of(scope[1]) if scope else OTHER
    kind = ""
    if operation == "custom-call" and target:
        known = {"mosaic": MOSAIC, "__cublas": LIBRARY, "__cudnn": LIBRARY}
        kind = next((k for start, k in known.items() if target[1].startswith(start)), "")
    return _Instruction(name, operation, part, tuple(called), kind, int(trips[1]) if trips else 1)


def _run(module: dict[str, list[_Instruction]], name: str) -> Iterator[_Instruction]:
    """The instructions of a computation and of those that it calls, as they run."""
    for one in module.get(name, ()):
        yield one
        if one.operation in ("call", "while", "conditional", "async-start"):
            for _ in range(one.trips):
                for called in one.called:
                    yield from _run(module, called)


@dataclass(frozen=True)
class Spent:
    """Milliseconds of one run: kernels of a name in a part, and how many launches."""

    part: str
    name: str
    launches: float
    milliseconds: float


def spent(launches: Sequence[tuple[str, float]], known: Scopes, runs: int = 1) -> list[Spent]:
    """What (name, milliseconds) of ``runs`` runs, in order, went to; the most first."""
    orders: dict[str, list[int]] = {MOSAIC: [], LIBRARY: []}
    parts = [OTHER] * len(launches)
    for i, (name, _) in enumerate(launches):
        if name in known.fusions:
            parts[i] = known.fusions[name]
        elif "mosaic_gpu" in name:
            orders[MOSAIC].append(i)
        elif _LIBRARY.search(name):
            orders[LIBRARY].append(i)
    for kind, at in orders.items():
        calls = known.custom[kind]
        if len(at) == runs * len(calls):
            for n, i in enumerate(at):
                parts[i] = calls[n % len(calls)]
    total: dict[tuple[str, str], list[float]] = defaultdict(list)
    for part, (name, ms) in zip(parts, launches, strict=True):
        total[part, name].append(ms)
    made = [Spent(*key, len(ms) / runs, sum(ms) / runs) for key, ms in total.items()]
    return sorted(made, key=lambda one: -one.milliseconds)


def profile(record: Callable, program, runs: int = 2) -> list[Spent]:
    """`spent` of one launch of a program of ours. ``record`` is that of
    `benchmarks.harness.timing.Kernels`; one launch more finds the GPU idle and is left out."""

    def run():
        for _ in range(runs + 1):
            program.direct()
        program.wait()

    launches = record(run)
    known = scopes(program.compiled.as_text())
    each = len(launches) // (runs + 1)
    if each * (runs + 1) != len(launches):  # a loop of unknown length, or a lost record
        return spent(launches, known, runs + 1)
    return spent(launches[each:], known, runs)
