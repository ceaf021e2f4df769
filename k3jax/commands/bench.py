"""``k3jax bench``: one table of the repository's benchmarks."""

from __future__ import annotations

import runpy
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

from k3jax.errors import InputError

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@dataclass(frozen=True)
class Bench:
    """Print the table of a benchmark: measured, floor, ratio. Needs a clone of the repository."""

    op: str
    """Which: the name of a script in benchmarks/, such as vision or dispatch."""
    arguments: tyro.conf.Positional[tuple[str, ...]] = ()
    """What the script takes, after --."""

    def run(self) -> None:
        scripts = {path.stem: path for path in FOLDER.glob("*.py") if path.stem != "__init__"}
        scripts |= {path.parent.name: path for path in FOLDER.glob("*/__main__.py")}
        if not scripts:
            raise InputError(f"no benchmarks at {FOLDER}: they are in the repository only")
        if self.op not in scripts:
            raise InputError(f"--op {self.op}: one of {', '.join(sorted(scripts))}")
        sys.path.insert(0, str(FOLDER.parent))
        sys.argv = [str(scripts[self.op]), *self.arguments]
        runpy.run_path(str(scripts[self.op]), run_name="__main__")
