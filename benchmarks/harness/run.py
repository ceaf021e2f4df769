"""Runs a benchmark: compiles everything, then times one row after the other and tells of each.

A row gives the time of a call by two measures (see `benchmarks.harness.timing`), the floor that
bytes or operations set at the rates measured in the same call, the share of it that is reached, and
with --peers what others take for the same arrays, in turn with ours. docs/kernels.md says how to
read it. A row that fails says why and the next one runs; the JSON file is complete at any time.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import importlib.metadata
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from benchmarks.harness import table
from benchmarks.harness.benchmark import Added, Benchmark, Workload
from benchmarks.harness.ceilings import ceilings
from benchmarks.harness.peers import TorchSide
from benchmarks.harness.timing import Kernels, Laps, measure, ratio, reason, spread
from k3jax.errors import InputError


@dataclass
class Run:
    """The benchmark, the options, and what is known so far."""

    benchmark: Benchmark
    options: argparse.Namespace
    kernels: Kernels = field(default_factory=Kernels)
    peers: Any = None  # `benchmark.peers` once they are loaded
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


def versions(*more: str) -> dict[str, str]:
    """Of what is installed of JAX and ``more``."""
    found = {}
    for name in ("jax", "jaxlib", "jax-cuda13-plugin", "flax", "numpy", *more):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def environment(*prefixes: str) -> dict[str, str]:
    """The settings whose names begin so."""
    return {k: v for k, v in sorted(os.environ.items()) if k.startswith(prefixes)}


def about() -> dict[str, Any]:
    """What the numbers belong to."""
    device = jax.devices()[0]
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": device.device_kind,
        "platform": getattr(device.client, "platform_version", "").split("\n")[0],
        "python": platform.python_version(),
        "versions": versions(),
        "environment": environment("XLA_FLAGS", "XLA_PYTHON_CLIENT_", "XLA_CLIENT_", "JAX_"),
    }


def timed(run: Run, case, workload: Workload, compiled: dict[str, Future]) -> list[dict[str, Any]]:
    """The rows of a case: one for each implementation, each with all its peers."""
    benchmark = run.benchmark
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
    floor_ms, binds = benchmark.floor(case, run.report["ceilings"])
    found = {side.name: _peer(side, laps) for side in others}
    best = _best(laps, [side.name for side in others if not side.part])
    for program in programs:
        row = rows[program.name]
        if program.error is not None:
            row["failed"] = program.error
            continue
        own = laps[program.name]
        ratios = {name: _ratios(own, laps[name]) for name in found if name in laps}
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
            "peers": found,
            "peer": best,
            "ratios": ratios,
            "kernel_ratio": ratios.get(best, {}).get("kernel"),
            "wall_ratio": ratios.get(best, {}).get("wall"),
        }
        try:
            added = benchmark.added(case, workload, program, row, others)
        except Exception as error:  # the times stand
            added = Added(notes=[f"FAILED after the laps: {reason(error)}"])
        row |= added.entries
        row["notes"] = missing + _notes(row, others, added.notes)
        problems = {laps[side.name].problem for side in sides if side.error is None} - {""}
        row["notes"] += [f"no kernel times: {problem}" for problem in sorted(problems)]
    return list(rows.values())


def _others(run: Run, case, workload) -> tuple[Sequence[TorchSide], list[str]]:
    """The peers' sides, or a note why there are none; ours is timed in either case."""
    if run.peers is None:
        return [], []
    try:
        return run.benchmark.sides(run, case, workload), []
    except Exception as error:
        return [], [f"peers FAILED: {reason(error)}"]


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


def _ratios(own: Laps, peer: Laps) -> dict[str, Any]:
    return {"kernel": ratio(own.kernel, peer.kernel), "wall": ratio(own.wall, peer.wall)}


def _best(laps: dict[str, Laps], names: Sequence[str]) -> str:
    """The quickest of the peers, by kernel time where there is one; "" if there are none."""
    there = [name for name in names if name in laps]
    by_kernels = all(laps[name].kernel for name in there)
    return min(
        there,
        key=lambda n: statistics.median(laps[n].kernel if by_kernels else laps[n].wall),
        default="",
    )


def _notes(row: dict[str, Any], others, added: list[str]) -> list[str]:
    notes = [side.note for side in others if side.note]
    notes += [f"{side.name} FAILED: {side.error}" for side in others if side.error]
    if not row["finite"]:
        notes.append("NOT FINITE")
    notes += added
    if row["kernel_ms"] and row["wall_ms"]["median"] > 1.25 * row["kernel_ms"]["median"]:
        notes.append("wall is over 1.25 x kernels: launch gaps or memory copies")
    if row["chosen"]:
        notes.append(row["chosen"])
    return notes


Work = list[tuple[Any, Workload]]


def compile_all(
    pool: ThreadPoolExecutor, run: Run, work: Work, wanted: Callable[[Any, str], bool]
) -> dict[tuple[Any, str], Future]:
    """Starts compilation of (case, implementation) pairs for which ``wanted`` holds."""
    return {
        (case, name): pool.submit(workload.compile, name)
        for case, workload in work
        for name in run.benchmark.implementations(case, run.options)
        if wanted(case, name)
    }


def execute(run: Run, chosen: Sequence[Any]) -> int:
    """Compiles everything, then times with nothing else running. Gives the exit status."""
    benchmark, options, report = run.benchmark, run.options, run.report
    report |= {"about": about(), "rows": [], "errors": [], "left_out": []}
    work: Work = [(case, benchmark.workload(case, options)) for case in chosen]
    site = benchmark.unpack(options.peers) if options.peers else None
    run.say(f"{report['about']['device']}, jax {jax.__version__}; {len(work)} cases")
    with ThreadPoolExecutor(options.compile_threads) as pool:
        late = benchmark.late
        compiled = compile_all(pool, run, work, lambda *pair: not late(*pair))
        if site is not None:
            benchmark.warm(run, site, chosen)
        compiled |= compile_all(pool, run, work, late)
    run.say(f"{len(compiled)} programs compiled")
    if site is not None:
        _meet(run, site)
    _rates(run)
    if not options.no_errors:
        benchmark.errors(run, chosen)
    for case, workload in work:
        _one(run, case, workload, {n: f for (c, n), f in compiled.items() if c == case})
    return _close(run)


def _meet(run: Run, site: Path) -> None:
    """Loads the peers; without them ours is timed alone."""
    report = run.report
    try:
        run.peers = run.benchmark.peers(site)
        report["about"]["versions"] |= run.peers.versions()
        report["peers"] = run.peers.notes
    except Exception as error:
        report["peers"] = [f"peers FAILED: {reason(error)}"]
    for note in report["peers"]:
        run.say(note)


def _rates(run: Run) -> None:
    """Measures what floors are made of."""
    options, report = run.options, run.report
    rates = ceilings(run.kernels, options.repeats, options.small, run.benchmark.fp8)
    report["ceilings"] = rates
    rates["kernel_times"] = run.kernels.missing or "CUPTI"
    fp8 = rates.get("fp8_operations_per_second") if run.benchmark.fp8 else None
    run.say(
        f"copy {rates['bytes_per_second'] / 1e12:.3g} TB/s, bf16 product "
        f"{rates['operations_per_second'] / 1e12:.4g} TFLOP/s"
        + (f", fp8 {fp8 / 1e12:.4g}; " if fp8 else "; ")
        + (f"no kernel times: {run.kernels.missing}" if run.kernels.missing else "CUPTI works")
    )
    for name in ("assumed", "fp8_assumed"):
        if name in rates:
            run.say(f"rates are {name}: {rates[name]}")
    run.save()


def _close(run: Run) -> int:
    """Tells everything again, in order. Gives the exit status."""
    report = run.report
    print(f"\n{table.timings(report['rows'])}\n")
    if report["errors"]:
        print(run.benchmark.error_text(report["errors"]))
    for name, why in report["left_out"]:
        print(f"{name}: left out: {why}")
    for line in run.benchmark.summary(report):
        print(line)
    if run.kernels.missing:
        print(f"no kernel times: {run.kernels.missing}")
    run.save()
    run.say("done")
    bad = [r for r in [*report["rows"], *report["errors"]] if "failed" in r]
    bad += [r for r in report["rows"] if not r.get("finite", True)]
    return 1 if bad else 0


def add_errors(run: Run, label: str, find: Callable[[], list[dict[str, Any]]]) -> None:
    """Rows of errors of one case, whatever happens in it."""
    try:
        found = find()
    except Exception as error:
        found = [{"case": label, "implementation": "all", "failed": reason(error), "peers": {}}]
    run.report["errors"] += found
    run.say(run.benchmark.error_text(found))
    run.save()


def _one(run: Run, case, workload: Workload, compiled: dict[str, Future]) -> None:
    """Times a case, whatever happens in it."""
    report = run.report
    why = run.benchmark.left_out(run, case)
    if run.seconds > run.options.budget:
        why = f"{run.seconds:.0f} s are over the budget"
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


def parser(benchmark: Benchmark) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog=benchmark.name, description=benchmark.description)
    made.add_argument("--rows", metavar="PATTERN", help="cases whose name has this expression")
    made.add_argument("--quick", action="store_true", help=benchmark.quick_help)
    made.add_argument("--small", action="store_true", help="toy sizes, on any device")
    made.add_argument(
        "--implementation", nargs="+", metavar="NAME", help='instead of "auto" and some "xla"'
    )
    made.add_argument("--peers", metavar="DIR", help="folder with the peers' whl/")
    made.add_argument("--json", metavar="FILE", help="everything, written after every row")
    made.add_argument("--repeats", type=int, default=5, help="laps of each side")
    made.add_argument("--lap-ms", type=float, default=30, help="queued work in a wall lap")
    made.add_argument("--budget", type=float, default=280, help="start no case after seconds")
    made.add_argument("--compile-threads", type=int, default=8)
    made.add_argument("--no-cupti", action="store_true", help="leave the kernel times out")
    made.add_argument("--no-errors", action="store_true", help="leave the error rows out")
    benchmark.add_options(made)
    return made


def checked(benchmark: Benchmark, options: argparse.Namespace) -> Sequence[Any]:
    """The cases to run.

    Raises:
      InputError: an option that cannot be, naming it.
    """
    for name in options.implementation or ():
        benchmark.check(name)
    for name in ("repeats", "compile_threads", "lap_ms"):
        if getattr(options, name) <= 0:
            raise InputError(f"--{name.replace('_', '-')} {getattr(options, name)}: not positive")
    if options.json is not None and not Path(options.json).resolve().parent.is_dir():
        raise InputError(f"--json {options.json}: no such folder")
    return benchmark.choose(options)


def main(benchmark: Benchmark, arguments: Sequence[str] | None = None) -> int:
    options = parser(benchmark).parse_args(arguments)
    benchmark.settle(options)
    chosen = checked(benchmark, options)
    # Read when JAX meets its first device. With a peer the two share the memory as they need it;
    # alone JAX takes nearly all of it, in one piece, as large cases want.
    if not {"XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"} & set(os.environ):
        os.environ["XLA_CLIENT_MEM_FRACTION"] = "0.95"
    if options.peers:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    run = Run(benchmark, options)
    if options.no_cupti:
        run.kernels.missing = "--no-cupti"
    return execute(run, chosen)


def script(benchmark: Benchmark) -> None:
    """Runs from the command line: bad input is one line."""
    try:
        raise SystemExit(main(benchmark))
    except InputError as error:
        raise SystemExit(f"{benchmark.name}: {error}") from None
