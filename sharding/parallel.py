"""What a layout means to the model's code: which mesh axes play which role."""

from __future__ import annotations

from dataclasses import dataclass

from sharding.collectives import Axes


@dataclass(frozen=True)
class Parallel:
    """Roles of the mesh axes in one program; the default is a single device.

    Attributes:
      batch: sequences are split over these.
      tensor: heads, MLP columns and the vocabulary are split over these, and each token of a batch
        group is owned by one device along them.
      experts: routed experts are split over these, a part of batch + tensor.
      cache_sequence: rows of the global layers' caches are striped over these: (), batch, tensor or
        both. Position p is row p // n of device p % n.
      embed: weights are stored split along their embed dimension over these batch axes, and
        gathered when a layer uses them.
      split: logical axes, of those that may be either, that are split over ``tensor``.
      dispatch: "gather", "dense" or "ragged", how tokens meet their experts.
    """

    batch: Axes = ()
    tensor: Axes = ()
    experts: Axes = ()
    cache_sequence: Axes = ()
    embed: Axes = ()
    split: frozenset[str] = frozenset()
    dispatch: str = "gather"

    @property
    def sequence_batch(self) -> Axes:
        """The batch axes over which a cache is striped, and so not split by batch."""
        return tuple(a for a in self.cache_sequence if a in self.batch)

    @property
    def sequence_tensor(self) -> Axes:
        """The tensor axes over which a cache is striped."""
        return tuple(a for a in self.cache_sequence if a in self.tensor)


SINGLE = Parallel()
