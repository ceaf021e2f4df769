"""A roofline: how long a step would take if every part ran at a data sheet's rates. An estimate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from k3jax.plan.costs import Work
from k3jax.plan.hardware import Chip, link_rate
from sharding import Layout
from sharding.report import COMPONENTS, OTHER, Collective


@dataclass(frozen=True)
class Time:
    """Seconds of one component: of operations, of HBM, of links. The first two overlap."""

    operations: float
    memory: float
    links: float

    @property
    def total(self) -> float:
        return max(self.operations, self.memory) + self.links


def times(
    chip: Chip, layout: Layout, work: dict[str, Work], collectives: Sequence[Collective]
) -> dict[str, Time]:
    """Max(operations / rate, bytes / HBM rate) + sent bytes / link rate, by component.

    Nothing is added for the latency of a collective or of a kernel's start, and nothing overlaps
    with communication: the truth may lie on either side, mostly above.
    """
    found = {}
    for name in (*COMPONENTS, OTHER):
        mine = [c for c in collectives if c.component == name]
        links = sum(c.total_bytes / link_rate(chip, layout, c.axes) for c in mine)
        done = work.get(name, Work(0.0, 0.0))
        one = Time(done.operations / chip.operations, done.bytes / chip.memory_rate, links)
        if one.total > 0:
            found[name] = one
    return found
