"""The table of chunks of packed sequences: each sequence begins a chunk of its own.

A sequence of n rows takes ceil(n / chunk) chunks, the last one padded, so that its chunks hold what
they would hold if it were alone. With N sequences and T rows that is at most
(T + (chunk - 1) min(N, T)) / chunk chunks, a number known without the lengths; the chunks that the
lengths leave over stand at the end. All values are arrays, so lengths may be traced.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Packing:
    """C chunks of ``chunk`` rows, R = C chunk padded rows, over N sequences in T packed rows.

    Attributes:
      start_N, length_N: int32, first packed row and number of rows of each sequence.
      row_R: int32, the packed row that stands at each padded row; -1 for padding.
      padded_T: int32, the padded row of each packed row; -1 behind the last sequence.
      sequence_C: int32, the sequence of each chunk; N for a chunk that is left over.
      first_C, last_C: bool, whether a chunk is the first or last one of its sequence.
      chunk: rows of a chunk.
    """

    start_N: Array
    length_N: Array
    row_R: Array
    padded_T: Array
    sequence_C: Array
    first_C: Array
    last_C: Array
    chunk: int = dataclasses.field(metadata={"static": True})

    def pad(self, x_1TX: Array) -> Array:
        """[1, T, ...] -> [1, R, ...], zeros in padding."""
        row_R = jnp.where(self.row_R < 0, x_1TX.shape[1], self.row_R)
        return x_1TX.at[:, row_R].get(mode="fill", fill_value=0)

    def unpad(self, x_1RX: Array) -> Array:
        """[1, R, ...] -> [1, T, ...], zeros behind the last sequence."""
        padded_T = jnp.where(self.padded_T < 0, x_1RX.shape[1], self.padded_T)
        return x_1RX.at[:, padded_T].get(mode="fill", fill_value=0)


def num_chunks(sequences: int, length: int, chunk: int) -> int:
    """Chunks that N sequences of T rows together need at most."""
    return (length + (chunk - 1) * min(sequences, length)) // chunk


def pack(start_N: Array, length_N: Array, length: int, chunk: int) -> Packing:
    """The table of sequences as `k3jax.ops.packed.bounds` gives them, in ``length`` rows."""
    sequences = start_N.shape[0]
    chunks = num_chunks(sequences, length, chunk)
    after_N = jnp.cumsum((length_N + chunk - 1) // chunk, dtype=jnp.int32)
    before_N = after_N - (length_N + chunk - 1) // chunk
    number_C = jnp.arange(chunks, dtype=jnp.int32)
    sequence_C = jnp.searchsorted(after_N, number_C, side="right").astype(jnp.int32)
    of_C = jnp.minimum(sequence_C, sequences - 1)
    used_C = sequence_C < sequences
    offset_CR = (number_C - before_N[of_C])[:, None] * chunk + jnp.arange(chunk, dtype=jnp.int32)
    real_CR = used_C[:, None] & (offset_CR < length_N[of_C][:, None])
    row_R = jnp.where(real_CR, start_N[of_C][:, None] + offset_CR, -1).reshape(-1)

    row_T = jnp.arange(length, dtype=jnp.int32)
    end_N = start_N + length_N
    of_T = jnp.minimum(jnp.searchsorted(end_N, row_T, side="right"), sequences - 1)
    padded_T = before_N[of_T] * chunk + row_T - start_N[of_T]
    return Packing(
        start_N,
        length_N,
        row_R,
        jnp.where(row_T < end_N[-1], padded_T, -1).astype(jnp.int32),
        sequence_C,
        used_C & (number_C == before_N[of_C]),
        used_C & (number_C == after_N[of_C] - 1),
        chunk,
    )
