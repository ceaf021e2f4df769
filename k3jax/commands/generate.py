"""``k3jax generate``: text from a prompt."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Literal

import tyro

from k3jax.commands import prepare_jax
from k3jax.errors import InputError


@dataclass(frozen=True)
class Generate:
    """Continue a prompt. Text goes to stdout as it comes, one line of timing to stderr."""

    prompt: tyro.conf.Positional[str] = "-"
    """The text to continue; "-" or nothing reads stdin as it is, which has to be UTF-8."""
    model: str = "nano"
    """A preset or a checkpoint directory."""
    max_new_tokens: int = 64
    """Most tokens to write, at least 1."""
    temperature: float = 0.0
    """0 takes the most likely token every time."""
    top_p: float = 1.0
    """Keep the most likely tokens up to this probability mass, in (0, 1]."""
    top_k: int = 0
    """Keep this many of the most likely tokens; 0 keeps all."""
    seed: int = 0
    """Equal seeds give equal text."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of the weights and the arithmetic; experts stay MXFP4."""
    layout: str | None = None
    """How the model is spread over the devices: a yaml file, or the name of a shipped layout."""
    image: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """An image file, or an animated one for video; once for each. They stand in front of the
    prompt, or where it says <|kimi_image_placeholder|>."""
    vision: bool = True
    """Load the vision tower where there is one; --no-vision saves its memory."""
    echo: bool = False
    """Write the prompt before its continuation."""
    stream: bool = True
    """Write text as it comes; --no-stream writes it all at the end."""

    def run(self) -> None:
        from k3jax.generate.loop import check_request, generate

        check_request(self.max_new_tokens, self.temperature, self.top_p, self.top_k, self.seed)
        if self.image and not self.vision:
            raise InputError(f"--image {self.image[0]} needs the vision tower: no --no-vision")
        prompt = read_stdin() if self.prompt == "-" else self.prompt
        if not prompt:
            raise InputError("the prompt is empty")

        import jax.numpy as jnp

        import k3jax
        from sharding import LayoutError

        items = self.read_images()
        prepare_jax()
        vision = (bool(items) or None) if self.vision else False
        options = {} if self.layout is None else {"layout": self.layout}
        try:
            model, tokenizer = k3jax.load(
                self.model, dtype=jnp.dtype(self.dtype), vision=vision, **options
            )
        except LayoutError as error:
            raise InputError(str(error)) from None
        if tokenizer is None:
            raise InputError(f"{self.model} has no tokenizer (tiktoken.model)")

        def write(text: str) -> None:
            sys.stdout.write(text)
            sys.stdout.flush()

        if self.echo:
            write(prompt)
        result = generate(
            model,
            tokenizer,
            prompt,
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=self.seed,
            on_text=write if self.stream else None,
            images=items,
        )
        write("\n" if self.stream else result.text + "\n")
        print(result, file=sys.stderr)

    def read_images(self) -> list:
        """Items of --image, read before the model: a bad file should not cost a load."""
        if not self.image:
            return []
        from k3jax.config import Config, resolve
        from k3jax.vision.preprocess import read

        return read(self.image, Config.from_hf(resolve(self.model)))


def read_stdin() -> str:
    """All of stdin. Raises InputError, with the byte and its offset, where it is not UTF-8."""
    data = sys.stdin.buffer.read()
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InputError(
            f"stdin is not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}"
        ) from None
