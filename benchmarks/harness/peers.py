"""Peers that run through torch in this process: unpacked, loaded, and timed as sides.

The peers' folder holds `whl/` with wheels and an archive of libraries. They are unpacked into a
temporary folder and imported from there; nothing is installed. Torch is imported only once such a
folder is given, and reads the very arrays that ours reads.
"""

from __future__ import annotations

import glob
import hashlib
import os
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.timing import reason
from k3jax.errors import InputError


def unpack(folder: str, members: Sequence[str], wheels: bool = True) -> Path:
    """Where peers of ``folder`` lie ready for import; unpacks them unless that was done.

    Args:
      members: files or folders of the archive that are wanted.
      wheels: whether the wheels are.

    Raises:
      InputError: a folder without them.
    """
    root = Path(folder)
    places = [place for place in (root / "whl", root) if list(place.glob("*.whl"))]
    if not places:
        raise InputError(f"--peers {folder}: no wheels in it or in its whl/")
    archives = sorted(places[0].glob("peers_*.tar.xz"))
    packages = sorted(places[0].glob("*.whl")) if wheels else []
    parts = [f"{p.name}{p.stat().st_size}" for p in packages + archives]
    key = hashlib.sha256("".join([*parts, *members]).encode())
    site = Path(tempfile.gettempdir()) / f"k3jax-peers-{key.hexdigest()[:12]}"
    if not (site / "complete").exists():
        site.mkdir(parents=True, exist_ok=True)
        for wheel in packages:  # of pure Python: what pip would do is to unpack them
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(site)
        for path in archives:
            with tarfile.open(path) as archive:
                wanted = [m for m in archive if _within(m.name, members)]
                archive.extractall(site, wanted, filter="data")
        (site / "complete").touch()
    return site


def _within(name: str, members: Sequence[str]) -> bool:
    return any(name == member or name.startswith(f"{member}/") for member in members)


def import_from(site: Path) -> None:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if str(site) not in sys.path:
        sys.path.insert(0, str(site))


class Peers:
    """Torch, and what a benchmark loads beside it. What does not load is absent from the rows, and
    ``notes`` says why."""

    device = "cuda"

    def __init__(self, site: Path):
        import_from(site)
        import torch  # pyright: ignore[reportMissingImports]

        self.torch, self.site = torch, site
        self.notes: list[str] = []
        self.missing: dict[str, str] = {}

    def load(self, name: str, load: Callable[[], Any]) -> Any:
        """What ``load`` gives; None, a note and `need` refusing ``name`` if it fails."""
        try:
            return load()
        except Exception as error:
            self.missing[name] = reason(error)
            self.notes.append(f"{name} is not there: {self.missing[name]}")

    def need(self, name: str) -> None:
        """Raises:
        RuntimeError: ``name`` did not load.
        """
        if name in self.missing:
            raise RuntimeError(f"{name} is not there: {self.missing[name]}")

    def side(
        self, name: str, make: Callable[[], Sequence[Callable[[], Any]]], graph: bool, part=False
    ) -> TorchSide:
        """A side of the calls that ``make`` gives, which keeps what the last of them gives; one
        that cannot be made fails when run."""
        made = TorchSide(name, self.torch, [], graph, part=part)
        try:
            with self.torch.inference_mode():
                calls = make()
            self.torch.cuda.synchronize()
        except Exception as error:
            problem = error

            def fail():
                raise problem

            made.functions, made.calls = [fail], 1
            return made

        def last():
            made.results = ()  # at thousands of queries there is room for one
            made.results = (calls[-1](),)

        made.functions, made.calls = [*calls[:-1], last], len(calls)
        return made

    def tensors(self, arrays: dict[str, Any]) -> dict[str, Any]:
        """Torch's view of JAX arrays: the same memory."""
        return {
            name: tuple(map(self.torch.from_dlpack, x))
            if isinstance(x, tuple)
            else self.torch.from_dlpack(x)
            for name, x in arrays.items()
        }

    def free(self) -> None:
        self.torch.cuda.empty_cache()

    def versions(self) -> dict[str, str]:
        found = {"torch": self.torch.__version__}
        for path in sorted(glob.glob(str(self.site / "*.dist-info"))):
            name, _, version = Path(path).name.removesuffix(".dist-info").partition("-")
            found[name] = version
        return found


class TorchSide:
    """A side of a peer: functions that queue one call each, replayed as one CUDA graph if asked.

    Attributes:
      part: it does a part of the row's work only, so it is shown and never "the peer".
      results: the tensors that the last call wrote, where they can be compared with ours.
    """

    def __init__(
        self,
        name: str,
        torch,
        functions: Sequence[Callable[[], Any]],
        graph: bool,
        part: bool = False,
    ):
        self.name, self.calls, self.note, self.part = name, len(functions), "", part
        self.error: str | None = None
        self.torch, self.functions, self.graph, self.wanted = torch, functions, None, graph
        self.results: tuple[Any, ...] = ()

    def _capture(self) -> None:
        """Once the kernels are compiled and chosen: a graph, or a note why there is none."""
        self.wanted = False
        torch = self.torch
        self.direct()
        self.wait()
        try:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self.direct()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with (
                torch.inference_mode(),
                torch.cuda.graph(graph, capture_error_mode="thread_local"),
            ):
                for function in self.functions:
                    function()
            self.graph = graph
        except Exception as error:
            self.note = f"{self.name} without a graph: {reason(error)}"
            self.wait()

    def launch(self) -> None:
        if self.wanted:
            self._capture()
        if self.graph is None:
            self.direct()
        else:
            self.graph.replay()

    def direct(self) -> None:
        with self.torch.inference_mode():
            for function in self.functions:
                function()

    def wait(self) -> None:
        self.torch.cuda.synchronize()
