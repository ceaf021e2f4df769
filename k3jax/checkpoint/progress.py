"""The progress bar of a load or save: bytes, rate, time left."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator

import jax

Progress = Callable[[int, int, str], None]


@contextlib.contextmanager
def track(
    progress: bool | Progress | None, total: int, verb: str = "Loading"
) -> Iterator[Callable[[int, str], object]]:
    """Gives ``advance(bytes, parameter)``, safe under threads.

    Args:
      progress: True, False, None (a bar if standard error is a terminal), or a callback
        ``(done, total, parameter)``. Only process 0 draws a bar.
    """
    lock, done = threading.Lock(), 0
    show = sys.stderr.isatty() if progress is None else progress

    def count(nbytes: int) -> int:
        nonlocal done
        with lock:
            done += nbytes
            return done

    if callable(show):
        yield lambda nbytes, name: show(count(nbytes), total, name)
    elif show and jax.process_index() == 0:
        from rich import progress as bars
        from rich.console import Console

        columns = (
            bars.TextColumn("{task.description}"),
            bars.BarColumn(),
            bars.DownloadColumn(),
            bars.TransferSpeedColumn(),
            bars.TimeRemainingColumn(),
            bars.TextColumn("[dim]{task.fields[name]}"),
        )
        with bars.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(verb, total=total, name="")
            yield lambda nbytes, name: bar.update(task, advance=nbytes, name=name)
    else:
        yield lambda nbytes, name: None
