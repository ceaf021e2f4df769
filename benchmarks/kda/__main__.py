"""Kimi Delta Attention at Kimi K3's sizes: time, floor, error, and the peers' figures beside them.

    python -m benchmarks.kda [--peers DIR] [--rows PATTERN] [--quick] [--json FILE]
    k3jax bench --op kda -- --quick

`benchmarks.harness.run` says what a row holds; the peers are FLA and FlashKDA.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import run as harness
from benchmarks.harness import warming
from benchmarks.harness.benchmark import Added, Benchmark
from benchmarks.harness.run import Run
from benchmarks.harness.timing import reason
from benchmarks.kda import accuracy, cases, ours, peers

DECODE_NOTE = (
    "ours has the short convolution, its tails, the output gate and the head norm inside; "
    "the peer has only norms, gate and recurrence, and reads less"
)
SHARED_BYTES = 100e9  # inputs beyond these leave no room for a peer


class KDA(Benchmark):
    name = "kda"
    description = (__doc__ or "").splitlines()[0]
    quick_help = "few cases; implies --no-chunk"
    cases, toys = cases.CASES, cases.TOYS

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--no-chunk", action="store_true", help="leave FLA's chunk kernels out")
        parser.add_argument(
            "--warm", type=float, default=120, help="seconds for compiling FLA's variants; 0: not"
        )

    def settle(self, options: argparse.Namespace) -> None:
        options.no_chunk |= options.quick

    def check(self, implementation: str) -> None:
        ours.check(implementation)

    def workload(self, case: cases.Case, options: argparse.Namespace) -> ours.Workload:
        return ours.Workload(case, *((2, 4) if options.small else (32, 128)))

    def unpack(self, folder: str) -> Path:
        return peers.unpack(folder)

    def warm(self, run: Run, site: Path, chosen: Sequence[cases.Case]) -> None:
        if self._triton(run, chosen) and run.options.warm > 0:
            run.report["warm"] = warming.warm(
                "benchmarks.kda.peers", site, run.options.warm, peers.SHARDS
            )
            run.say(f"FLA's variants: {run.report['warm']}")

    def _triton(self, run: Run, chosen: Sequence[cases.Case]) -> bool:
        """Whether FLA's chunk kernels are among the peers."""
        wanted = run.options.peers and not run.options.no_chunk
        return bool(wanted) and any(case.triton for case in chosen)

    def peers(self, site: Path) -> peers.Peers:
        return peers.Peers(site)

    def sides(self, run: Run, case: cases.Case, workload):
        return run.peers.sides(case, workload, not run.options.no_chunk)

    def left_out(self, run: Run, case: cases.Case) -> str | None:
        if run.peers is not None and case.moved_bytes > SHARED_BYTES:
            return (
                f"{case.moved_bytes / 1e9:.0f} GB leave no room for a peer: run it without --peers"
            )
        return None

    def added(self, case: cases.Case, workload, program, row, sides) -> Added:
        """The difference from FlashKDA, and what to mind about decode rows."""
        flash = next((s for s in sides if s.name == peers.FLASHKDA and s.error is None), None)
        found = _difference(case, program, flash) if flash else None
        notes = []
        if case.kind == "decode" and row["peer"]:
            notes.append(DECODE_NOTE)
        if case.kind == "decode" and row["temporaries"] > case.state_bytes:
            notes.append(f"{row['temporaries'] / 1e6:.0f} MB of temporaries: a state is copied")
        if not all(value < 0.05 for value in (found or {}).values()):
            notes.append(f"DIFFERS from FlashKDA: {found}")
        return Added({"against_flashkda": found}, notes)

    def errors(self, run: Run, chosen: Sequence[cases.Case]) -> None:
        options = run.options
        named, triton = options.implementation or ["auto", "xla"], self._triton(run, chosen)
        for case in accuracy.TOYS if options.small else accuracy.CASES:
            if case.quick or not options.quick:
                label, inputs = f"error {case.name}", (case, named, run.peers, triton)
                harness.add_errors(run, label, lambda inputs=inputs: accuracy.rows(*inputs))

    def error_text(self, rows) -> str:
        return accuracy.text(rows)


def _difference(case: cases.Case, program, flash) -> dict[str, float]:
    """Relative L2 difference of ours and FlashKDA's, at full size: states, and the last tokens.
    NaN if it cannot be had; the times stand."""
    try:
        (o, state), (other_o, other_state, _) = program.out, flash.results
        found = {"state": accuracy.error(state, other_state.cpu().numpy())}
        if case.lengths is None:
            last = other_o[:, -256:].float().cpu().numpy()
            found["o"] = accuracy.error(o[:, -256:], last)
        return found
    except Exception as error:
        print(f"no difference from FlashKDA: {reason(error)}", flush=True)
        return {"state": math.nan}


def main(arguments: Sequence[str] | None = None) -> int:
    return harness.main(KDA(), arguments)


if __name__ == "__main__":
    harness.script(KDA())
