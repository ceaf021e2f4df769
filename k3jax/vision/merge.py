"""The expanding merge: one placeholder in a prompt becomes the rows of its image.

Everything after it (positions, lengths, caches, keys of a prefix cache) counts expanded tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from k3jax.errors import InputError
from k3jax.vision.preprocess import Item

PLACEHOLDER = "<|kimi_image_placeholder|>"  # in text; never a token
BEGIN, CONTENT, END = "<|media_begin|>", "<|media_content|>", "<|media_end|>"


def expand(ids_T: Sequence[int], counts: Sequence[int], media_id: int) -> list[int]:
    """Each ``media_id`` in turn repeated ``counts[i]`` times.

    Raises:
      InputError: not as many placeholders as counts.
    """
    found = sum(token == media_id for token in ids_T)
    if found != len(counts):
        raise InputError(f"{found} image placeholders for {len(counts)} images")
    remaining = iter(counts)
    result: list[int] = []
    for token in ids_T:
        result += [token] * next(remaining) if token == media_id else [token]
    return result


def aligned(ids_T: Sequence[int], features: Sequence[np.ndarray], media_id: int) -> np.ndarray:
    """[T, D]: feature rows at the placeholders of expanded ids, zeros elsewhere.

    Args:
      ids_T: what `expand` gave.
      features: one [tokens, D] array an item.
    Raises:
      InputError: more or fewer rows than placeholders.
    """
    places = np.flatnonzero(np.asarray(ids_T) == media_id)
    rows = sum(len(one) for one in features)
    if rows != len(places) or not features:
        raise InputError(f"{rows} feature rows for {len(places)} expanded placeholders")
    result = np.zeros((len(ids_T), features[0].shape[1]), features[0].dtype)
    start = 0
    for one in features:
        result[places[start : start + len(one)]] = one
        start += len(one)
    return result


def prompt(tokenizer, text: str, items: Sequence[Item], media_id: int) -> list[int]:
    """The ids of a prompt with images, one placeholder an item, not yet expanded.

    Every ``<|kimi_image_placeholder|>`` in the text stands for the next item; a text without any
    gets all items in front. An item is written ``<|media_begin|>image WxH<|media_content|>``, the
    placeholder, ``<|media_end|>``, with the size of the original. Other marker-looking text stays
    ordinary text. Groups of a video are items of their own (no published prompt form of video is
    known).

    Raises:
      InputError: another number of placeholders than items; a tokenizer without the markers.
    """
    missing = [m for m in (BEGIN, CONTENT, END) if m not in tokenizer.special_tokens]
    if missing and items:
        raise InputError(f"the tokenizer does not know {', '.join(missing)}: it takes no images")
    parts = text.split(PLACEHOLDER)
    if len(parts) == 1:
        parts = [""] * len(items) + [text]
    if len(parts) - 1 != len(items):
        raise InputError(f"{len(parts) - 1} image placeholders for {len(items)} images")
    ids: list[int] = tokenizer.encode(parts[0])
    for item, after in zip(items, parts[1:], strict=True):
        size = f"image {item.width}x{item.height}"
        ids += tokenizer.encode_segments([(BEGIN, True), (size, False), (CONTENT, True)])
        ids += [media_id, *tokenizer.encode(END, True), *tokenizer.encode(after)]
    return ids
