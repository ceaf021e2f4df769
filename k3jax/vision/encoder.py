"""Items to features: one compiled program a patch bucket, items spread over devices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from k3jax.errors import InputError
from k3jax.layers.vision import VisionTower
from k3jax.vision.preprocess import Item, read

MIN_PATCHES = 64  # smallest bucket
IN_FLIGHT = 2  # calls that may wait on the device; bounds the memory of a long list


def bucket(patches: int) -> int:
    """The padded length of ``patches``: 4, 5, 6 or 7 times a power of two, at most 25 % more.

    Attention costs the square of what is padded wherever a kernel does not skip it, so powers of
    two alone would waste up to 3/4 of the work.
    """
    if patches <= MIN_PATCHES:
        return MIN_PATCHES
    step = 1 << ((patches - 1).bit_length() - 3)
    return -(-patches // step) * step


class Encoder:
    """A `VisionTower` ready to be called. Every item goes through the program of its bucket alone,
    so what else is in the batch cannot change a bit of its features.

    Args:
      tower: its leaves are arrays.
      mesh: devices over which items are spread, one each at a time; parameters are replicated.
        None runs on the default device.
    """

    def __init__(self, tower: VisionTower, mesh: jax.sharding.Mesh | None = None):
        graphdef, state = nnx.split(tower)
        leaves, treedef = jax.tree.flatten(state)
        self.config, self.dtype = tower.config, tower.compute_dtype
        self._leaves = tuple(leaves)
        self.devices = 1 if mesh is None else mesh.size

        def one(leaves, patches_INP: jax.Array, grid_I3: jax.Array):
            module = nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves))
            return module(patches_INP[0], grid_I3[0])[None]

        self._bind = lambda: nnx.merge(graphdef, jax.tree.unflatten(treedef, list(self._leaves)))
        self._items: NamedSharding | None = None
        if mesh is not None:
            items, everywhere = PartitionSpec(mesh.axis_names), PartitionSpec()
            one = jax.shard_map(
                one,
                mesh=mesh,
                in_specs=(everywhere, items, items),
                out_specs=items,
                check_vma=False,
            )
            self._items = NamedSharding(mesh, items)
            self._leaves = jax.device_put(self._leaves, NamedSharding(mesh, everywhere))
        self._program: Any = jax.jit(one)

    @property
    def module(self) -> VisionTower:
        """The Flax module."""
        return self._bind()

    @property
    def compilations(self) -> int:
        """Programs compiled so far: one a bucket that was used."""
        return self._program._cache_size()

    def encode(self, images) -> list[np.ndarray]:
        """`k3jax.vision.read`, then the features of each item."""
        return self(read(images, self.config))

    def __call__(self, items: Sequence[Item]) -> list[np.ndarray]:
        """[tokens, D] features of each item, in the compute dtype, on the host.

        Raises:
          InputError: an item made for another patch or merge size, or with too many frames.
        """
        results: list[np.ndarray] = [np.empty(0)] * len(items)
        groups: dict[int, list[int]] = {}
        for index, item in enumerate(items):
            self._check(item)
            groups.setdefault(bucket(len(item.patches_NP)), []).append(index)
        waiting: list[tuple[list[int], jax.Array]] = []

        def fetch():
            indices, features = waiting.pop(0)
            features = np.asarray(features)
            for place, index in enumerate(indices):
                # Copied: a view would keep the padded bucket alive.
                results[index] = features[place, : items[index].tokens].copy()

        for size, members in groups.items():
            for start in range(0, len(members), self.devices):
                chosen = members[start : start + self.devices]
                waiting.append((chosen, self.run(*self.stage(size, [items[i] for i in chosen]))))
                if len(waiting) > IN_FLIGHT:
                    fetch()
        while waiting:
            fetch()
        return results

    def stage(self, size: int, items: Sequence[Item]) -> tuple[np.ndarray, np.ndarray]:
        """Padded patches [I, size, P] uint8 and grids [I, 3]; devices without an item get none."""
        shape = (self.devices, size, self.config.patch_width)
        patches, grids = np.zeros(shape, np.uint8), np.zeros((self.devices, 3), np.int32)
        for place, item in enumerate(items):
            patches[place, : len(item.patches_NP)] = item.patches_NP
            grids[place] = item.grid
        return patches, grids

    def run(self, patches_INP, grids_I3) -> jax.Array:
        """Features [I, size / merge area, D] on the devices, of what `stage` made."""
        if self._items is not None:
            patches_INP, grids_I3 = jax.device_put((patches_INP, grids_I3), self._items)
        return self._program(self._leaves, patches_INP, grids_I3)

    def warm_up(self, sizes: Sequence[tuple[int, int, int]]) -> None:
        """Compiles for grids of these (frames, rows, columns) by running empty items."""
        for size in sorted({bucket(math.prod(grid)) for grid in sizes}):
            jax.block_until_ready(self.run(*self.stage(size, [])))

    def _check(self, item: Item) -> None:
        c = self.config
        t, h, w = item.grid
        shape = (t * h * w, c.patch_width)
        if item.patches_NP.shape != shape or item.merge != c.merge:
            raise InputError(
                f"{item.name}: patches {item.patches_NP.shape} merged {item.merge}, the tower takes"
                f" {shape} merged {c.merge}"
            )
        if not 1 <= t <= c.position_time:
            raise InputError(f"{item.name}: {t} frames together, 1 to {c.position_time} are taken")
