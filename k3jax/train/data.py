"""The corpus: the Python standard library's own sources, some modules held out by name."""

from __future__ import annotations

import fnmatch
import hashlib
import json
import lzma
import platform
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from k3jax.config import Config
from k3jax.errors import ConfigError, InputError
from k3jax.train.settings import DataSettings, TrainSettings

RUN = 6  # lines; shorter runs meet in licence heads and import blocks
SHARED_SHARE = 0.05
RULE = (
    "For each name X that is held out, the file X.py or the package X/ is. The training set also "
    "leaves out every file that follows X by name (a part of its path is X or begins with X_ once "
    "a leading test_, _py or _ is taken off: test_X.py, test_X/, _X.py, _pyX.py) or by content "
    f"(it shares at least {SHARED_SHARE:.0%} of its own or of X's runs of {RUN} consecutive "
    "non-blank lines)."
)
_NOT_SOURCE = {"site-packages", "dist-packages", "__pycache__", "lib-dynload"}


@dataclass(frozen=True)
class Document:
    """One source file: path below the library root with "/" between parts, and its text."""

    path: str
    text: str

    @property
    def data(self) -> bytes:
        return self.text.encode("utf-8")


@dataclass(frozen=True)
class Corpus:
    """Documents by use, each list in path order; ``dropped`` maps a path to the reason."""

    train: list[Document]
    dev: list[Document]
    heldout: list[Document]
    dropped: dict[str, str]


def library_root() -> Path:
    """The running interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def read_library(root: Path, exclude: Sequence[str] = ()) -> list[Document]:
    """All Python sources below ``root`` in path order.

    Left out: installed packages, files made for one machine (``_sysconfigdata*``, ``config-*``),
    ``exclude`` globs, empty files and files that are not UTF-8. A byte-order mark and "\\r\\n" stay
    as they are: the text encodes back to the same bytes.
    """
    documents = []
    for path in sorted(root.rglob("*.py"), key=lambda p: p.relative_to(root).as_posix()):
        name = path.relative_to(root).as_posix()
        parts = name.split("/")
        if _NOT_SOURCE & set(parts) or name.startswith(("_sysconfigdata", "config-")):
            continue
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in exclude):
            continue
        try:
            text = path.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            continue
        if text.strip():
            documents.append(Document(name, text))
    return documents


def _core(component: str) -> str:
    name = component.removesuffix(".py").removeprefix("test_")
    return name.removeprefix("_py").lstrip("_")


def follows_by_name(path: str, module: str) -> bool:
    """Whether a path belongs to a module by its name alone.

    >>> follows_by_name("test/test_heapq.py", "heapq"), follows_by_name("queue.py", "heapq")
    (True, False)
    """
    core = [_core(part) for part in path.split("/")]
    return any(part == module or part.startswith(module + "_") for part in core)


def _is_module(path: str, module: str) -> bool:
    return path == f"{module}.py" or path.startswith(f"{module}/")


def _runs(text: str) -> set[int]:
    lines = [line.strip() for line in text.splitlines()]
    lines = [line for line in lines if line]
    return {hash(tuple(lines[i : i + RUN])) for i in range(len(lines) - RUN + 1)}


def split_library(documents: list[Document], settings: DataSettings) -> Corpus:
    """Splits into train, dev and heldout by ``RULE``.

    Raises:
      ConfigError: a held-out name that the library lacks, or one listed in both lists.
    """
    both = sorted(set(settings.dev) & set(settings.heldout))
    if both:
        raise ConfigError(f"data.dev: {both[0]!r} is in data.heldout too")
    uses: dict[str, list[Document]] = {"dev": [], "heldout": []}
    for use, modules in (("dev", settings.dev), ("heldout", settings.heldout)):
        for module in modules:
            found = [d for d in documents if _is_module(d.path, module)]
            if not found:
                raise ConfigError(f"data.{use}: the library has no module {module!r}")
            uses[use] += found
    kept_out = {d.path for use in uses.values() for d in use}
    held = [(d.path, _runs(d.text)) for use in uses.values() for d in use]
    owners: dict[int, list[int]] = {}
    for index, (_, runs) in enumerate(held):
        for run in runs:
            owners.setdefault(run, []).append(index)

    train, dropped = [], {}
    for document in documents:
        if document.path in kept_out:
            continue
        modules = (*settings.dev, *settings.heldout)
        module = next((m for m in modules if follows_by_name(document.path, m)), None)
        if module is not None:
            dropped[document.path] = f"named after {module}"
            continue
        shared: dict[int, int] = {}
        runs = _runs(document.text)
        for run in runs:
            for index in owners.get(run, ()):
                shared[index] = shared.get(index, 0) + 1
        for index, count in shared.items():
            path, other = held[index]
            if count >= SHARED_SHARE * min(len(runs), len(other)):
                dropped[document.path] = f"shares {count} runs of {RUN} lines with {path}"
        if document.path not in dropped:
            train.append(document)
    order = {use: sorted(found, key=lambda d: d.path) for use, found in uses.items()}
    return Corpus(train, order["dev"], order["heldout"], dropped)


def load_corpus(settings: DataSettings, root: Path | None = None) -> Corpus:
    """The split library; ``root`` defaults to the running interpreter's."""
    root = library_root() if root is None else Path(root)
    documents = read_library(root, settings.exclude)
    if not documents:
        raise InputError(f"no Python source below {root}: the corpus is the standard library")
    return split_library(documents, settings)


def digest(documents: Iterable[Document]) -> str:
    """sha256 of the documents' bytes, one after the other."""
    result = hashlib.sha256()
    for document in documents:
        result.update(document.data)
    return result.hexdigest()


def xz_bytes(documents: Iterable[Document], preset: int = 9) -> int:
    """Size of ``xz -9`` over the concatenated documents, its container included."""
    return len(lzma.compress(b"".join(d.data for d in documents), preset=preset))


def tokens_of(documents: Iterable[Document], encode, bos: int, eos: int) -> np.ndarray:
    """BOS, text and EOS of each document, one after the other, as uint16.

    A document's start is where BOS stands: text is encoded without special ids, so no other place
    holds it.

    Raises:
      InputError: an id that uint16 cannot hold.
    """
    pieces = []
    for document in documents:
        ids = np.asarray([bos, *encode(document.text), eos], dtype=np.int64)
        if ids.max() > np.iinfo(np.uint16).max:
            raise InputError(f"token id {ids.max()} of {document.path} does not fit 16 bits")
        pieces.append(ids.astype(np.uint16))
    return np.concatenate(pieces)


def prepare(settings: TrainSettings, out_dir: str | Path, root: Path | None = None) -> dict:
    """Trains the tokenizer and writes everything a machine without the sources needs.

    Writes ``tiktoken.model``, ``tokenizer_config.json``, ``train.npy``, ``dev.npy``,
    ``heldout.npy`` (uint16) and, last, ``data.json`` (returned): sizes, digests, the file lists and
    the xz figures. The same interpreter and settings give the same bytes.

    Raises:
      ConfigError: the recipe's special ids do not follow its byte-pair ranks.
    """
    from k3jax.tokenizer import Tokenizer, write_tokenizer
    from k3jax.train.bpe import train_bpe

    out = Path(out_dir)
    out.mkdir(parents=True, exist_ok=True)
    config = Config.from_hf(settings.model)
    ranks = settings.data.bpe_ranks
    if ranks + 256 != config.vocab_size:
        raise ConfigError(
            f"data.bpe_ranks: {ranks} and 256 special ids do not make vocab_size "
            f"{config.vocab_size}"
        )
    corpus = load_corpus(settings.data, root)
    merges = train_bpe((d.text for d in corpus.train), ranks)
    write_tokenizer(out, merges, special_tokens(config))
    tokenizer = Tokenizer.load(out, config)

    record: dict = {
        "python": platform.python_version(),
        "rule": RULE,
        "bos": config.bos_token_id,
        "eos": config.eos_token_id,
        "dropped": corpus.dropped,
        "excluded": list(settings.data.exclude),
        "sets": {},
    }
    for use in ("train", "dev", "heldout"):
        documents = getattr(corpus, use)
        stream = tokens_of(documents, tokenizer.encode, config.bos_token_id, config.eos_token_id)
        np.save(out / f"{use}.npy", stream)
        entry = {
            "files": len(documents),
            "bytes": sum(len(d.data) for d in documents),
            "tokens": int(stream.size),
            "sha256": digest(documents),
        }
        if use != "train":
            entry["xz_bytes"] = {
                "xz -9": xz_bytes(documents, 9),
                "xz -9e": xz_bytes(documents, 9 | lzma.PRESET_EXTREME),
            }
            entry["documents"] = [{"path": d.path, "bytes": len(d.data)} for d in documents]
        record["sets"][use] = entry
    (out / "data.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return record


def special_tokens(config: Config) -> dict[int, str]:
    """Names of the special ids in use; the other ids after the ranks stay reserved."""
    return {
        config.bos_token_id: "[BOS]",
        config.eos_token_id - 1: "[EOS]",
        config.eos_token_id: "<|end_of_msg|>",
        config.media_token_id: "<|media_pad|>",
        config.pad_token_id: "[PAD]",
    }
