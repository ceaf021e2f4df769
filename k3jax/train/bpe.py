"""Training of the byte-level BPE vocabulary (Hugging Face ``tokenizers``, only needed here)."""

from __future__ import annotations

from collections.abc import Iterable

from k3jax.errors import InputError
from k3jax.tokenizer import PATTERN


def train_bpe(texts: Iterable[str], vocab_size: int, pattern: str = PATTERN) -> dict[bytes, int]:
    """Learns ``vocab_size`` tokens: the 256 bytes as ranks 0..255, then the merges as learnt.

    Args:
      texts: documents; no merge crosses from one to the next.
      vocab_size: ranks, special ids not counted.
      pattern: the split that merges never cross.

    Returns:
      token -> rank, as ``write_tiktoken`` and ``Tokenizer`` take it. Equal texts in an equal order
      give equal ranks.

    Raises:
      InputError: fewer than 256 tokens asked for, or too little text for that many merges.
    """
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    if vocab_size < 256:
        raise InputError(f"vocab_size {vocab_size} is below the 256 bytes")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), behavior="isolated"), byte_level]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,  # a merge seen once would teach one word
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    bpe.train_from_iterator(texts, trainer)
    byte_of = _byte_of_character()
    learnt = sorted(bpe.get_vocab().items(), key=lambda item: item[1])
    tokens = [bytes(byte_of[character] for character in name) for name, _ in learnt]
    ordered = [bytes([byte]) for byte in range(256)]
    ordered += [token for token in tokens if len(token) > 1]
    if len(ordered) < vocab_size:
        raise InputError(f"the text gives {len(ordered)} tokens, {vocab_size} are asked for")
    return {token: rank for rank, token in enumerate(ordered)}


def _byte_of_character() -> dict[str, int]:
    """GPT-2's stand-ins: printable Latin-1 for itself, the others U+0100 upwards in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + place): byte for place, byte in enumerate(hidden)
    }
