"""What others run for the same read on the same GPU: FLA's fused kernels, with and without a norm.

python -m benchmarks.attention_residuals.peers FOLDER SHARD SHARDS    # compiles some variants
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.attention_residuals.cases import CASES, Case
from benchmarks.attention_residuals.ours import EPS
from benchmarks.harness import peers as base
from benchmarks.harness import warming
from benchmarks.harness.peers import TorchSide

SHARDS = 12
READ, MIX, GLUON = "FLA with the norm", "FLA without a norm", "FLA Gluon with the norm"
MODULES = {"FLA": "fla.ops.attnres", "FLA Gluon": "fla.ops.attnres.backends.gluon"}


def unpack(folder: str) -> Path:
    """Where FLA of ``folder`` lies ready for import.

    Raises:
      InputError: a folder without it.
    """
    return base.unpack(folder, ())


class Peers(base.Peers):
    """FLA's two kernels, loaded; sides of one that is not fail with the reason. The one in Gluon is
    off unless asked for by name."""

    def __init__(self, site: Path):
        os.environ.setdefault("FLA_TILELANG", "0")
        super().__init__(site)
        self.fused = {name: self.load(name, partial(self._load, name)) for name in MODULES}

    def _load(self, name: str) -> Callable[..., Any]:
        """FLA tunes once, at the sizes of the first call, whatever the number of tokens is: so that
        call has the largest."""
        module = importlib.import_module(MODULES[name])
        fused = (
            module.fused_attnres if name == "FLA" else module.AttnResGluonBackend().fused_attnres
        )
        case = max(CASES, key=lambda case: case.rows)
        torch = self.torch
        draw = partial(torch.randn, device=self.device, dtype=torch.bfloat16)
        rows = [draw(case.rows, case.hidden) for _ in range(case.bank + 1)]
        vector = draw(case.hidden)
        with torch.inference_mode():
            fused(vector, rows, vector)
            fused(vector, rows, vector, vector)
        torch.cuda.synchronize()
        return fused

    def sides(self, case: Case, workload) -> list[TorchSide]:
        """The peers of a read on the arrays of its workload. Without the norm it does a part."""
        if case.kind != "read":
            return []
        made = {READ: ("FLA", True), GLUON: ("FLA Gluon", True), MIX: ("FLA", False)}
        return [
            self.side(name, partial(self._calls, workload, *what), True, part=name == MIX)
            for name, what in made.items()
        ]

    def _calls(self, workload, name: str, normed: bool) -> list[Callable[[], Any]]:
        self.need(name)
        view, shared, fused = self.torch.from_dlpack, workload.shared, self.fused[name]
        norm, query, out = (view(shared[name][0]) for name in ("norm", "query", "out_norm"))
        inputs = []
        for x in workload.inputs:
            rows = (*view(x["bank"]), view(x["partial"][0]))
            inputs.append([row.flatten(0, 1) for row in rows])

        def one(i: int):
            rows, options = inputs[i % len(inputs)], {"rms_eps": EPS, "scale": 1.0}
            return lambda: fused(query, rows, norm, out if normed else None, **options)

        return [one(i) for i in range(workload.calls)]


def _shard(site: Path, shard: int, shards: int) -> None:
    """Every ``shards``-th variant of FLA's kernel."""
    base.import_from(site)
    warming.take_part(shard, shards)
    Peers(site).need("FLA")


if __name__ == "__main__":
    _shard(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
