"""The header reader: hostile files are refused, and what it accepts the reference accepts too."""

import json
import random
import struct
import tracemalloc

import numpy as np
import pytest
import safetensors
from checkpoint_files import pack
from hypothesis import given, settings
from hypothesis import strategies as st

from k3jax.checkpoint.safetensors import FormatError, Reader, read_header, runs

GOOD = {
    "a": ("BF16", [2, 3], bytes(range(12))),
    "b": ("F32", [2], bytes(8)),
    "empty": ("U8", [0, 4], b""),
    "scalar": ("F32", [], bytes(4)),
}


def file_of(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype="U8", shape=(4,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


FOUR = bytes(4)
LIES = {
    "nothing": b"",
    "seven bytes": bytes(7),
    "length beyond the file": file_of({"a": entry()}, FOUR, length=1 << 40),
    "length above the limit": file_of({"a": entry()}, FOUR, length=1 << 62),
    "length too short": file_of({"a": entry()}, FOUR, length=5),
    "not JSON": file_of(b"hello"),
    "a list": file_of(b"[]"),
    "leading space": file_of(b' {"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}', FOUR),
    "not UTF-8": file_of(b'{"\xff":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}', FOUR),
    "lone surrogate": file_of(b'{"\\ud800":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}', FOUR),
    "duplicate tensor": file_of(
        b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},'
        b'"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}',
        FOUR,
    ),
    "duplicate field": file_of(
        b'{"a":{"dtype":"U8","dtype":"U8","shape":[4],"data_offsets":[0,4]}}'
    ),
    "unknown dtype": file_of({"a": entry("U9")}, FOUR),
    "dtype not text": file_of({"a": entry(3)}, FOUR),
    "missing field": file_of({"a": {"dtype": "U8", "shape": [4]}}, FOUR),
    "extra field": file_of({"a": entry() | {"x": 1}}, FOUR),
    "shape too small": file_of({"a": entry(shape=(3,))}, FOUR),
    "shape too large": file_of({"a": entry(shape=(5,))}, FOUR),
    "shape overflows": file_of({"a": entry(shape=(1 << 40, 1 << 40))}, FOUR),
    "negative shape": file_of({"a": entry(shape=(-2, -2))}, FOUR),
    "fractional shape": file_of({"a": entry(shape=(4.0,))}, FOUR),
    "boolean shape": file_of({"a": entry(shape=(True,), offsets=(0, 1))}, b"1"),
    "offsets reversed": file_of({"a": entry(offsets=(4, 0))}, FOUR),
    "offsets beyond": file_of({"a": entry(offsets=(4, 8))}, FOUR),
    "offsets of one": file_of({"a": entry(offsets=(4,))}, FOUR),
    "gap": file_of({"a": entry(), "b": entry(offsets=(5, 9))}, bytes(9)),
    "gap at the start": file_of({"a": entry(offsets=(1, 5))}, bytes(5)),
    "overlap": file_of({"a": entry(), "b": entry(offsets=(3, 7))}, bytes(7)),
    "same bytes": file_of({"a": entry(), "b": entry()}, FOUR),
    "tail": file_of({"a": entry()}, bytes(5)),
    "metadata not text": file_of({"__metadata__": {"x": 1}, "a": entry()}, FOUR),
    "deep nesting": file_of(b"[" * 100_000),
    "long number": file_of(b'{"a":' + b"9" * 5000 + b"}"),
    "not a number": file_of(b'{"a":NaN}'),
}


@pytest.mark.parametrize("lie", LIES)
def test_lies_are_refused(lie, tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(LIES[lie])
    with pytest.raises(FormatError):
        read_header(path)


def test_a_length_is_not_believed_before_the_file_is_measured(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(file_of({"a": entry()}, FOUR, length=90_000_000))
    tracemalloc.start()
    with pytest.raises(FormatError, match="cut"):
        read_header(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000


def test_a_good_file(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(pack(GOOD))
    header = read_header(path)
    assert {name: (e.dtype, list(e.shape)) for name, e in header.items()} == {
        name: (dtype, shape) for name, (dtype, shape, _) in GOOD.items()
    }
    reader = Reader(path)
    for name, (_, _, raw) in GOOD.items():
        buffer = bytearray(len(raw))
        reader.read_into(memoryview(buffer), header[name].start)
        assert bytes(buffer) == raw
    with pytest.raises(FormatError, match="the file ends"):
        reader.read_into(memoryview(bytearray(8)), header["scalar"].stop - 4)
    reader.close()


def test_every_cut_is_refused(tmp_path):
    path, whole = tmp_path / "x.safetensors", pack(GOOD)
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(FormatError):
            read_header(path)


def test_mutated_headers_are_refused_or_read_like_the_reference(tmp_path):
    """3,000 seeded mutations of bytes, digits, tokens and the length."""
    random_ = random.Random(7)
    whole = pack(GOOD)
    tokens = [b'"', b"{", b"}", b"[", b"]", b",", b":", b"0", b"-", b"1e3", b"4.0", b"null", b" ",
              b'"U8"', b'"F32"', b'"a"', b"\x00", b"\xff", b"99999999999999999999"]  # fmt: skip
    path, accepted = tmp_path / "x.safetensors", 0
    for _ in range(3000):
        raw = bytearray(whole)
        for _ in range(random_.randint(1, 3)):
            place = random_.randrange(0 if random_.random() < 0.1 else 8, len(raw) - 24)
            kind = random_.randrange(4)
            if kind == 0:
                raw[place] = random_.randrange(256)
            elif kind == 1:
                del raw[place]
            else:
                token = random_.choice(tokens)
                raw[place : place + (len(token) if kind == 2 else 0)] = token
        if random_.random() < 0.6:  # a length that fits, so that the change reaches the parser
            raw[:8] = struct.pack("<Q", len(raw) - sum(len(t[2]) for t in GOOD.values()) - 8)
        path.write_bytes(raw)
        try:
            header = read_header(path)
        except FormatError:
            continue
        accepted += 1
        base = 8 + struct.unpack("<Q", raw[:8])[0]
        reference = dict(safetensors.deserialize(bytes(raw)))
        assert header.keys() == reference.keys()
        for name, found in header.items():
            assert list(found.shape) == reference[name]["shape"]
            assert bytes(raw[found.start : found.stop]) == bytes(reference[name]["data"])
            assert found.start >= base
    assert accepted > 30, "the mutations are too harsh to compare anything"


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3), st.integers(1, 4)), max_size=4))
def test_runs_cover_a_region_in_order(sides):
    shape = tuple(size for size, _, _ in sides)
    region = tuple((min(a, s - 1), min(min(a, s - 1) + n, s)) for s, a, n in sides)
    flat = np.arange(int(np.prod(shape, dtype=int))).reshape(shape)
    wanted = flat[tuple(slice(a, b) for a, b in region)].reshape(-1)
    pieces = [np.arange(start, start + count) for start, count in runs(shape, region)]
    assert np.concatenate(pieces).tolist() == wanted.tolist()
