"""Figures of accelerators, one entry a JAX device. Sources: docs/provenance.md.

Vendors state links in both directions together; here a rate is of one direction, as it bounds what
a device can send. Memory is in decimal gigabytes, the smaller reading of a data sheet.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from sharding import Layout


@dataclass(frozen=True)
class Chip:
    """Attributes:
    memory: bytes of HBM.
    memory_rate: bytes a second from HBM.
    operations: bfloat16 operations a second, dense, two a multiply-add.
    link: bytes a second that a device sends over all its fast links (ICI, NVLink) together.
    network: bytes a second that it sends where no fast link goes.
    domain: devices joined by fast links; None for a whole slice.
    """

    memory: float
    memory_rate: float
    operations: float
    link: float
    network: float
    domain: int | None = None


TPUS = ("v5e", "v5p", "v6e", "tpu7x")

# A tpu7x chip is two devices, each with half of everything.
CHIPS = {
    "v5e": Chip(16e9, 819e9, 197e12, 400e9 / 2, 25e9 / 8),
    "v5p": Chip(95e9, 2765e9, 459e12, 1200e9 / 2, 50e9 / 8),
    "v6e": Chip(32e9, 1638e9, 918e12, 800e9 / 2, 100e9 / 8),
    "tpu7x": Chip(192e9 / 2, 7380e9 / 2, 2307e12 / 2, 1200e9 / 2 / 2, 100e9 / 8 / 2),
    "h100": Chip(80e9, 3.35e12, 989.5e12, 900e9 / 2, 400e9 / 8, domain=8),
    "h200": Chip(141e9, 4.8e12, 989.5e12, 900e9 / 2, 400e9 / 8, domain=8),
    "b200": Chip(180e9, 8e12, 2250e12, 1800e9 / 2, 400e9 / 8, domain=8),
}


def link_rate(chip: Chip, layout: Layout, axes: Iterable[str]) -> float:
    """Bytes a second that a device sends in a collective over mesh axes.

    The slowest link decides: the network, once the axes reach beyond a domain of fast links.
    Devices count along the mesh, the last axis fastest, so neighbours share a domain.
    """
    sizes = list(layout.mesh.items())
    domain = chip.domain or layout.num_devices // layout.slices
    for i, (axis, size) in enumerate(sizes):
        inner = math.prod(n for _, n in sizes[i + 1 :])
        if axis in axes and size > 1 and inner * size > domain:
            return chip.network
    return chip.link
