"""Cache rows that stay where they are: one layer, and some batch rows, of a stacked cache.

Taking a layer out of its stack first (`stack[layer]`) makes XLA copy it: at a million tokens that
is more than everything else a decode step reads. Ops therefore read blocks or single rows through
this view.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """[B, S, C] rows within a [L, B', S, C] stack, or within [B', S, C].

    Attributes:
      stack: the whole array.
      layer: int32 scalar, or None when ``stack`` has no layer axis.
      first: batch row of the stack where this view begins.
      batch: batch rows of this view.
    """

    stack: jax.Array
    layer: jax.Array | None
    first: jax.Array | int
    batch: int = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, rows: Rows | jax.Array, layer=None) -> Rows:
        """A view of all batch rows; a view is returned as it is."""
        if isinstance(rows, Rows):
            return rows
        return cls(rows, layer, 0, rows.shape[-3])

    def sequences(self, first, batch: int) -> Rows:
        """The view of ``batch`` rows from ``first`` on."""
        return dataclasses.replace(self, first=self.first + first, batch=batch)

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.batch, self.stack.shape[-2], self.stack.shape[-1]

    @property
    def dtype(self):
        return self.stack.dtype

    @property
    def ndim(self) -> int:
        return 3

    def block(self, start, size: int) -> jax.Array:
        """[B, size, C], the rows from ``start`` on."""
        width = self.stack.shape[-1]
        if self.layer is None:
            at, sizes = (self.first, start, 0), (self.batch, size, width)
            return jax.lax.dynamic_slice(self.stack, _int32(at), sizes)
        at, sizes = (self.layer, self.first, start, 0), (1, self.batch, size, width)
        return jax.lax.dynamic_slice(self.stack, _int32(at), sizes)[0]

    def whole(self) -> jax.Array:
        """[B, S, C]."""
        return self.block(0, self.stack.shape[-2])

    def take(self, at_BTk: jax.Array) -> jax.Array:
        """[B, T, k, C]: single rows, which must exist."""
        row = self.first + jnp.arange(self.batch, dtype=jnp.int32)[:, None, None]
        index = (row, at_BTk) if self.layer is None else (self.layer, row, at_BTk)
        return self.stack.at[index].get(mode="promise_in_bounds")


def _int32(at) -> list[jax.Array]:
    return [jnp.asarray(a, jnp.int32) for a in at]
