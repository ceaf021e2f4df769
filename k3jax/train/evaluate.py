"""Held-out bits per byte of a trained checkpoint against xz, and two continuations.

``python -m k3jax.train.evaluate DIR`` reads the held-out files named in the checkpoint's
``training.json`` from the running interpreter's library.
"""

from __future__ import annotations

import json
import logging
import lzma
from pathlib import Path
from typing import Any

import numpy as np

from k3jax.errors import CheckpointError, InputError
from k3jax.train import bits, data
from k3jax.train.export import RECORD, model_card

PROMPTS = (
    "def fibonacci(n):\n",
    'class Stack:\n    """A last-in, first-out container.\n',
)
_log = logging.getLogger(__name__)


def read_record(directory: str | Path) -> dict[str, Any]:
    """``training.json``. Raises CheckpointError where it is absent or broken."""
    path = Path(directory) / RECORD
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(str(directory), [f"{RECORD}: {error}"]) from None


def heldout_documents(
    record: dict[str, Any], use: str = "heldout", root: Path | None = None
) -> tuple[list[data.Document], bool]:
    """The documents of a set from a library, and whether they are the bytes of the record.

    Raises:
      InputError: the library lacks one of them.
    """
    root = data.library_root() if root is None else Path(root)
    wanted = record["data"]["sets"][use]
    documents = []
    for entry in wanted["documents"]:
        path = root / entry["path"]
        try:
            documents.append(data.Document(entry["path"], path.read_bytes().decode("utf-8")))
        except OSError as error:
            raise InputError(f"held-out file {entry['path']}: {error.strerror}") from None
    return documents, data.digest(documents) == wanted["sha256"]


def bits_per_byte(
    model,
    tokenizer,
    documents: list[data.Document],
    *,
    context: int = 1024,
    stride: int = 512,
    batch: int = 4,
    progress=None,
) -> float:
    """Exact code length of the documents, end marks included, over their UTF-8 bytes.

    Args:
      model: `k3jax.runtime.Model`, or any ``f(tokens_BT) -> logits_BTV`` with ``config``.
      context, stride: see `k3jax.train.bits.windows`.
    """
    config = model.config
    stream = data.tokens_of(documents, tokenizer.encode, config.bos_token_id, config.eos_token_id)
    tokens, counted = bits.windows(stream, config.bos_token_id, context, stride)
    total = bits.total_bits(model, tokens, counted, batch, progress)
    return total / sum(len(d.data) for d in documents)


def evaluate(
    directory: str | Path,
    *,
    context: int | None = None,
    stride: int | None = None,
    root: Path | None = None,
    samples: int = 96,
    dtype: str = "bfloat16",
    update: bool = False,
) -> dict[str, Any]:
    """Prints the table and the continuations; returns the figures.

    Args:
      directory: checkpoint folder or preset with a ``training.json``.
      context, stride: in tokens; the recipe's if None.
      root: library to read; the running interpreter's if None.
      samples: tokens of each continuation; 0 for none.
      update: write the figure into ``training.json`` and the model card.

    Raises:
      InputError: ``update`` on files other than the recorded ones.
    """
    import jax.numpy as jnp
    from rich.console import Console
    from rich.progress import track
    from rich.table import Table

    from k3jax import config as config_module
    from k3jax.loading import load

    directory = config_module.resolve(directory)
    record = read_record(directory)
    settings = record["settings"]
    window = {
        "context": int(settings["eval_context"] if context is None else context),
        "stride": int(settings["eval_stride"] if stride is None else stride),
    }
    documents, same = heldout_documents(record, root=root)
    model, tokenizer = load(directory, dtype=jnp.dtype(dtype))
    assert tokenizer is not None
    console = Console()
    per_document = []
    for document in track(documents, "Held-out files", console=console, transient=True):
        per_document.append(bits_per_byte(model, tokenizer, [document], **window))
    sizes = np.array([len(d.data) for d in documents])
    figures = {
        "k3jax": float(np.average(per_document, weights=sizes)),
        "xz -9": 8 * data.xz_bytes(documents, 9) / int(sizes.sum()),
        "xz -9e": 8 * data.xz_bytes(documents, 9 | lzma.PRESET_EXTREME) / int(sizes.sum()),
    }
    table = Table("bits per byte", "k3jax", "bytes", title=f"held-out files of {directory.name}")
    for document, value in zip(documents, per_document, strict=True):
        table.add_row(document.path, f"{value:.4f}", f"{len(document.data):,}")
    table.add_section()
    for name, value in figures.items():
        table.add_row(f"all, {name}", f"{value:.4f}", f"{int(sizes.sum()):,}")
    console.print(table)
    if not same:
        console.print(
            f"These files differ from those of Python {record['data']['python']}, on which the "
            "model card's figure was measured.",
            style="yellow",
        )
    if update:
        if not same:
            raise InputError("update: the library's held-out files are not the recorded ones")
        settings |= {"eval_context": window["context"], "eval_stride": window["stride"]}
        record["heldout_bits_per_byte"] = figures["k3jax"]
        (directory / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        (directory / "README.md").write_text(model_card(record), encoding="utf-8")
    if samples:
        from k3jax.generate.loop import generate

        for prompt in PROMPTS:
            text = generate(model, tokenizer, prompt, samples, temperature=0.0).text
            console.rule("greedy continuation")
            console.print(prompt + text, markup=False, highlight=False)
    return figures | {"files_match": same}


if __name__ == "__main__":
    import sys

    import tyro

    from k3jax.errors import K3Error

    try:
        tyro.cli(evaluate)
    except K3Error as error:
        sys.exit(f"error: {error}")
