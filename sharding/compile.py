"""Ahead-of-time compilation of a step for a TPU slice, on a machine that has none.

The compiler in the libtpu wheel compiles for real topologies. It shows that a program compiles and
fits, not that it is right or fast. libtpu reads its environment when it is first used: set
`ENVIRONMENT` before that. One process at a time can hold libtpu without ALLOW_MULTIPLE_LIBTPU_LOAD.
"""

from __future__ import annotations

import contextlib
import importlib.util
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache
from jax.experimental.layout import Format
from jax.experimental.layout import Layout as ArrayLayout
from jax.sharding import Mesh

from sharding.errors import LayoutError
from sharding.layout import Layout
from sharding.mesh import make_mesh
from sharding.report import HloCollective, hlo_collectives

# No question to a metadata server that is not there; a second process may load libtpu.
ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5p-128",  # any known one keeps it quiet; the topology decides
}


# By device kind. On a TPU7x the products of a scan want 16-bit weights in tiles of 16 rows, while a
# program's arguments have tiles of 8: all stacked weights are copied in every step, 23 GB of K3.1's
# on 128 devices. Without the larger tiles nothing is.
COMPILER_OPTIONS: dict[str, dict[str, Any]] = {
    "TPU7x": {"xla_tpu_control_large_2nd_minor_layout_for_x16": 0},
}


def compiler_options(mesh: Mesh) -> dict[str, Any] | None:
    """What to tell the compiler for the devices of a mesh."""
    return COMPILER_OPTIONS.get(mesh.devices.flat[0].device_kind)


@dataclass(frozen=True)
class Compiled:
    """What the compiler says of a step. Bytes are of one device.

    Attributes:
      seconds: of tracing, lowering and compiling.
      host_peak_bytes: the most memory this process has held so far.
      argument_bytes, output_bytes, temporary_bytes, code_bytes: as `memory_analysis` counts them.
      alias_bytes: outputs that stand in the memory of donated arguments.
      collectives: of the compiled module.
    """

    seconds: float
    host_peak_bytes: int
    argument_bytes: int
    output_bytes: int
    temporary_bytes: int
    alias_bytes: int
    code_bytes: int
    collectives: tuple[HloCollective, ...]

    @property
    def total_bytes(self) -> int:
        """What must fit in a device's memory while the step runs."""
        live = self.argument_bytes + self.output_bytes - self.alias_bytes
        return live + self.temporary_bytes + self.code_bytes


def topology_mesh(layout: Layout) -> Mesh:
    """The mesh of a layout over the devices of its TPU topology, which need not exist here.

    Raises:
      LayoutError: the layout names no topology, libtpu is not installed or refuses the topology.
    """
    where = f"layout {layout.name}"
    if layout.topology is None:
        raise LayoutError(where, [f"chip {layout.chip!r} has no TPU topology to compile for"])
    if importlib.util.find_spec("libtpu") is None:
        raise LayoutError(
            where, ["compiling for a TPU needs libtpu: pip install 'k3jax[aot]', or [tpu]"]
        )
    options = {"num_slices": layout.slices} if layout.slices > 1 else {}
    try:
        topology = topologies.get_topology_desc(layout.topology, platform="tpu", **options)
    except (RuntimeError, ValueError, NotImplementedError) as error:  # what libtpu raises
        reason = str(error).splitlines()[0]
        raise LayoutError(where, [f"topology {layout.topology!r}: {reason}"]) from None
    return make_mesh(layout, topology.devices)


def row_major(arrays: Any) -> Any:
    """Formats of a tree of abstract arrays with shardings: the last dimension innermost.

    Left to itself, a TPU keeps an array whose rows are no multiple of 128 values, such as a cache
    of latents of 576, with another dimension innermost. A program that writes rows then copies the
    whole cache on its way in and out: 26 GB of K3.1's at batch 64 and 131,072 tokens.
    """
    return jax.tree.map(
        lambda a: Format(ArrayLayout(tuple(range(len(a.shape)))), a.sharding), arrays
    )


def compile_step(
    step: Callable, arguments: Sequence[Any], mesh: Mesh, state: int | None = None
) -> Compiled:
    """Compiles a step for the devices of ``mesh``, from shapes alone.

    Args:
      step: the function, from arguments to results.
      arguments: trees of `jax.ShapeDtypeStruct` with shardings on ``mesh``.
      state: position of the argument that the second result replaces, in its memory; `row_major`.
    Raises:
      LayoutError: the program does not fit; the compiler's reason.
    """
    start = time.perf_counter()
    arguments, options = list(arguments), {}
    if state is not None:
        formats = row_major(arguments[state])
        arguments[state] = jax.tree.map(
            lambda a, f: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=f),
            arguments[state],
            formats,
        )
        options = {"donate_argnums": state, "out_shardings": (None, formats)}
    try:
        lowered = jax.jit(step, **options).lower(*arguments)
        with _no_cache():
            compiled = lowered.compile(compiler_options=compiler_options(mesh))
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        reason = " ".join(str(error).split())[:400]
        raise LayoutError("compilation", [f"the step does not fit: {reason}"]) from None
    seconds = time.perf_counter() - start
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None  # every backend of JAX has both
    assert text is not None
    return Compiled(
        seconds=seconds,
        host_peak_bytes=_host_peak_bytes(),
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        code_bytes=memory.generated_code_size_in_bytes,
        collectives=tuple(hlo_collectives(text, mesh)),
    )


@contextlib.contextmanager
def _no_cache():
    """JAX's cache of programs can keep one for a described device, but not read it back."""
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


def _host_peak_bytes() -> int:
    """The most memory this process has held. Linux counts its parent's in `ru_maxrss`."""
    status = Path("/proc/self/status")
    if status.exists():
        (line,) = (x for x in status.read_text().splitlines() if x.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024  # in kB
    scale = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale
