"""Where experts live: copies of hot experts, and the same load on every shard.

The router chooses among E logical experts; the devices hold S >= E physical ones, in slots. Shard p
of the expert axes holds the slots ``p * S / shards ..``, as `sharding.experts` expects.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Placement:
    """Which logical expert each slot holds. Hashable, so it can be static under `jax.jit`.

    Raises:
      ValueError: a slot names no expert, or an expert has no slot.
    """

    num_experts: int
    logical_of_slot: tuple[int, ...]

    def __post_init__(self):
        unknown = sorted(set(self.logical_of_slot) - set(range(self.num_experts)))
        missing = sorted(set(range(self.num_experts)) - set(self.logical_of_slot))
        if unknown or missing:
            raise ValueError(
                f"a placement of {self.num_experts} experts in {self.slots} slots: "
                f"no such experts {unknown}, no slot for experts {missing}"
            )

    @classmethod
    def plain(cls, num_experts: int) -> Placement:
        """Expert e in slot e."""
        return cls(num_experts, tuple(range(num_experts)))

    @property
    def slots(self) -> int:
        return len(self.logical_of_slot)

    @cached_property
    def copies(self) -> np.ndarray:
        """[E] int32: slots of each expert."""
        return np.bincount(self.logical_of_slot, minlength=self.num_experts).astype(np.int32)

    @cached_property
    def slots_of(self) -> np.ndarray:
        """[E, max copies] int32: slots of each expert in ascending order, padded with -1."""
        table_EC = np.full((self.num_experts, self.copies.max()), -1, np.int32)
        used_E = np.zeros(self.num_experts, np.int32)
        for slot, expert in enumerate(self.logical_of_slot):
            table_EC[expert, used_E[expert]] = slot
            used_E[expert] += 1
        return table_EC

    def physical(self, ids_Nk: jax.Array, token_N: jax.Array) -> jax.Array:
        """The slot that serves each choice of the router; -1 for ids outside 0..E-1.

        Args:
          ids_Nk: int32, logical experts.
          token_N: int32, a number of each token, such as its index in the batch. It alone decides
            which copy a token uses, so the result does not depend on other tokens.

        Returns:
          int32 [N, k]. Multiples of the golden ratio, modulo 1, spread any run of numbers evenly
          over the copies (Knuth, The Art of Computer Programming, volume 3, section 6.4).
        """
        inside_Nk = (ids_Nk >= 0) & (ids_Nk < self.num_experts)
        ids_Nk = jnp.where(inside_Nk, ids_Nk, 0)
        fraction_N1 = (token_N.astype(jnp.uint32) * jnp.uint32(0x9E3779B1) >> 16)[:, None]
        copies_Nk = jnp.asarray(self.copies.astype(np.uint32))[ids_Nk]
        copy_Nk = (fraction_N1 * copies_Nk >> 16).astype(jnp.int32)  # copies stay below 2^16
        return jnp.where(inside_Nk, jnp.asarray(self.slots_of)[ids_Nk, copy_Nk], -1)

    def expand(self, array, axis: int):
        """``array`` (numpy or JAX) with its ``axis`` of E experts turned into S slots."""
        if array.shape[axis] != self.num_experts:
            raise ValueError(f"axis {axis} of {array.shape} is not {self.num_experts} experts long")
        return array.take(np.asarray(self.logical_of_slot, np.int32), axis=axis)


def propose(loads_E: Sequence[float] | np.ndarray, slots: int, shards: int) -> Placement:
    """A placement that evens out the load of the shards. Deterministic.

    Args:
      loads_E: load of each logical expert in any unit, e.g. tokens; its copies share it.
      slots: S, physical experts of all shards.
      shards: devices the slots are split over, S / shards each.

    Extra slots go one by one to the expert with the highest load a copy. Then slots are given out,
    the heaviest first, each to the least loaded shard with a free slot that has no copy of the same
    expert. Should that be worse than the experts in plain order, the result is the plain order, and
    a spare slot repeats the hottest expert of its shard.

    Raises:
      ValueError: with every fault of the arguments.
    """
    loads_E = np.asarray(loads_E, np.float64)
    E = _check(loads_E, slots, shards)
    copies_E = _copies(loads_E, slots, shards)
    best = Placement(E, _assign(loads_E / copies_E, copies_E, slots, shards))
    if E % shards:
        return best
    blocks = np.arange(E).reshape(shards, E // shards)
    hottest = blocks[np.arange(shards), loads_E[blocks].argmax(1)]
    spare = np.repeat(hottest[:, None], (slots - E) // shards, axis=1)
    plain = Placement(E, tuple(np.concatenate([blocks, spare], axis=1).ravel().tolist()))
    peaks = [report(loads_E, p, shards).per_shard.max() for p in (best, plain)]
    return best if peaks[0] <= peaks[1] else plain


class Balance(NamedTuple):
    """Load of each shard, and the largest over the mean; 1 is perfect, and stands for no load."""

    per_shard: np.ndarray
    max_over_mean: float


def report(loads_E: Sequence[float] | np.ndarray, placement: Placement, shards: int) -> Balance:
    """How even the load of the shards is, when copies of an expert share its load equally.

    Raises:
      ValueError: as :func:`propose`.
    """
    loads_E = np.asarray(loads_E, np.float64)
    _check(loads_E, placement.slots, shards, placement.num_experts)
    load_S = placement.expand(loads_E / placement.copies, 0)
    per_shard = load_S.reshape(shards, -1).sum(1)
    mean = per_shard.mean()
    return Balance(per_shard, float(per_shard.max() / mean) if mean > 0 else 1.0)


def _check(loads_E: np.ndarray, slots: int, shards: int, experts: int | None = None) -> int:
    """The number of experts; every fault at once otherwise."""
    problems = []
    experts = loads_E.size if experts is None else experts
    if loads_E.shape != (experts,) or not experts:
        problems.append(f"loads of shape {loads_E.shape}, needed one for each of {experts} experts")
    bad = np.flatnonzero(~(np.isfinite(loads_E) & (loads_E >= 0)))
    if bad.size:
        values = [f"{i}: {loads_E.ravel()[i]}" for i in bad[:8]]
        problems.append(f"{bad.size} loads are negative or not finite ({', '.join(values)})")
    if slots < experts:
        problems.append(f"{slots} slots are fewer than {experts} experts")
    if slots > experts * max(shards, 1):
        problems.append(f"{slots} slots are more than {experts} experts on each of {shards} shards")
    if shards < 1 or slots % shards:
        problems.append(f"{slots} slots do not divide over {shards} shards")
    if problems:
        raise ValueError("placement of experts: " + "; ".join(problems))
    return experts


def _copies(loads_E: np.ndarray, slots: int, shards: int) -> np.ndarray:
    """Copies of each expert, at most one a shard."""
    copies_E = np.ones(loads_E.size, np.int64)
    # The highest load a copy comes first, then fewer copies, then the lower id.
    heap = [(-load, 1, e) for e, load in enumerate(loads_E.tolist())]
    heapq.heapify(heap)
    while copies_E.sum() < slots:
        _, count, e = heapq.heappop(heap)
        if count < shards:
            copies_E[e] = count + 1
            heapq.heappush(heap, (-float(loads_E[e]) / (count + 1), count + 1, e))
    return copies_E


def _assign(load_E: np.ndarray, copies_E: np.ndarray, slots: int, shards: int) -> tuple[int, ...]:
    """Slots in the order of the shards, from the load a copy: longest processing time first."""
    held: list[list[int]] = [[] for _ in range(shards)]
    total = np.zeros(shards)
    room = slots // shards

    for e in np.argsort(-load_E, kind="stable").tolist():
        for _ in range(copies_E[e]):
            free = [s for s in range(shards) if len(held[s]) < room]
            s = min((s for s in free if e not in held[s]), key=lambda s: (total[s], s), default=-1)
            if s < 0:
                s = _make_room(e, free[0], held, total, load_E)
            held[s].append(e)
            total[s] += load_E[e]
    return tuple(e for on_shard in held for e in sorted(on_shard))


def _make_room(e: int, free: int, held: list[list[int]], total: np.ndarray, load_E) -> int:
    """A shard without ``e``, all of which are full: one of its experts moves to shard ``free``.

    There is one, since ``e`` has no more copies than there are shards. It has an expert to move: it
    holds more experts than ``free``, which besides holds ``e``.
    """
    _, s, moved = min(
        (max(total[free] + load_E[x], total[s] - load_E[x] + load_E[e]), s, x)
        for s in range(len(held))
        if e not in held[s]
        for x in held[s]
        if x not in held[free]
    )
    held[s].remove(moved)
    held[free].append(moved)
    total[s] -= load_E[moved]
    total[free] += load_E[moved]
    return s
