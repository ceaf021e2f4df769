"""What a model needs under a layout, before anyone rents the machines.

Memory is exact for weights and caches, collectives are read off the traced program, operations and
times are estimates from formulas and data sheets. ``compile=True`` adds what the TPU compiler says.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from k3jax import programs
from k3jax.config import Config
from k3jax.errors import InputError
from k3jax.plan import costs, estimate, hardware, memory
from k3jax.plan.costs import Work, figures
from k3jax.plan.estimate import Time
from k3jax.plan.memory import Step
from k3jax.vision import count_tokens
from k3jax.vision.cost import parameters
from sharding import Layout, abstract_mesh
from sharding.compile import Compiled, compile_step, topology_mesh
from sharding.report import Collective, collectives, unlisted

__all__ = ["Plan", "Refused", "compare", "figures", "plan", "step_of"]

AGREEMENT = 0.01  # of the plan's argument bytes with the compiler's


@dataclass(frozen=True)
class Plan:
    """One step of a model under a layout. Bytes, operations and seconds are of one device.

    Attributes:
      notes: what was changed or assumed.
      memory: bytes by kind; ``arguments`` of them are the step's arguments.
      capacity: of a device; None where the layout's chip has no figures.
      work, times: by component; no times without figures of the chip.
      collectives: of the traced step, over each of its axes.
      compiled: what the compiler says, if asked.
    """

    model: str
    layout: Layout
    step: Step
    notes: tuple[str, ...]
    memory: dict[str, int]
    arguments: int
    capacity: float | None
    collectives: tuple[Collective, ...]
    work: dict[str, Work]
    times: dict[str, Time]
    figures: dict[str, float]
    compiled: Compiled | None = None

    @property
    def bytes(self) -> int:
        """What must fit: the compiler's figure where there is one, else the plan's own."""
        if self.compiled is None:
            return sum(self.memory.values())
        # The tower runs in programs of its own; its weights stay on the device all the same.
        return self.compiled.total_bytes + self.memory.get(memory.TOWER, 0)

    @property
    def fits(self) -> bool | None:
        return None if self.capacity is None else self.bytes <= self.capacity

    @property
    def seconds(self) -> float | None:
        """Of a step; None without figures of the chip."""
        return sum(t.total for t in self.times.values()) if self.times else None

    @property
    def tokens_per_second(self) -> float | None:
        """New tokens of all sequences."""
        return self.step.batch * self.step.tokens / self.seconds if self.seconds else None

    @property
    def agreement(self) -> float | None:
        """The plan's argument bytes over the compiler's."""
        return self.arguments / self.compiled.argument_bytes if self.compiled else None

    def verdict(self) -> str:
        """One sentence: whether it fits, with the numbers."""
        if self.capacity is None:
            return f"needs {_gb(self.bytes)} of a device; {self.layout.chip} has no fixed memory"
        by = "by the compiler" if self.compiled else "by this plan"
        room = self.capacity - self.bytes
        if room >= 0:
            return (
                f"fits {by}: {_gb(self.bytes)} of {_gb(self.capacity)} a device, {_gb(room)} left"
            )
        largest = sorted(self.memory.items(), key=lambda item: -item[1])[:3]
        what = ", ".join(f"{kind} {_gb(n)}" for kind, n in largest)
        return (
            f"does not fit {by}: {_gb(self.bytes)} of {_gb(self.capacity)} a device, {_gb(-room)} "
            f"too much; the largest are {what}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        compiled = None
        if self.compiled is not None:
            compiled = dataclasses.asdict(self.compiled) | {
                "total_bytes": self.compiled.total_bytes,
                "argument_agreement": self.agreement,
                "unlisted": [c.op_name for c in unlisted_collectives(self)],
            }
        return {
            "model": self.model,
            "layout": self.layout.name,
            "chip": self.layout.chip,
            "devices": self.layout.num_devices,
            "mesh": dict(self.layout.mesh),
            "step": dataclasses.asdict(self.step),
            "notes": list(self.notes),
            "memory_bytes": self.memory,
            "argument_bytes": self.arguments,
            "total_bytes": self.bytes,
            "capacity_bytes": self.capacity,
            "fits": self.fits,
            "verdict": self.verdict(),
            "collectives": [
                dataclasses.asdict(c) | {"total_bytes": c.total_bytes} for c in self.collectives
            ],
            "work": {name: dataclasses.asdict(w) for name, w in self.work.items()},
            "estimate": {
                "seconds": self.seconds,
                "tokens_per_second": self.tokens_per_second,
                "components": {
                    name: dataclasses.asdict(t) | {"total": t.total}
                    for name, t in self.times.items()
                },
            },
            "figures": self.figures,
            "compiled": compiled,
        }


def unlisted_collectives(plan: Plan):
    """Collectives of the compiled module that the traced program does not ask for."""
    if plan.compiled is None:
        return []
    return unlisted(list(plan.compiled.collectives), list(plan.collectives))


def step_of(
    config: Config, layout: Layout, kind: str, batch: int, context: int, chunk: int
) -> tuple[Step, tuple[str, ...]]:
    """The step that is planned, and what was rounded.

    Raises:
      InputError: everything wrong with the numbers.
    """
    wrong = []
    limit = config.max_position_embeddings
    if kind not in ("decode", "prefill"):
        wrong.append(f"step={kind!r}: decode or prefill")
    if batch < 1:
        wrong.append(f"batch={batch}: at least 1")
    if not 1 <= context <= limit:
        wrong.append(f"context={context}: 1 to {limit} (max_position_embeddings)")
    if kind == "prefill" and not 1 <= chunk <= context:
        wrong.append(f"chunk={chunk}: 1 to the context, {context}")
    if wrong:
        raise InputError("\n  ".join(["nothing to plan:", *wrong]))
    notes = []
    padded, length = programs.padded(layout, batch, context)
    if padded != batch:
        axes = " x ".join(f"{a} {layout.mesh[a]}" for a in layout.batch)
        notes.append(f"batch {batch} is padded to {padded}: sequences are split over {axes}")
    if length != context:
        stripes = layout.size(layout.cache_sequence)
        notes.append(f"context {context} is padded to {length}: rows are striped over {stripes}")
    return Step(kind, padded, chunk if kind == "prefill" else 1, length), tuple(notes)


def plan(
    model: str,
    config: Config,
    layout: Layout,
    *,
    step: str = "decode",
    batch: int = 64,
    context: int = 131072,
    chunk: int = 4096,
    vision: bool = False,
    images: Sequence[tuple[int, int]] = (),
    compile: bool = False,
    progress: Callable[[str], None] = lambda text: None,
) -> Plan:
    """Plans one step.

    Args:
      model: what to call it.
      step: "decode" (one token a sequence) or "prefill" (the last ``chunk`` tokens of the context).
      batch: sequences; rounded up to the devices that split them.
      context: tokens of each sequence with the new ones, which is what its cache holds.
      vision: count the vision tower's weights, which are whole on every device.
      images: (width, height) in pixels; a note says how many tokens of a context they are.
      compile: ask the TPU compiler too.
      progress: told what takes long.
    Raises:
      InputError: numbers out of range.
      LayoutError: the model's arrays do not divide, or the compiler refuses.
    """
    what, notes = step_of(config, layout, step, batch, context, chunk)
    chip = hardware.CHIPS.get(layout.chip)
    if chip is None:
        notes += (f"no figures for chip {layout.chip!r}: no estimate of times",)
    held, arguments = memory.per_device(config, layout, what)
    if vision and config.vision is not None:
        held[memory.TOWER] = sum(parameters(config.vision)) * jnp.dtype(jnp.bfloat16).itemsize
    for width, height in images:
        count = count_tokens(width, height, config)
        notes += (f"an image of {width} x {height} is {count:,} tokens of a sequence",)
    progress(f"{layout.name}: tracing")
    found = _traced(config, layout, what)
    compiled = None
    if compile:
        progress(f"{layout.name}: compiling")
        compiled = _compile(config, layout, what)
    work = costs.work(config, layout, what)
    return Plan(
        model,
        layout,
        what,
        notes,
        held,
        arguments,
        chip.memory if chip else None,
        found,
        work,
        estimate.times(chip, layout, work, found) if chip else {},
        figures(config),
        compiled,
    )


@dataclass(frozen=True)
class Refused:
    """A layout that cannot be planned for, and why."""

    name: str
    reason: str

    def to_dict(self) -> dict[str, Any]:
        return {"layout": self.name, "refused": self.reason}


def compare(plans: list[Plan | Refused]) -> list[Plan | Refused]:
    """Those that fit first, the fastest estimate of a token first; then the others by need, then
    those that are refused."""

    def key(p: Plan | Refused):
        if isinstance(p, Refused):
            return (2, 0.0)
        per_token = p.seconds / (p.step.batch * p.step.tokens) if p.seconds else float("inf")
        return (1, p.bytes) if p.fits is False else (0, per_token)

    return sorted(plans, key=key)


def _traced(config: Config, layout: Layout, step: Step) -> tuple[Collective, ...]:
    function, arguments = _program(config, layout, step, abstract_mesh(layout))
    return tuple(collectives(jax.make_jaxpr(function)(*arguments)))


def _compile(config: Config, layout: Layout, step: Step) -> Compiled:
    mesh = topology_mesh(layout)
    function, arguments = _program(config, layout, step, mesh)
    return compile_step(function, arguments, mesh, state=1)


def _program(config: Config, layout: Layout, step: Step, mesh) -> Any:
    """(function, abstract arguments) of a step; the second argument is the cache, to donate."""
    return programs.abstract_step(
        config,
        layout,
        mesh,
        step.kind,
        batch=step.batch,
        context=step.context,
        chunk=step.tokens,
    )


def _gb(n: float) -> str:
    return f"{n / 1e9:,.2f} GB"
