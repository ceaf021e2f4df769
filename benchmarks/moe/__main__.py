"""The routed experts at Kimi K3's sizes: time, floor, error, and the peers' figures beside them.

    python -m benchmarks.moe [--peers DIR] [--rows PATTERN] [--quick] [--json FILE]
    k3jax bench --op moe -- --quick

`benchmarks.harness.run` says what a row holds; the peers are triton_kernels and Marlin.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.harness import compare, warming
from benchmarks.harness import run as harness
from benchmarks.harness.benchmark import Added, Benchmark
from benchmarks.harness.run import Run
from benchmarks.moe import accuracy, cases, ours, peers, report

NOTES = {
    peers.OGS: "triton_kernels: tokens are sorted before the clock starts, ours sorts inside; its "
    "activation is gate sigmoid(gate) (up + 1), ours is SiTU",
    peers.MARLIN: "Marlin: tokens are aligned inside; its activation is torch's SiLU and a product",
}


class MoE(Benchmark):
    name = "moe"
    description = (__doc__ or "").splitlines()[0]
    quick_help = "uniform routing only"
    cases, toys = cases.CASES, cases.TOYS
    fp8 = True
    portable = ours.PORTABLE

    def __init__(self):
        self.compare = True

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--warm", type=float, default=120, help="seconds for compiling peers' kernels; 0: not"
        )

    def settle(self, options: argparse.Namespace) -> None:
        self.compare = not options.no_errors

    def check(self, implementation: str) -> None:
        ours.check(implementation)

    def workload(self, case: cases.Case, options: argparse.Namespace) -> ours.Workload:
        return ours.Workload(case)

    def late(self, case: cases.Case, implementation: str) -> bool:
        """What has no kernel holds products that XLA tunes."""
        return ours.chosen(case, implementation) not in ours.kernels()

    def floor(self, case: cases.Case, rates) -> tuple[float, str]:
        return case.floor(rates)

    def unpack(self, folder: str) -> Path:
        return peers.unpack(folder)

    def warm(self, run: Run, site: Path, chosen: Sequence[cases.Case]) -> None:
        if run.options.warm > 0 and not all(case.eight for case in chosen):
            said = warming.warm("benchmarks.moe.peers", site, run.options.warm, peers.SHARDS)
            run.report["warm"] = said
            run.say(f"peers' kernels: {said}")

    def peers(self, site: Path) -> peers.Peers:
        return peers.Peers(site)

    def sides(self, run: Run, case: cases.Case, workload):
        return run.peers.sides(case, workload)

    def added(self, case: cases.Case, workload, program, row, sides) -> Added:
        """Errors, the load, and temporaries as a share of all packed weights."""
        found = accuracy.found(case, workload, program, sides) if self.compare else {}
        entries = {
            "errors": found,
            "temporaries_share": row["temporaries"] / case.packed_bytes,
            "hit": case.hit,
        }
        there = [side.name for side in sides if side.error is None]
        notes = [f"{case.hit:.0f} of {case.experts} experts, at most {case.most} tokens for one"]
        notes += [text for name, text in NOTES.items() if name in there]
        return Added(entries, notes + compare.notes(found, partial(accuracy.limit, case)))

    def summary(self, found) -> list[str]:
        return report.lines(found)


def main(arguments: Sequence[str] | None = None) -> int:
    return harness.main(MoE(), arguments)


if __name__ == "__main__":
    harness.script(MoE())
