"""The tokenizer: ``tiktoken.model``, special ids of ``tokenizer_config.json``, streaming decode."""

from __future__ import annotations

import base64
import binascii
import codecs
import json
import operator
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import tiktoken

from k3jax.errors import CheckpointError, InputError

if TYPE_CHECKING:
    from k3jax.config import Config

RANKS_FILE = "tiktoken.model"
NUM_SPECIAL = 256  # ids after the ranks, where no vocab_size says otherwise
MAX_PIECE = 400_000  # characters given to the splitter at once
MAX_RUN = 25_000  # the splitter's regular expression recurses; longer runs overflow its stack
MAX_PROBLEMS = 20  # a damaged file may have 163,584 bad lines

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_PREFIX = r"[^\r\n\p{L}\p{N}]?"
_CONTRACTION = r"(?i:'(?:s|t|re|ve|m|ll|d))?"

# K3's split, first match wins. The last three keep the space before a word with the word.
PATTERN = "|".join(
    (
        r"\p{Han}+",
        _PREFIX + _UPPER + "*" + _LOWER + "+" + _CONTRACTION,
        _PREFIX + _UPPER + "+" + _LOWER + "*" + _CONTRACTION,
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)

_RUN = re.compile(r"\s+|\S+")


class Tokenizer:
    """Byte-level BPE over ``ranks`` plus special ids; text <-> ids.

    Attributes:
      vocab_size: ranks and special ids together.
      bos_id, eos_id, pad_id: int or None where neither config nor tokenizer_config names one.
      stop_ids: the ids that end a generation: the config's eos_token_id and the tokenizer's own
        eos token, which differ in K3 (163586 ``<|end_of_msg|>`` and 163585 ``[EOS]``).
      special_tokens: name -> id.
      add_bos: a plain text prompt starts with bos_id (tokenizer_config's ``add_bos_token``).
        ``encode`` never adds it.

    Raises:
      CheckpointError: ranks that are not 0..n-1, a byte without a token, special ids that do not
        directly follow the ranks.
    """

    def __init__(
        self,
        ranks: Mapping[bytes, int],
        special_tokens: Mapping[str, int] | None = None,
        *,
        bos_id: int | None = None,
        eos_id: int | None = None,
        pad_id: int | None = None,
        stop_ids: Iterable[int] = (),
        add_bos: bool = False,
        pattern: str = PATTERN,
    ):
        self.special_tokens = dict(special_tokens or {})
        self.bos_id, self.eos_id, self.pad_id = bos_id, eos_id, pad_id
        self.stop_ids = frozenset(stop_ids) | ({eos_id} if eos_id is not None else set())
        self.add_bos = add_bos
        by_id = {rank: token for token, rank in ranks.items()}
        by_id |= {number: name.encode() for name, number in self.special_tokens.items()}
        self.vocab_size = len(ranks) + len(self.special_tokens)
        problems = [
            f"byte 0x{byte:02x} has no token" for byte in range(256) if bytes([byte]) not in ranks
        ]
        if set(by_id) != set(range(self.vocab_size)):
            problems.append(
                f"{len(ranks)} ranks and {len(self.special_tokens)} special ids do not cover"
                f" 0..{self.vocab_size - 1} once each"
            )
        for name in ("bos_id", "eos_id", "pad_id"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < self.vocab_size:
                problems.append(f"{name} {value} is outside 0..{self.vocab_size - 1}")
        if add_bos and bos_id is None:
            problems.append("add_bos_token is true, but there is no bos id")
        if problems:
            raise CheckpointError("tokenizer", _shortened(problems))
        self._token_bytes = [by_id[number] for number in range(self.vocab_size)]
        self._bpe = tiktoken.Encoding(
            "k3jax", pat_str=pattern, mergeable_ranks=dict(ranks), special_tokens={}
        )
        names = sorted(self.special_tokens, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, names))) if names else None

    @classmethod
    def load(cls, directory: str | os.PathLike, config: Config | None = None) -> Tokenizer:
        """Reads ``tiktoken.model``, ``tokenizer_config.json`` and the ids of ``config.json``.

        Args:
          directory: a checkpoint directory. Without ``tokenizer_config.json`` every special id is
            named ``<|reserved_token_{id}|>``.
          config: gives vocab_size and the bos, eos and pad ids instead of ``config.json``.

        Raises:
          CheckpointError: everything wrong with the files, naming file and line.
        """
        directory = Path(directory)
        ranks = read_tiktoken(directory / RANKS_FILE)
        names = _read_json(directory / "tokenizer_config.json")
        ids = _config_ids(directory) if config is None else _object_ids(config)
        problems: list[str] = []
        vocab_size = ids.get("vocab_size")
        if vocab_size is None:
            vocab_size = len(ranks) + NUM_SPECIAL
        if vocab_size < len(ranks):
            problems.append(f"{RANKS_FILE}: {len(ranks)} ranks, but vocab_size is {vocab_size}")
        if vocab_size - len(ranks) > NUM_SPECIAL:
            problems.append(
                f"{RANKS_FILE}: {len(ranks)} ranks leave {vocab_size - len(ranks)} of vocab_size"
                f" {vocab_size} without a token; at most {NUM_SPECIAL} ids are special"
            )
        special = _special_tokens(names, len(ranks), vocab_size, problems)
        if problems:
            raise CheckpointError(str(directory), _shortened(problems))

        def named(key: str) -> int | None:
            value = names.get(key)
            value = value.get("content") if isinstance(value, dict) else value
            return special.get(value) if isinstance(value, str) else None

        own = {key: named(f"{key}_token") for key in ("bos", "eos", "pad")}
        chosen = {key: ids.get(f"{key}_token_id", own[key]) for key in own}
        return cls(
            ranks,
            special,
            bos_id=chosen["bos"],
            eos_id=chosen["eos"],
            pad_id=chosen["pad"],
            stop_ids=[own["eos"]] if own["eos"] is not None else [],
            add_bos=names.get("add_bos_token") is True,
        )

    def encode(self, text: str, allow_special: bool = False) -> list[int]:
        """Text -> ids. Marker-looking text is ordinary text unless ``allow_special``.

        Raises:
          InputError: a lone surrogate, which no UTF-8 text holds.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError(
                f"text is not valid Unicode: lone surrogate U+{ord(text[error.start]):04X}"
                f" at character {error.start}"
            ) from None
        if not allow_special or self._special is None:
            return self._ordinary(text)
        ids, done = [], 0
        for marker in self._special.finditer(text):
            ids += self._ordinary(text[done : marker.start()])
            ids.append(self.special_tokens[marker.group()])
            done = marker.end()
        return ids + self._ordinary(text[done:])

    def encode_segments(self, segments: Iterable[tuple[str, bool]]) -> list[int]:
        """(text, allow_special) pairs -> ids; no token spans the border of two segments."""
        return [number for segment in segments for number in self.encode(*segment)]

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Ids -> bytes, special ids by name. Raises InputError for an id outside the vocabulary."""
        return b"".join(map(self.token_bytes, ids))

    def decode(self, ids: Iterable[int]) -> str:
        """Ids -> text; bytes that are not UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode(errors="replace")

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one id. Raises InputError for an id outside the vocabulary."""
        number = operator.index(token)
        if not 0 <= number < self.vocab_size:
            raise InputError(f"token id {number} is outside 0..{self.vocab_size - 1}")
        return self._token_bytes[number]

    def _ordinary(self, text: str) -> list[int]:
        return [number for piece in pieces(text) for number in self._bpe.encode_ordinary(piece)]


class StreamDecoder:
    """Ids -> text as they arrive, holding back the bytes of an unfinished character.

    The joined output of every ``feed`` and one last ``flush`` equals ``tokenizer.decode`` of all
    ids, U+FFFD included.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, *ids: int) -> str:
        """The text that these ids complete, maybe empty."""
        return self._utf8.decode(self._tokenizer.decode_bytes(ids))

    def flush(self) -> str:
        """The end: U+FFFD for a character cut short, else nothing. The decoder starts afresh."""
        rest = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return rest


def pieces(text: str) -> Iterator[str]:
    """Cuts text: at most MAX_PIECE characters, in them no run of (non-)whitespace above MAX_RUN."""
    for start in range(0, len(text), MAX_PIECE):
        piece = text[start : start + MAX_PIECE]
        done = 0
        if len(piece) > MAX_RUN:
            for run in _RUN.finditer(piece):
                for cut in range(run.start() + MAX_RUN, run.end(), MAX_RUN):
                    yield piece[done:cut]
                    done = cut
        yield piece[done:]


def read_tiktoken(path: str | os.PathLike) -> dict[bytes, int]:
    """Lines of base64 token, space, rank -> ranks 0..n-1.

    Raises:
      CheckpointError: a malformed line, a duplicate rank or token, a gap; each with its line.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(str(path.parent), [f"{path.name}: not found"])
    ranks: dict[bytes, int] = {}
    line_of: dict[int, int] = {}
    token_line: dict[bytes, int] = {}
    problems = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        line = line.strip()
        if not line:
            continue
        try:
            encoded, digits = line.split()
            token = base64.b64decode(encoded, validate=True)
            if not digits.isdigit():
                raise ValueError
            rank = int(digits)
        except (ValueError, binascii.Error):
            shown = line[:40].decode("ascii", "backslashreplace")
            problems.append(f"line {number}: not 'base64 rank': {shown!r}")
            continue
        if token in ranks:
            problems.append(
                f"line {number}: token {token!r} again, first on line {token_line[token]}"
            )
        elif rank in line_of:
            problems.append(f"line {number}: rank {rank} again, first on line {line_of[rank]}")
        else:
            ranks[token], line_of[rank], token_line[token] = rank, number, number
    if not ranks and not problems:
        problems.append("no token")
    if not problems and max(line_of) != len(ranks) - 1:
        present = sorted(line_of)
        first = next(want for want, rank in enumerate(present) if want != rank)
        problems.append(
            f"line {line_of[present[first]]}: rank {present[first]}, {first} is missing"
        )
    if problems:
        raise CheckpointError(str(path), _shortened(problems))
    return ranks


def write_tiktoken(path: str | os.PathLike, ranks: Mapping[bytes, int]) -> None:
    """Writes ``ranks`` in rank order, whole or not at all."""
    in_order = sorted(ranks.items(), key=operator.itemgetter(1))
    lines = [base64.b64encode(token) + b" %d\n" % rank for token, rank in in_order]
    _write(Path(path), b"".join(lines))


def write_tokenizer(
    directory: str | os.PathLike,
    ranks: Mapping[bytes, int],
    special: Mapping[int, str],
    *,
    add_bos: bool = True,
) -> None:
    """Writes the two files that ``Tokenizer.load`` reads.

    Args:
      special: id -> name; ``[BOS]``, ``[EOS]`` and ``[PAD]`` among them get their roles.
      add_bos: whether a plain text prompt starts with ``[BOS]``.
    """
    directory = Path(directory)
    config: dict = {
        "added_tokens_decoder": {
            str(number): {"content": name, "special": True} for number, name in special.items()
        },
        "add_bos_token": add_bos,
    }
    for role in ("bos", "eos", "pad"):
        if (name := f"[{role.upper()}]") in special.values():
            config[f"{role}_token"] = name
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    write_tiktoken(directory / RANKS_FILE, ranks)
    _write(directory / "tokenizer_config.json", text.encode())


def _write(path: Path, data: bytes) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(data)
    os.chmod(file.name, 0o644)  # a temporary file is private
    os.replace(file.name, path)


def _shortened(problems: list[str]) -> list[str]:
    if len(problems) <= MAX_PROBLEMS:
        return problems
    return [*problems[:MAX_PROBLEMS], f"and {len(problems) - MAX_PROBLEMS} more"]


def _read_json(path: Path) -> dict:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError
        raise CheckpointError(str(path), [f"not JSON: {error}"]) from None
    if not isinstance(value, dict):
        raise CheckpointError(str(path), [f"a JSON object is needed, not {type(value).__name__}"])
    return value


def _config_ids(directory: Path) -> dict[str, int]:
    """vocab_size, bos_, eos_ and pad_token_id of config.json, those that are there."""
    top = _read_json(directory / "config.json")
    text = top.get("text_config")
    merged = (text if isinstance(text, dict) else {}) | top
    keys = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")
    found = {key: merged[key] for key in keys if merged.get(key) is not None}
    for key, value in found.items():
        if type(value) is not int:
            raise CheckpointError(
                str(directory / "config.json"), [f"{key} {value!r} is not an int"]
            )
    return found


def _object_ids(config: Config) -> dict[str, int]:
    keys = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")
    return {key: getattr(config, key) for key in keys}


def _special_tokens(
    names: dict, num_ranks: int, vocab_size: int, problems: list[str]
) -> dict[str, int]:
    """Every id of num_ranks..vocab_size-1, named by ``added_tokens_decoder`` or reserved."""
    where = "tokenizer_config.json: added_tokens_decoder"
    added = names.get("added_tokens_decoder", {})
    if not isinstance(added, dict):
        problems.append(f"{where} {added!r} is not an object")
        added = {}
    by_id = {number: f"<|reserved_token_{number}|>" for number in range(num_ranks, vocab_size)}
    for key, value in added.items():
        content = value.get("content") if isinstance(value, dict) else None
        if not (key.isascii() and key.isdigit() and isinstance(content, str) and content):
            problems.append(f"{where} entry {key!r}: {value!r}: an id and a content are needed")
        elif int(key) not in by_id:
            problems.append(
                f"{where} id {key} ({content}) is outside {num_ranks}..{vocab_size - 1}"
            )
        else:
            by_id[int(key)] = content
    special: dict[str, int] = {}
    for number, name in by_id.items():
        if name in special:
            problems.append(f"{where} name {name!r} for both {special[name]} and {number}")
        special[name] = number
    return special
