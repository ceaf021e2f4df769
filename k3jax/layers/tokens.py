"""The tokens of one call: which of them this device owns, and how they travel.

The residual stream, its depth bank, norms and routers run on owned tokens only, so every block
vector exists once. Before a sublayer that is split by heads or columns, the tokens of a batch group
are gathered over the tensor axes; after it, the partial sums are scattered back to the owners. On
a single device all tokens are owned and nothing moves.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from k3jax.layers.params import linear
from sharding import collectives
from sharding.parallel import Parallel


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tokens:
    """Positions of a call and the ownership of its tokens.

    Token b·T + t of a group belongs to device (b·T + t) // n along the tensor axes, n tokens each;
    with more than one device, owned arrays are [1, n, ...], otherwise [B, T, ...].

    Attributes:
      positions_BT: of the whole batch group, -1 for padding.
      own_positions: of owned tokens; -1 also where a device owns less than n.
      cache_positions_BT: of every sequence of which this device holds cache rows.
      parallel: roles of the mesh axes.
      accepted_B: given where the tokens are drafts to verify: how many rows of the drafts before
        them become part of the state first.
    """

    positions_BT: jax.Array
    own_positions: jax.Array
    cache_positions_BT: jax.Array
    parallel: Parallel = dataclasses.field(metadata={"static": True})
    accepted_B: jax.Array | None = None

    @classmethod
    def of(
        cls, positions_BT: jax.Array, parallel: Parallel, accepted_B: jax.Array | None = None
    ) -> Tokens:
        with jax.named_scope("embedding"):
            everyone = collectives.all_gather(positions_BT, parallel.sequence_batch, 0)
        tokens = cls(positions_BT, positions_BT, everyone, parallel, accepted_B)
        return dataclasses.replace(tokens, own_positions=tokens.own(positions_BT, -1))

    @property
    def per_device(self) -> int:
        """Tokens a device owns, n."""
        return -(-self.positions_BT.size // collectives.size(self.parallel.tensor))

    def _flat(self, x_BT: jax.Array, fill=0) -> jax.Array:
        """[B, T, ...] -> [devices · n, ...]."""
        B, T = self.positions_BT.shape
        missing = self.per_device * collectives.size(self.parallel.tensor) - B * T
        x = x_BT.reshape(B * T, *x_BT.shape[2:])
        widths = [(0, missing)] + [(0, 0)] * (x.ndim - 1)
        return jnp.pad(x, widths, constant_values=jnp.asarray(fill, x.dtype))

    def own(self, x_BT: jax.Array, fill=0) -> jax.Array:
        """The owned part of an array that every device of the group has."""
        axes, n = self.parallel.tensor, self.per_device
        if not axes:
            return x_BT
        start = collectives.index(axes) * n
        return jax.lax.dynamic_slice_in_dim(self._flat(x_BT, fill), start, n)[None]

    def gather(self, *own: jax.Array) -> tuple[jax.Array, ...]:
        """Owned arrays of one dtype -> [B, T, ...] of the whole group, in one exchange."""
        axes = self.parallel.tensor
        if not axes:
            return own
        B, T = self.positions_BT.shape
        widths = [math.prod(x.shape[2:]) for x in own]
        rows = [x.reshape(self.per_device, w) for x, w in zip(own, widths, strict=True)]
        joined = collectives.all_gather(jnp.concatenate(rows, -1), axes, 0)[: B * T]
        ends = [sum(widths[: i + 1]) for i in range(len(widths) - 1)]
        parts = jnp.split(joined, ends, axis=-1)
        return tuple(p.reshape(B, T, *x.shape[2:]) for p, x in zip(parts, own, strict=True))

    def reduce(self, partial_BTD: jax.Array) -> jax.Array:
        """Sums [B, T, D] over the tensor axes; each device keeps the tokens it owns."""
        axes = self.parallel.tensor
        if not axes:
            return partial_BTD
        return collectives.reduce_scatter(self._flat(partial_BTD), axes, 0)[None]

    def contract(self, x_BTF: jax.Array, w_DF, dtype) -> jax.Array:
        """``x @ w.T`` where this device has a part of F: complete rows of owned tokens.

        Partial sums travel in float32, so that the result is rounded once, as on one device.
        """
        return self.reduce(linear(x_BTF, w_DF, out_dtype=jnp.float32)).astype(dtype)

    def exchange(self, x_BTf: jax.Array) -> jax.Array:
        """This device's part f of F features of all tokens -> all F features of owned tokens."""
        flat = self._flat(x_BTf)
        return collectives.all_to_all(flat, self.parallel.tensor, 0, 1)[None]

    def exchange_back(self, x_own: jax.Array) -> jax.Array:
        """All features of owned tokens -> this device's part of the features of all tokens."""
        B, T = self.positions_BT.shape
        flat = x_own.reshape(self.per_device, -1)
        flat = collectives.all_to_all(flat, self.parallel.tensor, 1, 0)
        return flat[: B * T].reshape(B, T, -1)

    def last(self, x_own: jax.Array, index_B: jax.Array) -> jax.Array:
        """[.., n, D] of owned tokens -> [B, D]: token ``index_B`` of each row where it is owned.

        Rows owned elsewhere are some other token; `complete` replaces them.
        """
        B, T = self.positions_BT.shape
        at = jnp.arange(B, dtype=jnp.int32) * T + index_B
        flat = x_own.reshape(*x_own.shape[:-3], -1, x_own.shape[-1])
        if self.parallel.tensor:
            at = jnp.clip(
                at - collectives.index(self.parallel.tensor) * self.per_device,
                0,
                self.per_device - 1,
            )
        return jnp.take(flat, at, axis=-2)

    def complete(self, x_BD: jax.Array, index_B: jax.Array) -> jax.Array:
        """Rows computed from `last`, on every device: those of the owners, summed with zeros."""
        axes = self.parallel.tensor
        if not axes:
            return x_BD
        B, T = self.positions_BT.shape
        owner = (jnp.arange(B, dtype=jnp.int32) * T + index_B) // self.per_device
        mine = owner == collectives.index(axes)
        return collectives.all_reduce(jnp.where(mine[:, None], x_BD, 0), axes)

    def rectangle(self) -> tuple[int, int, jax.Array | int] | None:
        """(sequences, tokens each, first sequence) when owned tokens fill whole rows, or lie in one
        row; None when they do neither."""
        B, T = self.positions_BT.shape
        n, size = self.per_device, collectives.size(self.parallel.tensor)
        if n * size != B * T or (T % n and n % T):
            return None
        return max(1, n // T), min(n, T), collectives.index(self.parallel.tensor) * n // T


@dataclasses.dataclass(frozen=True)
class Stripe:
    """How the rows of a global layer's cache lie on the devices of ``parallel.cache_sequence``.

    Position p is row p // n of device p % n, so every device holds its share of a context of any
    length. Local positions are ``(p - device) // n``: a row s of this device stands for a position
    up to p exactly when s is at most that, and -1 stays -1. Without axes all is the identity.
    """

    parallel: Parallel

    @property
    def count(self) -> int:
        return collectives.size(self.parallel.cache_sequence)

    @property
    def device(self):
        return collectives.index(self.parallel.cache_sequence)

    def visible(self, positions: jax.Array) -> jax.Array:
        """The last local row a query at ``positions`` may see, -1 for none."""
        return (positions - self.device) // self.count

    def target(self, positions: jax.Array) -> jax.Array:
        """The local row of ``positions``, -1 where another device holds it."""
        return jnp.where(positions % self.count == self.device, positions // self.count, -1)

    def position(self, local: jax.Array) -> jax.Array:
        """The position that a local row stands for."""
        return local * self.count + self.device

    def sequences(self, x_BT: jax.Array) -> jax.Array:
        """[B, T, ...] of this batch group -> of every sequence this device holds rows of."""
        return collectives.all_gather(x_BT, self.parallel.sequence_batch, 0)

    def heads(self, q_BTHC: jax.Array) -> jax.Array:
        """Queries of this device -> of all sequences and heads that read its rows."""
        q_BTHC = self.sequences(q_BTHC)
        return collectives.all_gather(q_BTHC, self.parallel.sequence_tensor, 2)

    def all_reduce(self, x: jax.Array) -> jax.Array:
        return collectives.all_reduce(x, self.parallel.cache_sequence)

    def merge(self, width: int):
        """Partial attention over local rows -> complete sums of this device's own queries; only
        the first ``width`` columns of the values are kept."""
        from k3jax.ops.mla import blocks

        p = self.parallel

        def merge(part: blocks.Partial) -> blocks.Partial:
            top_BTH = collectives.all_max(part.top_XM, p.cache_sequence)
            part = blocks.rescale(part, top_BTH)
            sums = jnp.concatenate([part.acc_XMV[..., :width], part.sum_XM[..., None]], -1)
            sums = collectives.reduce_scatter(sums, p.sequence_batch, 0)
            sums = collectives.reduce_scatter(sums, p.sequence_tensor, 2)
            for axes, dim in ((p.sequence_batch, 0), (p.sequence_tensor, 2)):
                if axes:
                    own = top_BTH.shape[dim] // collectives.size(axes)
                    start = collectives.index(axes) * own
                    top_BTH = jax.lax.dynamic_slice_in_dim(top_BTH, start, own, dim)
            return blocks.Partial(sums[..., :-1], top_BTH, sums[..., -1])

        return merge
