"""One period of Kimi K3 at full size, decoding on one device: time, floor by part, kernels by part.

    python -m benchmarks.period [--rows PATTERN] [--quick] [--json FILE]
    k3jax bench --op period -- --quick

Three KDA layers and a global one, each with its mixture of 896 experts in MXFP4: 67 GB. A call is
one step of `Transformer.backbone` on hidden states, through the model's scan, with the caches
updated in place. Embedding, output mix and head are not part of it. XLA unrolls a scan over one
period, so rows of two periods with half the experts show what the loop costs.
`benchmarks.harness.run` says what a row holds; there are no peers.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.harness import run as harness
from benchmarks.harness.benchmark import Added, Benchmark
from benchmarks.harness.profile import profile
from benchmarks.harness.run import Run
from benchmarks.harness.timing import Kernels, reason
from benchmarks.period import cases, ours, report
from k3jax.errors import InputError

ROOM = 2e9  # bytes for temporaries and programs


class Period(Benchmark):
    name = "period"
    description = (__doc__ or "").splitlines()[0]
    quick_help = "8,192 tokens; one row with 131,072 and one of two periods"
    cases, toys = cases.CASES, cases.TOYS

    def __init__(self):
        self.store = ours.Store()
        self.rates: Mapping[str, Any] = {}
        self.cupti = True

    def settle(self, options: argparse.Namespace) -> None:
        self.cupti = not options.no_cupti
        if options.peers:
            raise InputError(f"--peers {options.peers}: nobody else has such a period")

    def check(self, implementation: str) -> None:
        if implementation != "auto":
            raise InputError(f"--implementation {implementation}: layers choose by themselves")

    def whole(self, case: cases.Case) -> bool:
        return True

    def workload(self, case: cases.Case, options: argparse.Namespace) -> ours.Workload:
        return ours.Workload(case, self.store)

    def unpack(self, folder: str) -> Path:
        raise InputError(f"--peers {folder}: nobody else has such a period")

    def left_out(self, run: Run, case: cases.Case) -> str | None:
        limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
        needed = case.resident_bytes + ROOM
        if limit is not None and needed > limit:
            return f"{needed / 1e9:.0f} GB and the device has {limit / 1e9:.0f}"
        return None

    def floor(self, case: cases.Case, rates) -> tuple[float, str]:
        """Of uniform routing; `added` replaces it by that of the experts that were hit."""
        self.rates = rates
        return sum(case.floors(rates).values()), "parts"

    def added(self, case: cases.Case, workload, program, row, sides) -> Added:
        """The experts that were hit, the floors with them, and kernels by part."""
        _, ids = program.out[-1]
        hit = [len(np.unique(layer)) for layer in np.asarray(ids)]
        parts = case.floors(self.rates, sum(hit))
        floor = sum(parts.values())
        spent, notes = [], ["embedding, output mix and head are not part of it"]
        kernels = Kernels()
        if self.cupti and kernels.missing is None:
            try:
                spent = profile(kernels.record, program)
            except Exception as error:  # the times stand
                notes.append(f"no kernels by part: {reason(error)}")
        moved = sum(part.bytes for part in case.parts(sum(hit)).values())
        entries = {
            "hit": hit,
            "experts": case.experts,
            "parts": parts,
            "profile": [asdict(one) for one in spent],
            "floor_ms": floor,
            "bytes": round(moved),
            "share": row["share"] * floor / row["floor_ms"],
            "resident_bytes": case.resident_bytes,
        }
        return Added(entries, notes)

    def summary(self, found) -> list[str]:
        return report.lines(found)


def main(arguments: Sequence[str] | None = None) -> int:
    return harness.main(Period(), arguments)


if __name__ == "__main__":
    harness.script(Period())
