"""Cache rows that stay where they are: in one layer of a stacked cache, in a row of a batch each
or in the pages of a pool.

Taking a layer out of its stack first (`stack[layer]`) makes XLA copy it: at a million tokens that
is more than everything else a decode step reads. Ops therefore read blocks or single rows through
this view.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """[B, S, C] rows within a [L, N, P, C] stack, or within [N, P, C].

    Without a table sequence b is entry ``first + b`` of N and S = P. With one, N counts pages of P
    rows in a pool that sequences share, and row s of sequence b is row ``s % P`` of page
    ``table[b, s // P]``. Entries of pages that no query may see may hold any number.

    Attributes:
      stack: the whole array.
      layer: int32 scalar, or None when ``stack`` has no layer axis.
      first: sequence where this view begins, in the stack or in the table.
      batch: sequences of this view.
      table_BM: int32 pages of each sequence, S = M P; None when a sequence is one entry.
    """

    stack: jax.Array
    layer: jax.Array | None
    first: jax.Array | int
    batch: int = dataclasses.field(metadata={"static": True})
    table_BM: jax.Array | None = None

    @classmethod
    def of(cls, rows: Rows | jax.Array, layer=None, table_BM=None) -> Rows:
        """A view of all sequences; a view is returned as it is."""
        if isinstance(rows, Rows):
            return rows
        batch = rows.shape[-3] if table_BM is None else table_BM.shape[0]
        return cls(rows, layer, 0, batch, table_BM)

    def sequences(self, first, batch: int) -> Rows:
        """The view of ``batch`` sequences from ``first`` on."""
        return dataclasses.replace(self, first=self.first + first, batch=batch)

    @property
    def page(self) -> int:
        """Rows of one entry of the stack."""
        return self.stack.shape[-2]

    @property
    def shape(self) -> tuple[int, int, int]:
        pages = 1 if self.table_BM is None else self.table_BM.shape[1]
        return self.batch, pages * self.page, self.stack.shape[-1]

    @property
    def dtype(self):
        return self.stack.dtype

    @property
    def ndim(self) -> int:
        return 3

    def pages(self) -> jax.Array:
        """int32 [B, M]: the entry of the stack that holds each page of each sequence."""
        if self.table_BM is None:
            at_B = self.first + jnp.arange(self.batch, dtype=jnp.int32)
            return at_B[:, None]
        table = jax.lax.dynamic_slice_in_dim(self.table_BM, _int32(self.first), self.batch)
        return jnp.clip(table, 0, self.stack.shape[-3] - 1)

    def block(self, start, size: int) -> jax.Array:
        """[B, size, C], the rows from ``start`` on."""
        width = self.stack.shape[-1]
        if self.table_BM is not None:
            at_S = _int32(start) + jnp.arange(size, dtype=jnp.int32)
            return self.take(jnp.broadcast_to(at_S, (self.batch, 1, size)))[:, 0]
        if self.layer is None:
            at, sizes = (self.first, start, 0), (self.batch, size, width)
            return jax.lax.dynamic_slice(self.stack, list(map(_int32, at)), sizes)
        at, sizes = (self.layer, self.first, start, 0), (1, self.batch, size, width)
        return jax.lax.dynamic_slice(self.stack, list(map(_int32, at)), sizes)[0]

    def whole(self) -> jax.Array:
        """[B, S, C]."""
        return self.block(0, self.shape[1])

    def take(self, at_BTk: jax.Array) -> jax.Array:
        """[B, T, k, C]: single rows, which must exist."""
        batch = jnp.arange(self.batch, dtype=jnp.int32)[:, None, None]
        entry = self.first + batch
        if self.table_BM is not None:
            entry, at_BTk = self.pages()[batch, at_BTk // self.page], at_BTk % self.page
        index = (entry, at_BTk) if self.layer is None else (self.layer, entry, at_BTk)
        return self.stack.at[index].get(mode="promise_in_bounds")


class Scaled(NamedTuple):
    """Rows of codes with a factor each: row s is ``codes[s] * factors[s]``.

    Attributes:
      codes: [B, S, K] float8_e4m3fn.
      factors: [B, S, 1] float32, paged as the codes are.
    """

    codes: Rows
    factors: Rows

    @classmethod
    def of(cls, codes: jax.Array, factors: jax.Array, layer=None, table_BM=None) -> Scaled:
        """A view of all sequences; the factors [.., S] without the axis of width 1."""
        return cls(Rows.of(codes, layer, table_BM), Rows.of(factors[..., None], layer, table_BM))

    def sequences(self, first, batch: int) -> Scaled:
        """The view of ``batch`` sequences from ``first`` on."""
        return Scaled(self.codes.sequences(first, batch), self.factors.sequences(first, batch))

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.codes.shape

    @property
    def dtype(self):
        return self.codes.dtype

    @property
    def ndim(self) -> int:
        return 3


def _int32(at) -> jax.Array:
    return jnp.asarray(at, jnp.int32)
