"""Seconds JAX spent tracing and compiling, to be told apart from seconds of work."""

from __future__ import annotations

import functools
import time

import jax

_COMPILE_EVENTS = "/jax/core/compile/"
_BACKEND = "backend_compile"
_active: list[CompileClock] = []


class CompileClock:
    """Collects compile intervals while it is entered.

    Attributes:
      compilations: programs built by the backend so far.
    """

    def __init__(self):
        self.compilations = 0
        self._spans: list[tuple[float, float]] = []

    def __enter__(self) -> CompileClock:
        _listen()
        _active.append(self)
        return self

    def __exit__(self, *_) -> None:
        _active.remove(self)

    def seconds(self, start: float, end: float) -> float:
        """Seconds of [start, end] (``time.perf_counter``) in which something compiled.

        Traces nest in one another, so intervals are united rather than added.
        """
        total, done = 0.0, start
        for begin, finish in sorted(self._spans):
            begin, finish = max(begin, done), min(finish, end)
            if finish > begin:
                total += finish - begin
                done = finish
        return total

    def _add(self, event: str, seconds: float) -> None:
        now = time.perf_counter()
        self._spans.append((now - seconds, now))
        self.compilations += _BACKEND in event


@functools.cache
def _listen() -> None:
    # Registered once for the process: taking a listener off again is not a public call everywhere.
    jax.monitoring.register_event_duration_secs_listener(_on_event)


def _on_event(event: str, duration_secs: float, **_) -> None:
    if event.startswith(_COMPILE_EVENTS):
        for clock in _active:
            clock._add(event, duration_secs)
