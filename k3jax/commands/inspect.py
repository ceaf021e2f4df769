"""``k3jax inspect``: what a checkpoint holds and what would be refused."""

from __future__ import annotations

import json
from dataclasses import dataclass

import tyro


@dataclass(frozen=True)
class Inspect:
    """Show config, parameters and bytes of a checkpoint; exit 1 if it would be refused, and why."""

    directory: tyro.conf.Positional[str]
    """A checkpoint directory, or a preset."""
    json: bool = False
    """Print JSON rather than tables."""

    def run(self) -> int:
        from k3jax.checkpoint.inspect import inspect, render

        report = inspect(self.directory)
        if self.json:
            print(json.dumps(report.as_dict(), indent=2, ensure_ascii=False))
        else:
            render(report)
        return int(bool(report.refused))
