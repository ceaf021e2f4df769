"""Gated DSA and MLA at Kimi K3.1's sizes: time, floor, error, and the peers' figures beside them.

    python -m benchmarks.dsa [--peers DIR] [--rows PATTERN] [--quick] [--json FILE]
    k3jax bench --op dsa -- --quick

`benchmarks.harness.run` says what a row holds; the peers are DeepGEMM, torch.topk and FlashMLA.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

import jax

from benchmarks.dsa import accuracy, cases, ours, peers, report
from benchmarks.harness import run as harness
from benchmarks.harness.benchmark import Added, Benchmark
from benchmarks.harness.run import Run
from benchmarks.harness.timing import reason
from k3jax.errors import InputError


class DSA(Benchmark):
    name = "dsa"
    description = (__doc__ or "").splitlines()[0]
    quick_help = "the rows that were asked for"
    cases, toys = cases.CASES, cases.TOYS
    fp8 = True

    def __init__(self):
        self.loaded: peers.Peers | None = None
        self.without: str | None = None
        self.compare = True

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--without", metavar="PATTERN", help="leave out peers whose name has this expression"
        )

    def settle(self, options: argparse.Namespace) -> None:
        self.without, self.compare = options.without, not options.no_errors
        if self.without is not None:
            try:
                re.compile(self.without)
            except re.error as error:
                what = f"--without {self.without}: not a regular expression: {error}"
                raise InputError(what) from None

    def check(self, implementation: str) -> None:
        ours.check(implementation)

    def workload(self, case: cases.Case, options: argparse.Namespace) -> ours.Workload:
        return ours.Workload(case, *((2, 4) if options.small else (24, 96)))

    def floor(self, case: cases.Case, rates) -> tuple[float, str]:
        return case.floor(rates)

    def unpack(self, folder: str) -> Path:
        return peers.unpack(folder)

    def warm(self, run: Run, site: Path, chosen: Sequence[cases.Case]) -> None:
        if any(case.kind in ("select", "both") for case in chosen):
            try:
                run.report["warm"] = self.peers(site).warm()
            except Exception as error:  # said again when they are loaded
                run.report["warm"] = reason(error)
            run.say(f"DeepGEMM's kernels: {run.report['warm']}")

    def peers(self, site: Path) -> peers.Peers:
        """Loaded once, with the warming or after it."""
        if self.loaded is None:
            self.loaded = peers.Peers(site, self.without)
        return self.loaded

    def sides(self, run: Run, case: cases.Case, workload):
        return run.peers.sides(case, workload)

    def added(self, case: cases.Case, workload, program, row, sides) -> Added:
        """Errors, and the most memory that JAX had in use since the start."""
        stats = jax.devices()[0].memory_stats() or {}
        entries = {"device_peak": stats.get("peak_bytes_in_use"), "errors": {}}
        if self.compare:
            entries["errors"] = accuracy.found(case, workload, program, sides)
        return Added(entries, accuracy.notes(case, entries["errors"]))

    def summary(self, found) -> list[str]:
        return report.lines(found)


def main(arguments: Sequence[str] | None = None) -> int:
    return harness.main(DSA(), arguments)


if __name__ == "__main__":
    harness.script(DSA())
