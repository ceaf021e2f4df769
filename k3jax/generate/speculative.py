"""Greedy generation with drafts: guesses are verified a window at a time, what proves right stays.

Any function that guesses the next ids can propose; `repeated` needs no second model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from k3jax.errors import InputError, K3Error

# (ids so far, most guesses wanted) -> guesses, at most that many are used
Proposer = Callable[[Sequence[int], int], Sequence[int]]


@dataclass(frozen=True)
class Speculation:
    """Attributes:
    tokens: the new ids, the stop id among them if one came.
    windows: calls of `Model.verify`.
    drafted, accepted: guesses that were verified, and that proved right.
    """

    tokens: list[int]
    windows: int
    drafted: int
    accepted: int


def repeated(ids: Sequence[int], count: int, longest: int = 3) -> Sequence[int]:
    """What followed the last earlier place of the longest suffix of at most ``longest`` ids."""
    ids = list(ids)
    for size in range(min(longest, len(ids) - 1), 0, -1):
        suffix = ids[-size:]
        for start in range(len(ids) - size - 1, -1, -1):
            if ids[start : start + size] == suffix:
                return ids[start + size : start + size + count]
    return []


def speculate(
    model,
    prompt: Sequence[int],
    max_new_tokens: int = 64,
    *,
    propose: Proposer = repeated,
    window: int = 4,
    stop_ids: Iterable[int] = (),
) -> Speculation:
    """Continues a prompt with the ids of greedy decoding, several a step where guesses are right.

    Args:
      model: a `k3jax.runtime.Model`.
      prompt: ids.
      max_new_tokens: most ids to write.
      propose: called with prompt and new ids before every window.
      window: ids run at once, the last chosen one and ``window`` - 1 guesses.
      stop_ids: ids that end the text.

    Raises:
      InputError: an empty prompt, an option below 1, ids outside the vocabulary, or more tokens
        than the model has positions.
      K3Error: the model's logits are not finite.
    """
    if max_new_tokens < 1 or window < 1:
        raise InputError(f"max_new_tokens {max_new_tokens}, window {window}: at least 1 each")
    stops, tokens, windows, drafted, accepted = frozenset(stop_ids), [], 0, 0, 0
    cache = model.init_cache(1, len(prompt) + max_new_tokens)
    logits_BV, cache = model.prefill(np.asarray([prompt], np.int32), cache)
    tokens += _greedy(logits_BV)
    kept_B = None
    while len(tokens) < max_new_tokens and tokens[-1] not in stops:
        # The window's own choice at its end is one more id.
        most = min(window, max_new_tokens - len(tokens)) - 1
        drafts = list(propose([*prompt, *tokens], most))[:most] if most else []
        rows_BT = np.zeros((1, window), np.int32)
        rows_BT[0, : len(drafts) + 1] = [tokens[-1], *drafts]
        logits_BTV, cache = model.verify(rows_BT, cache, kept_B, [len(drafts) + 1])
        chosen = _greedy(logits_BTV[0, : len(drafts) + 1])
        right = [draft == choice for draft, choice in zip(drafts, chosen, strict=False)]
        kept = right.index(False) if False in right else len(drafts)
        kept_B = [kept + 1]
        windows, drafted, accepted = windows + 1, drafted + len(drafts), accepted + kept
        for token in chosen[: kept + 1]:  # an accepted draft is the model's own choice
            tokens.append(token)
            if token in stops:
                break
    return Speculation(tokens, windows, drafted, accepted)


def _greedy(logits_NV) -> list[int]:
    if not np.isfinite(np.asarray(jnp.max(logits_NV, -1))).all():
        raise K3Error("logits hold NaN or infinity")
    return np.asarray(jnp.argmax(logits_NV, -1)).tolist()
