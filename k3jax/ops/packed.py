"""Sequences packed one after another into a single row of tokens: where each begins and ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from k3jax.errors import InputError

Lengths = Sequence[int] | np.ndarray | Array


def expect_alone(op: str, batch: int, lengths_B: Array | None) -> None:
    """Refuses packed sequences beside other lengths or in more than one row.

    Raises:
      InputError: naming which.
    """
    if lengths_B is not None:
        raise InputError(f"{op}: lengths and packed_lengths given, expected one of them")
    if batch != 1:
        raise InputError(f"{op}: packed_lengths with batch {batch}, expected batch 1")


def bounds(op: str, lengths_N: Lengths, length: int) -> tuple[Array, Array]:
    """(first row, number of rows) of each sequence, int32 [N].

    Args:
      op: what error messages begin with.
      lengths_N: integers >= 0 that sum to ``length``; 0 is a sequence without a token. Values
        under a trace cannot be checked: they are clipped so that no sequence passes ``length``,
        and rows behind their sum belong to none.
      length: T, rows of the packed row.

    Raises:
      InputError: known lengths that are negative or do not sum to ``length``, no sequence at all,
        or something that is no list of integers.
    """
    traced = isinstance(lengths_N, Tracer)
    given_N: Any = lengths_N if traced else np.asarray(lengths_N)
    if given_N.ndim != 1 or not jnp.issubdtype(given_N.dtype, jnp.integer):
        found = f"{given_N.dtype}{list(given_N.shape)}"
        raise InputError(f"{op}: packed_lengths is {found}, expected integers [N]")
    if given_N.shape[0] == 0:
        raise InputError(f"{op}: packed_lengths names no sequence (N = 0)")
    if not traced:
        if (given_N < 0).any():
            at = int(np.argmax(given_N < 0))
            raise InputError(f"{op}: packed_lengths[{at}] = {given_N[at]} is negative")
        if (total := int(given_N.sum())) != length:
            raise InputError(f"{op}: packed_lengths sum to {total}, expected T = {length}")
    # A saturating sum is associative as long as nothing is negative, and cannot overflow.
    clipped_N = jnp.clip(jnp.asarray(given_N).astype(jnp.int32), 0, length)
    end_N = jax.lax.associative_scan(lambda a, b: jnp.minimum(a + b, length), clipped_N)
    start_N = jnp.concatenate([jnp.zeros((1,), jnp.int32), end_N[:-1]])
    return start_N, end_N - start_N
