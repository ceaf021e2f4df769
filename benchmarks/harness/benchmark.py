"""What a benchmark states: its cases, the programs of this repository, and the peers.

`benchmarks.harness.run` does the rest. A new one subclasses `Benchmark`, and its `__main__` calls
``run.main``.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from benchmarks.harness.peers import Peers, TorchSide
from benchmarks.harness.programs import Program
from k3jax.errors import InputError

if TYPE_CHECKING:
    from benchmarks.harness.run import Run


class Case(Protocol):
    """One row: a shape, with the least bytes and operations that it needs.

    Attributes:
      name: what the table says and ``--rows`` searches.
      quick: part of a quick run.
    """

    @property
    def name(self) -> str: ...

    @property
    def quick(self) -> bool: ...

    @property
    def moved_bytes(self) -> int: ...

    @property
    def operations(self) -> int: ...


class Workload(Protocol):
    """The arrays of a case, made once for all sides; see `benchmarks.harness.programs.chain`.

    Attributes:
      sets: of inputs, in turn.
    """

    sets: int

    def make(self) -> None: ...

    def free(self) -> None: ...

    def compile(self, implementation: str) -> tuple[Any, str]:
        """(compiled program, what "auto" said) without making an array."""
        ...

    def program(self, implementation: str, compiled) -> Program: ...


@dataclass
class Added:
    """What a benchmark adds to a row: entries, and notes below the table."""

    entries: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


class Benchmark:
    """Subclasses give the names and cases and override what differs for them.

    Attributes:
      name: of the command.
      description: one line for --help.
      quick_help: what --quick leaves out.
      cases, toys: full sizes, and those of --small.
      fp8: whether a floor needs the rate of fp8 products.
      portable: the implementation that is timed beside "auto" where that is telling.
    """

    name: str
    description: str
    quick_help = "few cases"
    cases: Sequence[Any]
    toys: Sequence[Any]
    fp8 = False
    portable = "xla"

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Options of its own."""

    def settle(self, options: argparse.Namespace) -> None:
        """Options that follow from others."""

    def check(self, implementation: str) -> None:
        """Refuses a name that the ops do not have.

        Raises:
          InputError: naming what there is.
        """
        raise NotImplementedError

    def choose(self, options: argparse.Namespace) -> Sequence[Any]:
        """The cases whose name matches; those of a quick run if that is asked for.

        Raises:
          InputError: a pattern that is no regular expression or matches nothing.
        """
        return choose(self.toys if options.small else self.cases, options.rows, options.quick)

    def whole(self, case) -> bool:
        """Whether the case runs layers, which choose their implementations by themselves."""
        return getattr(case, "kind", "") == "layer"

    def implementations(self, case, options: argparse.Namespace) -> list[str]:
        """Names to time: those asked for, else "auto" and where it is telling the portable form;
        whole layers choose."""
        if self.whole(case):
            return ["auto"]
        compared = case.compare and not options.quick
        return options.implementation or (["auto", self.portable] if compared else ["auto"])

    def workload(self, case, options: argparse.Namespace) -> Workload:
        raise NotImplementedError

    def late(self, case, implementation: str) -> bool:
        """Whether XLA tunes the program on the device: it waits until the peers' processes are
        done with it. The portable form and whole layers hold products that XLA tunes."""
        return implementation == self.portable or self.whole(case)

    def unpack(self, folder: str) -> Path:
        """Where the peers lie ready for import.

        Raises:
          InputError: a folder without them.
        """
        raise NotImplementedError

    def warm(self, run: Run, site: Path, chosen: Sequence[Any]) -> None:
        """Compiles what the peers would compile for minutes in the first call."""

    def peers(self, site: Path) -> Peers:
        raise NotImplementedError

    def sides(self, run: Run, case, workload) -> Sequence[TorchSide]:
        """The peers of a case on the arrays of its workload."""
        raise NotImplementedError

    def left_out(self, run: Run, case) -> str | None:
        """Why a case cannot run; None if it can."""
        return None

    def floor(self, case, rates: Mapping[str, Any]) -> tuple[float, str]:
        """(milliseconds that no version can beat, "bytes" or "operations": which says so), at the
        rates of `benchmarks.harness.ceilings`."""
        return case.floor(rates["bytes_per_second"], rates["operations_per_second"])

    def added(self, case, workload, program: Program, row: dict[str, Any], sides) -> Added:
        """Called after the laps, with the row as it is and the sides that worked and did not."""
        return Added()

    def errors(self, run: Run, chosen: Sequence[Any]) -> None:
        """Adds rows of errors to ``run.report["errors"]``, each told as it is found."""

    def error_text(self, rows: list[dict[str, Any]]) -> str:
        raise NotImplementedError

    def summary(self, report: dict[str, Any]) -> list[str]:
        """Lines at the end: what was asked for, and whether it is reached."""
        return []


def choose(cases: Sequence[Any], pattern: str | None, quick: bool) -> Sequence[Any]:
    """`Benchmark.choose` of cases."""
    cases = [case for case in cases if case.quick or not quick]
    if pattern is None:
        return cases
    try:
        found = [case for case in cases if re.search(pattern, case.name)]
    except re.error as error:
        raise InputError(f"--rows {pattern}: not a regular expression: {error}") from None
    if not found:
        raise InputError(f"--rows {pattern}: none of {'; '.join(case.name for case in cases)}")
    return found
