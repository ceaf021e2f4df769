"""One protocol for both sides: the same laps, in turn, on one GPU in one process.

Two measures of a call. *Kernel*: the sum of the times of its kernels, recorded by CUPTI, which sees
everything this process runs on the GPU. It leaves out gaps and memory copies. *Wall*: many calls
queued back to back and one wait at the end, over their number. It has the gaps, and the host's
share wherever the GPU is faster than the host. Laps of the sides alternate (A B A B ..), so a clock
that drifts does so for all, and a ratio is taken within each pair.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

LAP_MS = 30.0  # of queued work in a wall lap
KERNEL_SECONDS = 4.0  # after these, three kernel laps a side are enough


class Side(Protocol):
    """Something to time.

    Attributes:
      calls: of the op in one launch.
      error: why it is out, once it is.
    """

    name: str
    calls: int
    error: str | None

    def launch(self) -> None:
        """Queues the calls on the GPU."""
        ...

    def direct(self) -> None:
        """The same without a captured graph, where CUPTI is sure to see each kernel."""
        ...

    def wait(self) -> None: ...


@dataclass
class Laps:
    """Milliseconds a call of each lap.

    Attributes:
      kernels: name -> (launches a call, milliseconds a call) in the last kernel lap.
      problem: why there are no kernel times.
    """

    wall: list[float] = field(default_factory=list)
    kernel: list[float] = field(default_factory=list)
    kernels: dict[str, tuple[float, float]] = field(default_factory=dict)
    problem: str = ""


def reason(error: BaseException) -> str:
    """The first line of an error, with its type."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"


class Kernels:
    """Records kernels with the CUPTI client of JAX's Mosaic GPU extension.

    ``missing`` says why there is none: no GPU build of JAX, or another subscriber.
    """

    def __init__(self):
        self.missing: str | None = None
        self.problems = 0  # after three this measure is given up
        try:
            from jax._src.lib import mosaic_gpu  # the part of `mosaic.gpu.profiler` that records

            self.extension: Any = mosaic_gpu._mosaic_gpu_ext  # pyright: ignore[reportAttributeAccessIssue]
        except (ImportError, AttributeError) as error:
            self.missing = reason(error)

    def record(self, run: Callable[[], None]) -> list[tuple[str, float]]:
        """(name, milliseconds) of all that ``run`` starts and waits for."""
        self.extension._cupti_init()
        try:
            run()
        finally:
            found = self.extension._cupti_get_timings(True)  # detaches: wall laps must not pay
        return found or []


def measure(
    sides: Sequence[Side], repeats: int, kernels: Kernels, lap_ms: float = LAP_MS
) -> dict[str, Laps]:
    """Laps of every side that works, by name; the others have their ``error`` set."""
    laps: dict[str, Laps] = {}
    launches: dict[str, int] = {}
    for side in sides:
        once = _guarded(side, lambda side=side: _warm(side))
        if once is not None:
            laps[side.name] = Laps()
            launches[side.name] = max(1, min(200, math.ceil(lap_ms / once)))
    for _ in range(repeats):
        for side in _working(sides):
            lap = _guarded(side, lambda side=side: _wall(side, launches[side.name]))
            if lap is not None:
                laps[side.name].wall.append(lap)
    begin = time.perf_counter()
    for repeat in range(repeats):
        if repeat >= 3 and time.perf_counter() - begin > KERNEL_SECONDS:
            break
        for side in _working(sides):
            if kernels.missing is None and not laps[side.name].problem:
                # An error here spoils this measure only; the wall laps stand.
                try:
                    _kernel_lap(side, kernels, laps[side.name])
                except Exception as error:
                    laps[side.name].kernel = []
                    laps[side.name].problem = reason(error)
                    kernels.problems += 1
                    if kernels.problems == 3:
                        kernels.missing = reason(error)
    for side in sides:
        if side.error is not None:
            laps.pop(side.name, None)
    return laps


def _working(sides: Sequence[Side]) -> list[Side]:
    return [side for side in sides if side.error is None]


def _guarded(side: Side, run: Callable[[], float]) -> float | None:
    try:
        return run()
    except Exception as error:
        side.error = reason(error)
        return None


def _warm(side: Side) -> float:
    """Milliseconds of a launch, from the quicker of two after the first."""
    side.launch()
    side.wait()
    return max(1e-3, min(_wall(side, 1), _wall(side, 1)) * side.calls)


def _wall(side: Side, launches: int) -> float:
    begin = time.perf_counter()
    for _ in range(launches):
        side.launch()
    side.wait()
    return 1e3 * (time.perf_counter() - begin) / (launches * side.calls)


def _kernel_lap(side: Side, kernels: Kernels, laps: Laps) -> None:
    """Records four launches and leaves out the first, which finds the GPU idle."""
    launches = 4 if laps.wall and laps.wall[-1] * side.calls < 5 else 2

    def run():
        for _ in range(launches):
            side.direct()
        side.wait()

    found = kernels.record(run)
    if not found:
        raise RuntimeError("CUPTI recorded no kernel")
    if len(found) % launches == 0:
        found, launches = found[len(found) // launches :], launches - 1
    calls = launches * side.calls
    laps.kernel.append(sum(ms for _, ms in found) / calls)
    each: dict[str, list[float]] = {}
    for name, ms in found:
        each.setdefault(name, []).append(ms)
    laps.kernels = {name: (len(ms) / calls, sum(ms) / calls) for name, ms in each.items()}


def spread(values: Sequence[float]) -> dict[str, Any] | None:
    """Median, least, most, and all of them in order."""
    if not values:
        return None
    return {
        "median": statistics.median(values),
        "low": min(values),
        "high": max(values),
        "laps": list(values),
    }


def ratio(ours: Sequence[float], peer: Sequence[float]) -> dict[str, Any] | None:
    """The spread of ours / peer over pairs of neighbouring laps."""
    return spread([a / b for a, b in zip(ours, peer, strict=False)])
