"""The safetensors file format: a strict header reader, exact reads, a streaming writer.

No memory map is used: every byte read lands in a buffer the caller owns, so resident memory is what
the caller allocated. The reader refuses what the reference library refuses, and duplicate keys too.
Format: 8 bytes little-endian header length, a JSON object, then the tensors without gaps.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

MAX_HEADER = 100_000_000  # bytes; the limit of the reference library
BITS = {
    **dict.fromkeys(("F4", "F4_E2M1"), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
# The dtypes a K3 checkpoint may hold. E8M0 scales stay bytes.
NUMPY = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "U8": np.dtype(np.uint8),
    "F8_E8M0": np.dtype(np.uint8),
}
CODE = {NUMPY[code]: code for code in ("F32", "F16", "BF16", "U8")}


class FormatError(ValueError):
    """A file that is not valid safetensors; the message says what is wrong, not where."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file: ``start`` and ``stop`` are offsets from the beginning of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise FormatError(f"the key {twice!r} appears twice in the header")
    return result


def _natural(text: str) -> int:
    if text.startswith("-") or len(text) > 20:
        raise FormatError(f"the header holds the number {text[:40]}")
    return int(text)


def _no_fraction(text: str) -> float:
    raise FormatError(f"the header holds the number {text[:40]}")


def _parse(raw: bytes) -> dict[str, Any]:
    try:
        text = raw.decode("utf-8")
        header = json.loads(
            text,
            object_pairs_hook=no_duplicates,
            parse_int=_natural,
            parse_float=_no_fraction,
            parse_constant=_no_fraction,
        )
    except FormatError:
        raise
    except (ValueError, RecursionError) as error:
        raise FormatError(f"the header is not JSON: {str(error)[:120]}") from None
    if not isinstance(header, dict) or not text.startswith("{"):
        raise FormatError("the header is not a JSON object")
    return header


def _entry(name: str, value: Any) -> Entry:
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise FormatError(f"{name!r}: the entry must hold exactly dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise FormatError(f"{name!r}: dtype {dtype!r} is unknown")
    for what, numbers in (("shape", shape), ("data_offsets", offsets)):
        if not isinstance(numbers, list) or any(type(n) is not int for n in numbers):
            raise FormatError(f"{name!r}: {what} {numbers!r} is not a list of integers")
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise FormatError(f"{name!r}: data_offsets {offsets} are not a range")
    bits = BITS[dtype]
    for size in shape:
        bits *= size
        if bits >= 1 << 64:
            raise FormatError(f"{name!r}: shape {shape} overflows")
    if bits % 8 or bits // 8 != offsets[1] - offsets[0]:
        raise FormatError(
            f"{name!r}: {dtype} {shape} takes {bits / 8:g} bytes, "
            f"data_offsets {offsets} hold {offsets[1] - offsets[0]}"
        )
    return Entry(dtype, tuple(shape), offsets[0], offsets[1])


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors of a file, checked against its size.

    Raises:
      FormatError: header too long, not JSON, duplicate keys, unknown dtype, a shape that disagrees
        with its bytes, gaps, overlaps, a file that is cut or has a tail.
      OSError: the file cannot be read.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        first = file.read(8)
        if len(first) < 8:
            raise FormatError(f"the file is cut: {size} bytes do not hold a header length")
        (length,) = struct.unpack("<Q", first)
        if length > MAX_HEADER:
            raise FormatError(f"header length {length} is above the limit of {MAX_HEADER}")
        if 8 + length > size:
            raise FormatError(f"the file is cut: header of {length} bytes, file of {size} bytes")
        raw = file.read(length)
    if len(raw) != length:
        raise FormatError(f"the file is cut: header of {length} bytes, {len(raw)} read")
    header = _parse(raw)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or any(not isinstance(v, str) for v in metadata.values()):
        raise FormatError("__metadata__ is not an object of strings")
    try:
        "".join([*header, *metadata, *metadata.values()]).encode("utf-8")
    except UnicodeEncodeError:
        raise FormatError("a key of the header is not valid Unicode") from None
    entries = {name: _entry(name, value) for name, value in header.items()}
    position, last = 0, "the header"
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start != position:
            what = "a gap" if entry.start > position else "an overlap"
            raise FormatError(
                f"{what} between {last!r}, which ends at {position}, and {name!r}, "
                f"which starts at {entry.start}"
            )
        position, last = entry.stop, name
    data = size - 8 - length
    if position != data:
        what = "the file is cut" if position > data else "the file has a tail"
        raise FormatError(f"{what}: the header describes {position} data bytes, {data} are there")
    base = 8 + length
    return {
        name: Entry(entry.dtype, entry.shape, base + entry.start, base + entry.stop)
        for name, entry in entries.items()
    }


class Reader:
    """Exact reads from one file, safe to use from several threads."""

    def __init__(self, path: Path):
        self.path = path
        self._file = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fills ``buffer`` from ``offset``.

        Raises:
          FormatError: the file ends before (it changed since its header was read).
        """
        while len(buffer):
            count = os.preadv(self._file, [buffer], offset)
            if count <= 0:
                raise FormatError(f"the file ends at byte {offset}, {len(buffer)} more are needed")
            buffer, offset = buffer[count:], offset + count

    def close(self) -> None:
        os.close(self._file)


def write(path: Path, tensors: Iterable[tuple[str, np.ndarray]], header: bytes) -> None:
    """Writes one file; ``header`` comes from :func:`make_header` for the same tensors in order."""
    with open(path, "wb") as file:
        file.write(header)
        for name, array in tensors:
            data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            if file.write(data) != data.nbytes:
                raise OSError(f"{path}: short write of {name}")
        file.flush()
        os.fsync(file.fileno())


def make_header(tensors: Iterable[tuple[str, np.dtype, tuple[int, ...]]]) -> bytes:
    """Header bytes, padded so that the data starts at a multiple of 8."""
    values: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, dtype, shape in tensors:
        stop = position + dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        offsets = [position, stop]
        values[name] = {"dtype": CODE[dtype], "shape": list(shape), "data_offsets": offsets}
        position = stop
    raw = json.dumps(values, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    return struct.pack("<Q", len(raw)) + raw


def runs(shape: tuple[int, ...], region: tuple[tuple[int, int], ...]) -> Iterator[tuple[int, int]]:
    """Contiguous element ranges (start, count) of ``region`` in a row-major array of ``shape``."""
    inner = len(shape)
    while inner and region[inner - 1] == (0, shape[inner - 1]):
        inner -= 1
    if not inner:
        yield 0, int(np.prod(shape, dtype=np.int64))
        return
    stride = int(np.prod(shape[inner:], dtype=np.int64))
    start, stop = region[inner - 1]
    outer = [range(a, b) for a, b in region[: inner - 1]]
    for position in np.ndindex(*[len(r) for r in outer]):
        flat = 0
        for size, r, i in zip(shape, outer, position, strict=False):
            flat = flat * size + r[i]
        yield (flat * shape[inner - 1] + start) * stride, (stop - start) * stride
