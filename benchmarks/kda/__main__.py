"""Kimi Delta Attention at Kimi K3's sizes: time, floor, error, and the peers' figures beside them.

    python -m benchmarks.kda [--peers DIR] [--rows PATTERN] [--quick] [--json FILE]
    k3jax bench --op kda -- --quick

A row gives the time of a call by two measures (see `benchmarks.kda.timing`), the floor that bytes
or operations set at the rates measured in the same call, the share of it that is reached, and with
--peers what FLA and FlashKDA take for the same arrays, in turn with ours. docs/kernels.md says how
to read it. A row that fails says why and the next one runs; the JSON file is complete at any time.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import importlib.metadata
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from benchmarks.kda import accuracy, cases, ours, peers, table
from benchmarks.kda.ceilings import ceilings
from benchmarks.kda.timing import Kernels, Laps, measure, ratio, reason, spread
from k3jax.errors import InputError

DECODE_NOTE = (
    "ours has the short convolution, its tails, the output gate and the head norm inside; "
    "the peer has only norms, gate and recurrence, and reads less"
)
SHARED_BYTES = 100e9  # inputs beyond these leave no room for a peer


@dataclass
class Run:
    """The options, and what is known so far."""

    options: argparse.Namespace
    kernels: Kernels = field(default_factory=Kernels)
    peers: peers.Peers | None = None
    begin: float = field(default_factory=time.perf_counter)
    report: dict[str, Any] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.begin

    def say(self, text: str) -> None:
        print(f"[{self.seconds:4.0f} s] {text}", flush=True)

    def save(self) -> None:
        if self.options.json is None:
            return
        self.report["seconds"] = self.seconds
        self.report["kernel_times"] = self.kernels.missing or "CUPTI"
        path = Path(self.options.json)
        part = path.with_name(path.name + ".part")
        part.write_text(json.dumps(self.report, indent=1) + "\n")
        part.replace(path)


def about() -> dict[str, Any]:
    """What the numbers belong to."""
    device, versions = jax.devices()[0], {}
    for name in ("jax", "jaxlib", "jax-cuda13-plugin", "flax", "numpy"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    shown = ("XLA_FLAGS", "XLA_PYTHON_CLIENT_", "XLA_CLIENT_", "JAX_")
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": device.device_kind,
        "platform": getattr(device.client, "platform_version", "").split("\n")[0],
        "python": platform.python_version(),
        "versions": versions,
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith(shown)},
    }


def implementations(case: cases.Case, options) -> list[str]:
    """Names to time: those asked for, else "auto" and where it is telling "xla". A layer chooses
    by itself."""
    if case.kind == "layer":
        return ["auto"]
    named = options.implementation
    return named or (["auto", "xla"] if case.compare and not options.quick else ["auto"])


def timed(
    run: Run, case: cases.Case, workload: ours.Workload, compiled: dict[str, Future]
) -> list[dict[str, Any]]:
    """The rows of a case: one for each implementation, each with all its peers."""
    programs, rows = [], {}
    for name, future in compiled.items():
        rows[name] = {"case": case.name, "implementation": name, "notes": []}
        try:
            executable, rows[name]["chosen"] = future.result()
        except Exception as error:
            rows[name]["failed"] = reason(error)
            continue
        if not programs:
            workload.make()
        programs.append(workload.program(name, executable))
    if not programs:
        return list(rows.values())
    others, missing = _others(run, case, workload)
    sides = [*programs, *others]
    laps = measure(sides, run.options.repeats, run.kernels, run.options.lap_ms)
    finite = {p.name: p.finite() for p in programs if p.error is None}
    rates = run.report["ceilings"]
    floor_ms, binds = case.floor(rates["bytes_per_second"], rates["operations_per_second"])
    found = {side.name: _peer(side, laps) for side in others}
    flash = next((s for s in others if s.name == peers.FLASHKDA and s.error is None), None)
    best = _best(laps, [side.name for side in others])
    for program in programs:
        row = rows[program.name]
        if program.error is not None:
            row["failed"] = program.error
            continue
        own, peer = laps[program.name], laps.get(best, Laps())
        row |= {
            "calls": program.calls,
            "sets": workload.sets,
            "floor_ms": floor_ms,
            "binds": binds,
            "bytes": case.moved_bytes,
            "operations": case.operations,
            "kernel_ms": spread(own.kernel),
            "wall_ms": spread(own.wall),
            "kernels": own.kernels,
            "share": floor_ms / statistics.median(own.kernel or own.wall),
            "finite": finite[program.name],
            "temporaries": program.temporaries,
            "against_flashkda": _difference(case, program, flash) if flash else None,
            "peers": found,
            "peer": best,
            "kernel_ratio": ratio(own.kernel, peer.kernel),
            "wall_ratio": ratio(own.wall, peer.wall),
        }
        row["notes"] = missing + _notes(case, row, others)
        problems = {laps[side.name].problem for side in sides if side.error is None} - {""}
        row["notes"] += [f"no kernel times: {problem}" for problem in sorted(problems)]
    return list(rows.values())


def _others(run: Run, case: cases.Case, workload) -> tuple[list[peers.TorchSide], list[str]]:
    """The peers' sides, or a note why there are none; ours is timed in either case."""
    if run.peers is None:
        return [], []
    try:
        return run.peers.sides(case, workload, not run.options.no_chunk), []
    except Exception as error:
        return [], [f"peers FAILED: {reason(error)}"]


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


def _peer(side, laps: dict[str, Laps]) -> dict[str, Any]:
    if side.error is not None:
        return {"failed": side.error}
    own = laps[side.name]
    return {
        "kernel_ms": spread(own.kernel),
        "wall_ms": spread(own.wall),
        "kernels": own.kernels,
        "graph": side.graph is not None,
    }


def _best(laps: dict[str, Laps], names: Sequence[str]) -> str:
    """The quickest of the peers, by kernel time where there is one; "" if there are none."""
    there = [name for name in names if name in laps]
    by_kernels = all(laps[name].kernel for name in there)
    return min(
        there,
        key=lambda n: statistics.median(laps[n].kernel if by_kernels else laps[n].wall),
        default="",
    )


def _notes(case: cases.Case, row: dict[str, Any], others) -> list[str]:
    notes = [side.note for side in others if side.note]
    notes += [f"{side.name} FAILED: {side.error}" for side in others if side.error]
    if not row["finite"]:
        notes.append("NOT FINITE")
    if case.kind == "decode" and row["peer"]:
        notes.append(DECODE_NOTE)
    if case.kind == "decode" and row["temporaries"] > case.state_bytes:
        notes.append(f"{row['temporaries'] / 1e6:.0f} MB of temporaries: a state is copied")
    if not all(value < 0.05 for value in (row["against_flashkda"] or {}).values()):
        notes.append(f"DIFFERS from FlashKDA: {row['against_flashkda']}")
    if row["kernel_ms"] and row["wall_ms"]["median"] > 1.25 * row["kernel_ms"]["median"]:
        notes.append("wall is over 1.25 x kernels: launch gaps or memory copies")
    if row["chosen"]:
        notes.append(row["chosen"])
    return notes


def compile_all(pool: ThreadPoolExecutor, run: Run, work, wanted) -> dict:
    """Starts compilation of (case, implementation) pairs for which ``wanted`` holds."""
    return {
        (case, name): pool.submit(workload.compile, name)
        for case, workload in work
        for name in implementations(case, run.options)
        if wanted(case, name)
    }


def execute(run: Run, chosen: Sequence[cases.Case]) -> int:
    """Compiles everything, then times with nothing else running. Gives the exit status."""
    options, report = run.options, run.report
    report |= {"about": about(), "rows": [], "errors": [], "left_out": []}
    limits = (2, 4) if options.small else (32, 128)
    work = [(case, ours.Workload(case, *limits)) for case in chosen]
    site = peers.unpack(options.peers) if options.peers else None
    triton = site is not None and not options.no_chunk and any(case.triton for case in chosen)
    run.say(f"{report['about']['device']}, jax {jax.__version__}; {len(work)} cases")
    with ThreadPoolExecutor(options.compile_threads) as pool:
        # The portable form and the layer hold products that XLA tunes on the device: they wait
        # until the peers' processes are done with it.
        tuned = lambda case, name: name == "xla" or case.kind == "layer"  # noqa: E731
        compiled = compile_all(pool, run, work, lambda *pair: not tuned(*pair))
        if site is not None and triton and options.warm > 0:
            report["warm"] = peers.warm(site, options.warm)
            run.say(f"FLA's variants: {report['warm']}")
        compiled |= compile_all(pool, run, work, tuned)
    run.say(f"{len(compiled)} programs compiled")
    if site is not None:
        run.peers = peers.Peers(site)
        report["about"]["versions"] |= run.peers.versions()
        report["peers"] = run.peers.notes
        for note in run.peers.notes:
            run.say(note)
    report["ceilings"] = ceilings(run.kernels, options.repeats, options.small)
    report["ceilings"]["kernel_times"] = run.kernels.missing or "CUPTI"
    rates = report["ceilings"]
    run.say(
        f"copy {rates['bytes_per_second'] / 1e12:.3g} TB/s, bf16 product "
        f"{rates['operations_per_second'] / 1e12:.4g} TFLOP/s; "
        + (f"no kernel times: {run.kernels.missing}" if run.kernels.missing else "CUPTI works")
    )
    run.save()
    if not options.no_errors:
        _errors(run, triton)
    for case, workload in work:
        _one(run, case, workload, {n: f for (c, n), f in compiled.items() if c == case})
    print(f"\n{table.timings(report['rows'])}\n")
    if report["errors"]:
        print(table.errors(report["errors"]))
    for name, why in report["left_out"]:
        print(f"{name}: left out: {why}")
    if run.kernels.missing:
        print(f"no kernel times: {run.kernels.missing}")
    run.say("done")
    bad = [r for r in [*report["rows"], *report["errors"]] if "failed" in r]
    bad += [r for r in report["rows"] if not r.get("finite", True)]
    return 1 if bad else 0


def _errors(run: Run, triton: bool) -> None:
    named = run.options.implementation or ["auto", "xla"]
    for case in accuracy.TOYS if run.options.small else accuracy.CASES:
        if run.options.quick and not case.quick:
            continue
        try:
            found = accuracy.rows(case, named, run.peers, triton)
        except Exception as error:
            head = {"case": f"error {case.name}", "implementation": ", ".join(named)}
            found = [head | {"failed": reason(error), "peers": {}}]
        run.report["errors"] += found
        run.say(table.errors(found))
        run.save()


def _one(run: Run, case: cases.Case, workload, compiled: dict[str, Future]) -> None:
    """Times a case, whatever happens in it."""
    report = run.report
    why = None
    if run.seconds > run.options.budget:
        why = f"{run.seconds:.0f} s are over the budget"
    elif run.peers is not None and case.moved_bytes > SHARED_BYTES:
        why = f"{case.moved_bytes / 1e9:.0f} GB leave no room for a peer: run it without --peers"
    if why is not None:
        report["left_out"].append((case.name, why))
        run.say(f"{case.name}: left out: {why}")
    else:
        try:
            found = timed(run, case, workload, compiled)
        except Exception as error:
            head = {"case": case.name, "implementation": ", ".join(compiled)}
            found = [head | {"failed": reason(error), "notes": []}]
        report["rows"] += found
        for row in found:
            run.say("  ".join(table.cells(row)))
    run.save()
    workload.free()
    gc.collect()
    if run.peers is not None:
        run.peers.free()


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="kda", description=(__doc__ or "").splitlines()[0])
    made.add_argument("--rows", metavar="PATTERN", help="cases whose name has this expression")
    made.add_argument("--quick", action="store_true", help="few cases; implies --no-chunk")
    made.add_argument("--no-chunk", action="store_true", help="leave FLA's chunk kernels out")
    made.add_argument("--small", action="store_true", help="toy sizes, on any device")
    made.add_argument(
        "--implementation", nargs="+", metavar="NAME", help='instead of "auto" and some "xla"'
    )
    made.add_argument("--peers", metavar="DIR", help="folder with the peers' whl/")
    made.add_argument("--json", metavar="FILE", help="everything, written after every row")
    made.add_argument("--repeats", type=int, default=5, help="laps of each side")
    made.add_argument("--lap-ms", type=float, default=30, help="queued work in a wall lap")
    made.add_argument("--budget", type=float, default=280, help="start no case after seconds")
    made.add_argument(
        "--warm", type=float, default=120, help="seconds for compiling FLA's variants; 0: not"
    )
    made.add_argument("--compile-threads", type=int, default=8)
    made.add_argument("--no-cupti", action="store_true", help="leave the kernel times out")
    made.add_argument("--no-errors", action="store_true", help="leave the error rows out")
    return made


def checked(options: argparse.Namespace) -> Sequence[cases.Case]:
    """The cases to run.

    Raises:
      InputError: an option that cannot be, naming it.
    """
    for name in options.implementation or ():
        ours.check(name)
    for name in ("repeats", "compile_threads", "lap_ms"):
        if getattr(options, name) <= 0:
            raise InputError(f"--{name.replace('_', '-')} {getattr(options, name)}: not positive")
    if options.json is not None and not Path(options.json).resolve().parent.is_dir():
        raise InputError(f"--json {options.json}: no such folder")
    return cases.choose(options.rows, options.quick, options.small)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    options.no_chunk |= options.quick
    chosen = checked(options)
    # Read when JAX meets its first device. With a peer the two share the memory as they need it;
    # alone JAX takes nearly all of it, in one piece, as 129 GB of a million tokens want.
    if not {"XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"} & set(os.environ):
        os.environ["XLA_CLIENT_MEM_FRACTION"] = "0.95"
    if options.peers:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    run = Run(options)
    if options.no_cupti:
        run.kernels.missing = "--no-cupti"
    return execute(run, chosen)


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except InputError as error:
        raise SystemExit(f"kda: {error}") from None
