"""Which linears the ``ignore`` and ``targets`` lists of compressed-tensors mean, against the files.

The lists are a cross-check. What is quantised is decided by the presence of ``weight_packed``:
K3's own list leaves out linears that are stored in bfloat16.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from k3jax.checkpoint import names as table
from k3jax.config import Config

_EXPERT = re.compile(r"\.experts\.\d+\.w[123]$")
_NOT_LINEAR = re.compile(r"norm\d*$|layernorm$|conv1d$|embed_tokens$|patch_embed|pos_emb")


@dataclass(frozen=True, slots=True)
class Decision:
    """What holds for one linear.

    Attributes:
      quantised: it has ``weight_packed``.
      ignored_by: the first entry of the ignore list that matches it, or None.
    """

    quantised: bool
    ignored_by: str | None


def matcher(entry: str) -> Callable[[str], object]:
    """Whether an entry means a module: ``re:`` is anchored at the start, other names are exact."""
    if entry.startswith("re:"):
        return re.compile(entry.removeprefix("re:")).match
    return {entry, table.PREFIX + entry}.__contains__


def linears(names: Iterable[str]) -> dict[str, bool]:
    """Module name of every linear among canonical tensor names -> whether it is packed."""
    found: dict[str, bool] = {}
    for name in names:
        module, _, leaf = name.rpartition(".")
        if leaf == "weight_packed":
            found[module] = True
        elif leaf == "weight" and not _NOT_LINEAR.search(module):
            found.setdefault(module, False)
    return found


def decisions(config: Config, names: Iterable[str]) -> dict[str, Decision]:
    """The decision for every linear of a checkpoint, from its tensor names alone."""
    entries = config.quantization.ignore if config.quantization else ()
    tests = [(entry, matcher(entry)) for entry in entries]
    result = {}
    for module, packed in linears(names).items():
        hit = next((entry for entry, test in tests if test(module)), None)
        result[module] = Decision(packed, hit)
    return result


def check(config: Config, names: Iterable[str]) -> tuple[list[str], list[str]]:
    """Compares the lists with the files.

    Returns:
      Problems: bad patterns, packed tensors on the ignore list, plain experts that are not on it,
      an expert whose fused parts (w1 gate, w3 up) differ. Unmatched: entries that match no linear.
    """
    rules = config.quantization
    names = list(names)
    if rules is None:
        return _halves(linears(names)), []
    bad = []
    for entry in (*rules.ignore, *rules.targets):
        try:
            re.compile(entry.removeprefix("re:") if entry.startswith("re:") else "")
        except re.error as error:
            bad.append(f"quantization_config: {entry!r} is not a regular expression: {error}")
    if bad:
        return bad, []
    found = decisions(config, names)
    problems = _halves(linears(names))
    for module, decision in found.items():
        if decision.quantised and decision.ignored_by is not None:
            problems.append(
                f"{module}.weight_packed is quantised, yet the ignore list names it "
                f"({decision.ignored_by!r})"
            )
        elif not decision.quantised and decision.ignored_by is None and _EXPERT.search(module):
            problems.append(
                f"{module}.weight is not quantised, yet no entry of the ignore list names it"
            )
    unmatched = [
        f"ignore entry {entry!r}" for entry in rules.ignore if not any(map(matcher(entry), found))
    ]
    unmatched += [
        f"target {entry!r}"
        for entry in rules.targets
        if entry != "Linear" and not any(map(matcher(entry), found))
    ]
    return problems, unmatched


def _halves(found: dict[str, bool]) -> list[str]:
    problems = []
    for module, packed in found.items():
        if _EXPERT.search(module) and module.endswith(".w1"):
            other = module[:-1] + "3"
            if found.get(other, packed) != packed:
                first, second = (module, other) if packed else (other, module)
                problems.append(
                    f"{first} is quantised and {second} is not: "
                    "gate and up projection are one array in memory"
                )
    return problems
