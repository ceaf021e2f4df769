"""Attention Residuals at Kimi K3's sizes: time, floor, error, and the peer's figures beside them.

    python -m benchmarks.attention_residuals [--peers DIR] [--rows PATTERN] [--json FILE]
    k3jax bench --op attention_residuals -- --quick

`benchmarks.harness.run` says what a row holds; the peer is FLA's fused kernel.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.attention_residuals import accuracy, cases, ours, peers, report
from benchmarks.harness import compare, warming
from benchmarks.harness import run as harness
from benchmarks.harness.benchmark import Added, Benchmark
from benchmarks.harness.run import Run

BLOCK_NOTE = (
    "the bank of 7.3 MB, or in two phases the 44 MB of its scored part, can stay in the L2 cache "
    "between reads; in a model weights pass in between"
)


class AttentionResiduals(Benchmark):
    name = "attention_residuals"
    description = (__doc__ or "").splitlines()[0]
    quick_help = "without the portable form"
    cases, toys = cases.CASES, cases.TOYS

    def __init__(self):
        self.compare = True

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--warm", type=float, default=120, help="seconds for compiling FLA's variants; 0: not"
        )

    def settle(self, options: argparse.Namespace) -> None:
        self.compare = not options.no_errors

    def check(self, implementation: str) -> None:
        ours.check(implementation)

    def whole(self, case: cases.Case) -> bool:
        """The two forms of a block are cases; each has one way to run."""
        return case.kind != "read"

    def workload(self, case: cases.Case, options: argparse.Namespace) -> ours.Workload:
        return ours.Workload(case, *((2, 4) if options.small else (24, 48)))

    def unpack(self, folder: str) -> Path:
        return peers.unpack(folder)

    def warm(self, run: Run, site: Path, chosen: Sequence[cases.Case]) -> None:
        if run.options.warm > 0 and any(case.kind == "read" for case in chosen):
            module, seconds = "benchmarks.attention_residuals.peers", run.options.warm
            said = warming.warm(module, site, seconds, peers.SHARDS)
            run.report["warm"] = said
            run.say(f"FLA's variants: {said}")

    def peers(self, site: Path) -> peers.Peers:
        return peers.Peers(site)

    def sides(self, run: Run, case: cases.Case, workload):
        return run.peers.sides(case, workload)

    def added(self, case: cases.Case, workload, program, row, sides) -> Added:
        found = accuracy.found(case, workload, program, sides) if self.compare else {}
        notes = [BLOCK_NOTE] if self.whole(case) else []
        return Added({"errors": found}, notes + compare.notes(found, lambda name: accuracy.ERROR))

    def summary(self, found) -> list[str]:
        return report.lines(found)


def main(arguments: Sequence[str] | None = None) -> int:
    return harness.main(AttentionResiduals(), arguments)


if __name__ == "__main__":
    harness.script(AttentionResiduals())
