"""Exact code length of held-out text: windows over a token stream and the sum of -log2 p."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np


def windows(
    stream_N: np.ndarray, bos: int, context: int, stride: int
) -> tuple[np.ndarray, np.ndarray]:
    """Cuts every document into windows such that each token after BOS is predicted exactly once.

    A document's first window counts all its targets, each later one starts ``stride`` further and
    counts its last ``stride`` targets, so a token sees at least ``context - stride`` tokens of its
    own document before it, where there are that many.

    Args:
      stream_N: ids of all documents, each beginning with ``bos`` (which occurs nowhere else).

    Returns:
      tokens [W, context + 1] int32, zero-padded at the end, inputs ``[:, :-1]`` and targets
      ``[:, 1:]``; counted [W, context] bool.
    """
    stream = np.asarray(stream_N, np.int32)
    starts = np.flatnonzero(stream == bos)
    rows, masks = [], []
    for start, end in zip(starts, [*starts[1:], stream.size], strict=True):
        document = stream[start:end]
        done = 1  # tokens that need no prediction any more
        offset = 0
        while done < document.size:
            piece = document[offset : offset + context + 1]
            row = np.zeros(context + 1, np.int32)
            row[: piece.size] = piece
            mask = np.zeros(context, bool)
            mask[done - offset - 1 : piece.size - 1] = True
            rows.append(row)
            masks.append(mask)
            done = offset + piece.size
            offset += stride
    return np.stack(rows), np.stack(masks)


def batched(array_W: np.ndarray, batch: int) -> np.ndarray:
    """[W, ...] -> [ceil(W / batch), batch, ...], zero rows added."""
    pad = -len(array_W) % batch
    array_W = np.concatenate([array_W, np.zeros((pad, *array_W.shape[1:]), array_W.dtype)])
    return array_W.reshape(-1, batch, *array_W.shape[1:])


def token_nats(logits_BTV: jax.Array, targets_BT: jax.Array) -> jax.Array:
    """-ln p(target) of each position, float32 [B, T]."""
    logits_BTV = logits_BTV.astype(jnp.float32)
    picked = jnp.take_along_axis(logits_BTV, targets_BT[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits_BTV, axis=-1) - picked


def total_bits(
    logits_of: Callable[[np.ndarray], jax.Array],
    tokens_WS: np.ndarray,
    counted_WT: np.ndarray,
    batch: int,
    progress: Callable[[int, int], None] | None = None,
) -> float:
    """Sum of -log2 p over the counted targets, batch by batch, the sum in float64.

    Args:
      logits_of: int32 [batch, T] -> logits [batch, T, V].
      progress: called with (windows done, windows) after each batch.
    """
    nats = jax.jit(token_nats)
    total = 0.0
    tokens, counted = batched(tokens_WS, batch), batched(counted_WT, batch)
    for index, (rows, mask) in enumerate(zip(tokens, counted, strict=True)):
        lost = np.asarray(nats(logits_of(rows[:, :-1]), rows[:, 1:]), np.float64)
        total += float(lost[mask].sum())
        if progress is not None:
            progress(min((index + 1) * batch, len(tokens_WS)), len(tokens_WS))
    return total / math.log(2)
