"""Reading a region of one parameter from the tensors it is made of, into a buffer."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from k3jax.checkpoint import names, safetensors
from k3jax.checkpoint.plan import SHOWN, Stored

Region = tuple[tuple[int, int], ...]  # (start, stop) of every dimension
STAGING = 4 << 20  # elements converted at once: 16 MiB of float32
ALIGNMENT = 64  # what XLA's CPU client needs to take a buffer over without a copy
# e2m1 codes; bit 3 is the sign, the low nibble is the even column
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
E2M1 = np.concatenate([E2M1, -E2M1])
# A median scale byte outside this range means a matrix whose RMS is surely outside [1e-4, 10]:
# the RMS of its codes lies between 0.5 and 6, so the scale between 2^-15 and 2^4.
PLAUSIBLE_SCALES = (112, 131)


@dataclass(frozen=True, slots=True)
class Piece:
    """One tensor and its place in a parameter; ``scale`` is set where it is to be unpacked."""

    name: str
    stored: Stored
    index: tuple[int | slice, ...]
    scale: Stored | None = None
    scale_name: str = ""


@dataclass
class Faults:
    """Faults in the data itself, found while reading, from several threads."""

    lines: list[str] = field(default_factory=list)
    count: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, line: str) -> None:
        with self._lock:
            self.count += 1
            if len(self.lines) < SHOWN:
                self.lines.append(line)

    def report(self) -> list[str]:
        rest = self.count - len(self.lines)
        return sorted(self.lines) + ([f"... and {rest} more"] if rest else [])


def allocate(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An uninitialised array on a 64-byte boundary, so that a CPU device needs no second copy."""
    nbytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes].view(dtype).reshape(shape)


def region_of(index: tuple[slice | int, ...], shape: tuple[int, ...]) -> Region:
    """The ranges of an index into an array of ``shape``, later dimensions in full."""
    result = []
    for i, size in enumerate(shape):
        part = index[i] if i < len(index) else slice(None)
        start, stop = (part, part + 1) if isinstance(part, int) else part.indices(size)[:2]
        result.append((start, stop))
    return tuple(result)


class Filler:
    """Fills buffers from open shards and checks scales on the way."""

    def __init__(self, readers: Callable[[str], safetensors.Reader], faults: Faults):
        self._readers, self._faults = readers, faults

    def fill(self, buffer: np.ndarray, region: Region, piece: Piece, shape: tuple[int, ...]) -> int:
        """Reads the part of ``piece`` that lies in ``region`` of a parameter of ``shape``.

        Returns:
          Bytes of ``buffer`` that were written.
        """
        place = region_of(piece.index, shape)
        cut = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(place, region, strict=True))
        if any(a >= b for a, b in cut):
            return 0
        whole = [i for i in range(len(shape)) if not (i < len(piece.index) and
                 isinstance(piece.index[i], int))]  # fmt: skip
        view = buffer[
            tuple(slice(a - r, b - r) for (a, b), (r, _) in zip(cut, region, strict=True))
        ]
        view = view.reshape([cut[i][1] - cut[i][0] for i in whole])
        local = tuple((cut[i][0] - place[i][0], cut[i][1] - place[i][0]) for i in whole)
        size = tuple(place[i][1] - place[i][0] for i in whole)
        if not np.may_share_memory(view, buffer):
            raise AssertionError(f"{piece.name}: its place in the parameter is not contiguous")
        if piece.scale is not None:
            self._unpack(view, local, size, piece)
        else:
            self._copy(view.reshape(-1), local, size, piece.stored)
        if piece.name.endswith(".weight_scale"):
            self._check_scales(view, piece.name, local)
        return view.nbytes

    def _read(self, stored: Stored, start: int, out: np.ndarray) -> None:
        offset = stored.entry.start + start * out.dtype.itemsize
        self._readers(stored.file).read_into(memoryview(out.view(np.uint8)), offset)

    def _copy(self, flat: np.ndarray, local: Region, size: tuple[int, ...], stored: Stored) -> None:
        dtype = safetensors.NUMPY[stored.entry.dtype]
        position = 0
        for start, count in safetensors.runs(size, local):
            if dtype == flat.dtype:
                self._read(stored, start, flat[position : position + count])
                position += count
                continue
            for first in range(0, count, STAGING):
                part = np.empty(min(STAGING, count - first), dtype)
                self._read(stored, start + first, part)
                flat[position : position + len(part)] = part.astype(flat.dtype)
                position += len(part)

    def _unpack(self, view: np.ndarray, local: Region, size: tuple[int, ...], piece: Piece) -> None:
        """Packed codes and scales to plain weights, a block of rows at a time."""
        assert piece.scale is not None
        (top, bottom), (left, right) = local
        columns = size[1]
        block = max(1, STAGING // columns)
        for row in range(top, bottom, block):
            rows = min(block, bottom - row)
            codes = np.empty((rows, columns // 2), np.uint8)
            scales = np.empty((rows, columns // names.GROUP), np.uint8)
            self._read(piece.stored, row * codes.shape[1], codes.reshape(-1))
            self._read(piece.scale, row * scales.shape[1], scales.reshape(-1))
            part = ((row, row + rows), (0, scales.shape[1]))
            self._check_scales(scales, piece.scale_name, part)
            values = np.stack([E2M1[codes & 15], E2M1[codes >> 4]], axis=-1)
            values = values.reshape(rows, -1, names.GROUP)
            with np.errstate(over="ignore"):  # bytes 253 and 254 reach beyond float32
                values = np.ldexp(values, scales[..., None].astype(np.int32) - 127)
            plain = values.reshape(rows, columns)[:, left:right]
            view[row - top : row - top + rows] = plain.astype(view.dtype)

    def _check_scales(self, scales: np.ndarray, name: str, local: Region) -> None:
        if scales.max() == 255:
            bad = np.argwhere(scales == 255)
            row, column = (int(bad[0][i]) + local[i][0] for i in range(2))
            more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
            self._faults.add(f"{name}: scale byte 255 (not a number) at [{row}, {column}]{more}")
            return
        low, high = PLAUSIBLE_SCALES
        for wrong, what in ((scales < low, "vanish"), (scales > high, "explode")):
            if np.count_nonzero(wrong) * 2 > scales.size:
                self._faults.add(
                    f"{name}: median scale byte is {int(np.median(scales))}, outside "
                    f"{low}..{high}: the weights {what} (RMS outside [1e-4, 10])"
                )
