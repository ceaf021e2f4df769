"""Compiles peers' Triton kernels ahead, in processes of their own, into Triton's cache on disk."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def warm(module: str, site: Path, seconds: float, shards: int) -> str:
    """Runs ``python -m module site shard shards`` for every shard at once.

    In one process that takes minutes. Gives a line that says how it went; what is not done in time
    is stopped and compiled later.
    """
    begin = time.perf_counter()
    root = str(Path(__file__).resolve().parents[2])
    paths = [str(site), root, os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-m", module, str(site)]
    with contextlib.ExitStack() as stack:
        logs = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(shards)]
        workers = [
            subprocess.Popen(
                [*command, str(i), str(shards)], env=environment, stdout=log, stderr=log
            )
            for i, log in enumerate(logs)
        ]
        stopped, failed = 0, []
        for worker, log in zip(workers, logs, strict=True):
            try:
                if worker.wait(max(0.1, begin + seconds - time.perf_counter())):
                    log.seek(0)
                    failed += log.read().decode(errors="replace").strip().splitlines()[-1:]
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()
                stopped += 1
    said = f"{shards} processes, {time.perf_counter() - begin:.0f} s, {stopped} stopped"
    return said + (f", {len(failed)} failed: {failed[0][:200]}" if failed else "")


def take_part(shard: int, shards: int) -> None:
    """From now on every Triton autotuner of this process knows every ``shards``-th variant only."""
    import triton.runtime.autotuner as autotuner  # pyright: ignore[reportMissingImports]

    create = autotuner.Autotuner.__init__

    def with_part(self, fn, names, configs, *args, **kwargs):
        configs = list(configs)
        create(self, fn, names, configs[shard::shards] or configs[:1], *args, **kwargs)

    autotuner.Autotuner.__init__ = with_part
