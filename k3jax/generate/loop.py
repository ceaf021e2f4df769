"""The generation loop of one prompt: prefill, then decode and sample to a stop id or the limit."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.errors import InputError, K3Error
from k3jax.generate.sampling import BAD_ROW, check_options, sample_step
from k3jax.generate.timing import CompileClock
from k3jax.tokenizer import StreamDecoder, Tokenizer
from k3jax.vision.merge import aligned, expand
from k3jax.vision.merge import prompt as with_images
from k3jax.vision.preprocess import Item, read


@dataclass(frozen=True)
class Generation:
    """What one call of ``generate`` wrote, and how long it took.

    Attributes:
      text: the decoded ``tokens``.
      tokens: the new ids, without the stop id.
      prompt_tokens: number of ids of the prompt.
      seconds: wall time of everything, compilation included.
      tokens_per_second: new tokens after the first over ``decode_seconds``; 0 if there is none.
      finish_reason: "stop" (a stop id came) or "length" (``max_new_tokens`` reached).
      prefill_seconds: from the start to the first token, without compilation.
      decode_seconds: from the first to the last token, without compilation.
      compile_seconds: tracing and compiling, 0 when warm.
    """

    text: str
    tokens: list[int]
    prompt_tokens: int
    seconds: float
    tokens_per_second: float
    finish_reason: str
    prefill_seconds: float
    decode_seconds: float
    compile_seconds: float

    @property
    def prefill_tokens_per_second(self) -> float:
        return self.prompt_tokens / self.prefill_seconds if self.prefill_seconds > 0 else 0.0

    def __str__(self) -> str:
        return (
            f"prefill {self.prompt_tokens} tokens in {self.prefill_seconds:.3f} s"
            f" ({self.prefill_tokens_per_second:.1f} tokens/s), decode {len(self.tokens)} tokens in"
            f" {self.decode_seconds:.3f} s ({self.tokens_per_second:.1f} tokens/s), compile"
            f" {self.compile_seconds:.2f} s apart, finished by {self.finish_reason}"
        )


def check_request(
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    top_k: int,
    seed: int,
    prefill_chunk: int | None = None,
) -> None:
    """Raises InputError for everything wrong with a request that shows without a model."""
    if max_new_tokens < 1:
        raise InputError(f"max_new_tokens {max_new_tokens} is below 1")
    check_options(temperature, top_k, top_p)
    if not 0 <= seed < 2**32:
        raise InputError(f"seed {seed} is outside 0..4294967295")
    if prefill_chunk is not None and prefill_chunk < 1:
        raise InputError(f"prefill_chunk {prefill_chunk} is below 1")


def generate(
    model,
    tokenizer: Tokenizer,
    prompt: str | Sequence[int],
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
    stop_ids: Iterable[int] | None = None,
    on_text: Callable[[str], None] | None = None,
    prefill_chunk: int | None = None,
    images: Sequence | None = None,
) -> Generation:
    """Continues one prompt.

    Args:
      model: has ``config``, ``init_cache``, ``prefill`` and ``decode`` of ``k3jax.model.Model``.
      prompt: text (marker-looking text is ordinary text; the bos id goes first where the tokenizer
        says so), or ids, taken as they are.
      max_new_tokens: most tokens to write.
      temperature, top_p, top_k: as ``k3jax.generate.sampling.sample``; temperature 0 is greedy.
      seed: 0..2^32-1; with equal other arguments it gives equal text.
      stop_ids: ids that end the text; by default the tokenizer's stop ids and the config's
        eos_token_id.
      on_text: called with each new piece of text, whole characters only.
      prefill_chunk: prefill that many tokens at a time.
      images: what ``k3jax.vision.read`` takes. In a prompt of text each
        ``<|kimi_image_placeholder|>`` stands for one, or all stand in front; in ids each
        ``config.media_token_id`` is one, not yet expanded.

    Raises:
      InputError: empty prompt, more or fewer placeholders than images, a model without vision, an
        id outside the vocabulary, prompt and new tokens together above max_position_embeddings or
        the cache, an option outside its range.
      K3Error: the model's logits are not finite.
    """
    check_request(max_new_tokens, temperature, top_p, top_k, seed, prefill_chunk)
    config = model.config
    ids_T, items = encode_prompt(tokenizer, prompt, images, config)
    _check_prompt(ids_T, config, max_new_tokens)
    if stop_ids is None:
        stop_ids = tokenizer.stop_ids | {config.eos_token_id}
    stops = frozenset(stop_ids)
    needed = len(ids_T) + max_new_tokens
    cache = model.init_cache(1, needed)
    if cache.max_length < needed:
        raise InputError(
            f"prompt of {len(ids_T)} tokens and max_new_tokens {max_new_tokens} exceed the cache's"
            f" {cache.max_length}"
        )
    key = jax.random.key(seed)
    options = (
        jnp.asarray(temperature, jnp.float32),
        jnp.asarray(top_k, jnp.int32),
        jnp.asarray(top_p, jnp.float32),
    )
    decoder = StreamDecoder(tokenizer)
    texts: list[str] = []
    tokens: list[int] = []
    finish_reason = "length"

    def emit(text: str) -> None:
        texts.append(text)
        if text and on_text is not None:
            on_text(text)

    with CompileClock() as clock:
        start = time.perf_counter()
        features_TD = None
        if items:
            features_TD = aligned(ids_T, model.encode_images(items), config.media_token_id)
        token_B, cache = _prefill(model, cache, ids_T, features_TD, prefill_chunk, key, options)
        first = last = time.perf_counter()
        for step in range(max_new_tokens):
            following_B = token_B
            if step + 1 < max_new_tokens:
                # Enqueued before the id is read back, so the device does not wait for the host. A
                # stop id wastes this one step.
                logits_BV, cache = model.decode(token_B, cache)
                following_B = sample_step(logits_BV, key, np.int32(step + 1), *options)
            token = int(token_B[0])
            last = time.perf_counter()
            if token == BAD_ROW:
                raise K3Error(f"logits of new token {step} hold NaN or infinity")
            if token in stops:
                finish_reason = "stop"
                break
            tokens.append(token)
            emit(decoder.feed(token))
            token_B = following_B
        emit(decoder.flush())
        end = time.perf_counter()
        prefill_seconds = first - start - clock.seconds(start, first)
        decode_seconds = last - first - clock.seconds(first, last)
        compile_seconds = clock.seconds(start, end)
    decoded = len(tokens) - 1 + (finish_reason == "stop")  # tokens sampled after the first
    return Generation(
        text="".join(texts),
        tokens=tokens,
        prompt_tokens=len(ids_T),
        seconds=end - start,
        tokens_per_second=decoded / decode_seconds if decoded > 0 and decode_seconds > 0 else 0.0,
        finish_reason=finish_reason,
        prefill_seconds=prefill_seconds,
        decode_seconds=decode_seconds,
        compile_seconds=compile_seconds,
    )


def encode_prompt(
    tokenizer: Tokenizer, prompt: str | Sequence[int], images: Sequence | None, config
) -> tuple[list[int], list[Item]]:
    """The ids of a prompt with images expanded, and the images. InputError for an empty one."""
    items = read(images, config) if images else []
    if len(prompt) == 0 and not items:
        raise InputError("the prompt is empty")
    if not isinstance(prompt, str):
        ids_T = list(prompt)
    elif items:
        ids_T = with_images(tokenizer, prompt, items, config.media_token_id)
    else:
        ids_T = tokenizer.encode(prompt)
    if items:
        ids_T = expand(ids_T, [item.tokens for item in items], config.media_token_id)
    if isinstance(prompt, str) and tokenizer.add_bos and tokenizer.bos_id is not None:
        ids_T = [tokenizer.bos_id, *ids_T]
    return ids_T, items


def _check_prompt(ids_T: Sequence[int], config, max_new_tokens: int) -> None:
    for place, token in enumerate(ids_T):
        if not 0 <= token < config.vocab_size:
            raise InputError(
                f"token id {token} at position {place} is outside 0..{config.vocab_size - 1}"
            )
    if len(ids_T) + max_new_tokens > config.max_position_embeddings:
        raise InputError(
            f"prompt of {len(ids_T)} tokens and max_new_tokens {max_new_tokens} exceed"
            f" max_position_embeddings {config.max_position_embeddings}"
        )


def _prefill(model, cache, ids_T, features_TD, chunk, key, options):
    """Returns the first new token (on the device, finished) and the filled cache."""
    tokens_BT = np.asarray([ids_T], np.int32)
    logits_BV = None
    for begin in range(0, len(ids_T), chunk or len(ids_T)):
        piece = slice(begin, begin + (chunk or len(ids_T)))
        rows = {} if features_TD is None else {"features_BTD": features_TD[None, piece]}
        logits_BV, cache = model.prefill(tokens_BT[:, piece], cache, **rows)
    return jax.block_until_ready(sample_step(logits_BV, key, np.int32(0), *options)), cache
