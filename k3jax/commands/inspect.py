"""``k3jax inspect``: what a checkpoint holds and what would be refused."""

from __future__ import annotations

from dataclasses import dataclass

import tyro


@dataclass(frozen=True)
class Inspect:
    """Show config, parameters and bytes of a checkpoint; exit 1 if it would be refused, and why."""

    directory: tyro.conf.Positional[str]
    """A checkpoint directory."""
    json: bool = False
    """Print JSON rather than tables."""

    def run(self) -> int:
        from k3jax.checkpoint.inspect import inspect

        report = inspect(self.directory)
        if self.json:
            print(report.to_json())
        else:
            report.print()
        return int(report.refused)
