"""What the tests of the loader share: an abstract tree, folders with a fault, comparisons."""

import json
import shutil
import struct
from pathlib import Path

import jax
import numpy as np

from k3jax.checkpoint import names, tree
from k3jax.config import Config

GOLDEN = Path(__file__).parent.parent / "golden"
INDEX = "model.safetensors.index.json"


def abstract(config, dtype=np.float32, form=None):
    """The tree Transformer.abstract gives, from the table."""
    kinds = {"model": dtype, "float32": np.float32, "uint8": np.uint8}
    table = names.parameters(config, form)
    return tree.unflatten(
        {path: jax.ShapeDtypeStruct(s.shape, kinds[s.kind]) for path, s in table.items()}
    )


def copy(name, target):
    """A golden checkpoint in ``target``, without its recorded outputs."""
    shutil.copytree(
        GOLDEN / name, target, ignore=shutil.ignore_patterns("golden*"), dirs_exist_ok=True
    )
    return target


def read_all(directory):
    """{file: {name: (dtype, shape, bytes)}}, read without the code under test."""
    result = {}
    for path in sorted(Path(directory).glob("*.safetensors")):
        raw = path.read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        header, data = json.loads(raw[8 : 8 + length]), raw[8 + length :]
        header.pop("__metadata__", None)
        result[path.name] = {
            name: (e["dtype"], e["shape"], data[slice(*e["data_offsets"])])
            for name, e in header.items()
        }
    return result


def pack(tensors):
    """Bytes of a file."""
    header, data = {}, b""
    for name, (dtype, shape, raw) in tensors.items():
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
        data += raw
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def write_all(directory, files, *, index=True):
    """Writes files and, by default, an index that agrees with them."""
    weight_map, total = {}, 0
    for file, tensors in files.items():
        (directory / file).write_bytes(pack(tensors))
        weight_map |= dict.fromkeys(tensors, file)
        total += sum(len(raw) for _, _, raw in tensors.values())
    if index:
        values = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / INDEX).write_text(json.dumps(values))


def edit_tensor(directory, name, change):
    """Replaces one tensor by ``change(dtype, shape, raw)``: {new name: (dtype, shape, raw)}."""
    files = read_all(directory)
    for tensors in files.values():
        if name in tensors:
            tensors |= change(*tensors.pop(name))
            write_all(directory, files)
            return
    raise KeyError(name)


def edit_config(directory, change):
    """Rewrites config.json and returns the config."""
    path = directory / "config.json"
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))
    return Config.from_hf(directory)


def assert_equal(left, right):
    """Bitwise equality of two trees."""
    left, right = tree.flatten(left), tree.flatten(right)
    assert left.keys() == right.keys()
    for path, value in left.items():
        a, b = np.asarray(value), np.asarray(right[path])
        assert a.dtype == b.dtype, path
        assert a.tobytes() == b.tobytes(), path
