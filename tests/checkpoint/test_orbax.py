"""Conversion to Orbax and back: the same bits, any sharding, interruptions, damage."""

import json
import os
import resource
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from checkpoint_files import GOLDEN, abstract, assert_equal, copy, edit_config
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import k3jax
from k3jax import cli
from k3jax.checkpoint import convert as converting
from k3jax.checkpoint import load, names, orbax, tree
from k3jax.checkpoint.convert import convert
from k3jax.config import Config
from k3jax.errors import CheckpointError, ConfigError

SOURCE = GOLDEN / "k31_tiny"
ROOT = Path(__file__).parents[2]
FEW = 200_000  # bytes of a group, so that a layer takes several


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A conversion that no test changes."""
    return convert(SOURCE, tmp_path_factory.mktemp("made") / "out", group_bytes=FEW)


@pytest.fixture
def out(made, tmp_path):
    shutil.copytree(made, tmp_path / "out")
    return tmp_path / "out"


def original(source=SOURCE, dtype=np.float32, layers=None):
    config = Config.from_hf(source)
    kept = config if layers is None else config.truncated(layers)
    return load(source, abstract(kept, dtype), config, layers=layers)


def restore(directory, dtype=np.float32, layers=None, **options):
    config = Config.from_hf(directory)
    kept = config if layers is None else config.truncated(layers)
    return orbax.load(directory, abstract(kept, dtype), layers=layers, **options)


def refused(call, *words):
    with pytest.raises(CheckpointError) as error:
        call()
    for word in words:
        assert str(word) in str(error.value), error.value
    return error.value


def contents(directory):
    return {p.name: p.read_bytes() for p in directory.rglob("*") if p.is_file()}


# ---------------------------------------------------------------------- round trip


@pytest.mark.parametrize("name", ["k3_tiny", "k31_tiny"])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_round_trip_bit_for_bit(name, dtype, tmp_path):
    convert(GOLDEN / name, tmp_path / "out")
    assert_equal(restore(tmp_path / "out", dtype), original(GOLDEN / name, dtype))
    config = (tmp_path / "out" / "config.json").read_bytes()
    assert config == (GOLDEN / name / "config.json").read_bytes()
    assert os.listdir(tmp_path) == ["out"]


def test_groups_are_bounded_and_cover_every_part_once(made):
    groups = orbax.read_manifest(made).groups
    held = [name for entry in groups.values() for name in entry["parameters"]]
    config = Config.from_hf(SOURCE)
    assert sorted(held) == sorted(orbax.parts(config, "mxfp4"))
    assert len(groups) > config.num_layers + 1
    for entry in groups.values():
        sizes = [np.prod(s) * jnp.dtype(d).itemsize for d, s in entry["parameters"].values()]
        assert len(sizes) == 1 or sum(sizes) <= FEW


def test_stored_dtype_can_be_chosen(tmp_path):
    convert(SOURCE, tmp_path / "out", dtype=ml_dtypes.bfloat16)
    held = orbax.read_manifest(tmp_path / "out").groups["outside.0"]["parameters"]
    assert held["embed"][0] == "bfloat16"
    assert_equal(restore(tmp_path / "out", ml_dtypes.bfloat16), original(dtype=ml_dtypes.bfloat16))
    wide = restore(tmp_path / "out", np.float32)["embed"]
    assert wide.dtype == np.float32
    assert np.array_equal(wide, wide.astype(ml_dtypes.bfloat16).astype(np.float32))


def test_first_layers(made, tmp_path):
    """Of a whole conversion, and a conversion of the first layers, whose config says so."""
    assert_equal(restore(made, layers=3), original(layers=3))
    convert(SOURCE, tmp_path / "out", layers=3)
    assert Config.from_hf(tmp_path / "out").num_layers == 3
    assert_equal(restore(tmp_path / "out"), original(layers=3))
    with pytest.raises(ConfigError, match="layers = 4"):
        restore(tmp_path / "out", layers=4)


def test_logits_and_tokenizer_of_the_folder_alone(tmp_path):
    ids_BT = np.arange(24).reshape(2, 12)
    want = k3jax.load("nano", layers=2)[0](ids_BT)
    out = convert("nano", tmp_path / "out", layers=2)
    model, words = k3jax.load(out)
    assert np.array_equal(model(ids_BT), want)
    assert words.decode(words.encode("import os")) == "import os"
    assert {"tiktoken.model", "tokenizer_config.json", "training.json"} <= {*os.listdir(out)}


# ---------------------------------------------------------------------- other shardings


def is_expert(path) -> bool:
    return str(path[-1]).split("_")[0] in ("w13", "w2")


def rules(mesh, axis):
    def sharding(path, shape, axes):
        spec = [None] * len(shape)
        if is_expert(path):
            spec[len(shape) - 3] = axis
        elif shape[-1] % mesh.shape["a"] == 0 and len(shape) > 1:
            spec[-1] = "a"
        return NamedSharding(mesh, PartitionSpec(*spec))

    return sharding


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_saved_under_one_sharding_restored_under_another(kind, tmp_path):
    four = jax.make_mesh((4,), ("a",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    convert(SOURCE, tmp_path / "out", shardings=rules(four, "a"))
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(kind, kind))
    restored = restore(tmp_path / "out", shardings=rules(mesh, ("a", "b")))
    assert_equal(restored, original())
    for path, leaf in tree.flatten(restored).items():
        wanted = rules(mesh, ("a", "b"))(path, leaf.shape, None)
        assert leaf.sharding.is_equivalent_to(wanted, leaf.ndim), path
        sizes = {shard.data.nbytes for shard in leaf.addressable_shards}
        assert len(leaf.addressable_shards) == 8
        split = 8 if is_expert(path) else 2 if "a" in wanted.spec else 1
        assert sizes == {leaf.nbytes // split}, path


def test_shardings_that_cannot_be(made):
    mesh = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Auto,))

    def uneven(path, shape, axes):
        return NamedSharding(mesh, PartitionSpec("a" if path[-1] == "A_log" else None))

    with pytest.raises(ValueError, match="divi"):
        restore(made, shardings=uneven)
    one = NamedSharding(mesh, PartitionSpec("a"))
    refused(lambda: orbax.slice_sharding(("period", 0, "A_log"), one), "period.0.A_log", "periods")


def free_port():
    with socket.socket() as one:
        one.bind(("localhost", 0))
        return one.getsockname()[1]


def run_processes(count, devices, *arguments):
    port = free_port()
    paths = os.pathsep.join(str(ROOT / part) for part in ("", "tests", "tests/checkpoint"))
    environment = os.environ | {"PYTHONPATH": paths}
    running = [
        subprocess.Popen(
            [sys.executable, ROOT / "tests/checkpoint/orbax_process.py"]
            + [str(a) for a in (i, count, devices, port, *arguments)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment,
        )
        for i in range(count)
    ]  # fmt: skip
    outputs = [one.communicate(timeout=240)[0] for one in running]
    assert [one.returncode for one in running] == [0] * count, "\n".join(outputs)
    return [int(text.split("held ")[1].split()[0]) for text in outputs]


def test_other_numbers_of_processes(made, tmp_path):
    """Saved by one, restored by two; saved by two (into the same bits), restored by one."""
    want = {names.join(path): np.asarray(v) for path, v in tree.flatten(original()).items()}
    np.savez(tmp_path / "want.npz", **want)
    held = run_processes(2, 4, SOURCE, "-", made, tmp_path / "want.npz")
    split = sum(v.nbytes if is_expert((n,)) else 0 for n, v in want.items())
    assert held[0] == held[1] >= split // 2
    held = run_processes(2, 4, SOURCE, tmp_path / "two", tmp_path / "two", tmp_path / "want.npz")
    assert held[0] == held[1]
    assert sorted(os.listdir(tmp_path)) == ["two", "want.npz"]
    assert_equal(restore(tmp_path / "two"), original())


# ---------------------------------------------------------------------- interruptions


def stopped_after(count, monkeypatch, error):
    written, write = [], converting._write

    def stop(writer, partial, group, *rest):
        if len(written) == count:
            raise error
        write(writer, partial, group, *rest)
        written.append(group)

    monkeypatch.setattr(converting, "_write", stop)
    return written


def test_goes_on_after_a_kill(tmp_path, monkeypatch):
    """A killed process leaves finished groups, one that the manifest lacks, and a half-written."""
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    script = (
        "import os, signal\nfrom k3jax.checkpoint import convert as c\n"
        "seen, record = [], c._record\n"
        "def stop(*a):\n    seen.append(a)\n"
        "    len(seen) == 4 and os.kill(os.getpid(), signal.SIGKILL)\n    record(*a)\n"
        f"c._record = stop\nc.convert({str(SOURCE)!r}, {str(out)!r}, group_bytes={FEW})\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=False)
    assert done.returncode == -9
    assert not out.exists()
    assert len(orbax.read_manifest(partial).groups) == 3
    (partial / "orbax" / "layer-00009.0.orbax-checkpoint-tmp-5").mkdir()
    refused(lambda: restore_partial(partial), "did not finish")
    written = stopped_after(10**6, monkeypatch, None)
    convert(SOURCE, out, group_bytes=FEW)
    groups = orbax.read_manifest(out).groups
    assert len(written) == len(groups) - 3
    assert_equal(restore(out), original())
    assert os.listdir(tmp_path) == ["out"]
    assert {p.name for p in (out / "orbax").iterdir()} == set(groups)


def restore_partial(partial):
    return orbax.load(partial, abstract(Config.from_hf(SOURCE)))


def test_a_finished_group_that_was_damaged_is_written_again(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        written = stopped_after(3, patch, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            convert(SOURCE, tmp_path / "out", group_bytes=FEW)
    assert os.listdir(tmp_path) == ["out.partial"]
    (tmp_path / "out.partial" / "orbax" / written[0] / "manifest.ocdbt").unlink()
    again = stopped_after(10**6, monkeypatch, None)
    convert(SOURCE, tmp_path / "out", group_bytes=FEW)
    assert again[0] == written[0]
    assert written[1] not in again
    assert_equal(restore(tmp_path / "out"), original())


def test_another_source_or_other_arguments_are_refused(tmp_path, monkeypatch):
    source = copy("k31_tiny", tmp_path / "source")
    with monkeypatch.context() as patch:
        stopped_after(2, patch, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            convert(source, tmp_path / "out")
    before = contents(tmp_path / "out.partial")
    shard = source / "model-00002-of-000003.safetensors"
    os.utime(shard, ns=(1, 1))
    refused(
        lambda: convert(source, tmp_path / "out", layers=3, dtype=np.float32),
        "layers was None, now it is 3", "dtype was None, now it is 'float32'", shard.name,
    )  # fmt: skip
    assert contents(tmp_path / "out.partial") == before


def test_an_existing_folder(out, tmp_path):
    before = contents(out)
    refused(lambda: convert(SOURCE, out), out, "--overwrite")
    assert contents(out) == before
    convert(SOURCE, out, layers=2, overwrite=True)
    assert Config.from_hf(out).num_layers == 2
    assert os.listdir(tmp_path) == ["out"]
    refused(lambda: convert(out, tmp_path / "again"), "in Orbax format already")
    (tmp_path / "mine").mkdir()
    refused(lambda: convert(SOURCE, tmp_path / "mine", overwrite=True), "not an Orbax checkpoint")
    (tmp_path / "new.partial").mkdir()
    refused(lambda: convert(SOURCE, tmp_path / "new"), "new.partial", "remove it")
    refused(lambda: convert(SOURCE, SOURCE / "inside"), "lies in the source")


def test_a_disk_that_is_full(tmp_path, monkeypatch, capfd):
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
        refused(lambda: convert(SOURCE, tmp_path / "out"), "0.000 GB are free")
    # A file that may not grow is as good as a disk that is full, and needs no disk.
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limit[1]))
    try:
        assert cli.main(["convert", str(SOURCE), str(tmp_path / "out")]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    said = capfd.readouterr().err
    assert said.count("\n") == 2, said
    assert "out: 1 problem\n  group layer-00000.0 cannot be written: File too large" in said
    assert os.listdir(tmp_path) == ["out.partial"]
    convert(SOURCE, tmp_path / "out")
    assert_equal(restore(tmp_path / "out"), original())


def test_the_command(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert cli.main(["convert", str(SOURCE), str(tmp_path / "file" / "out")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("k3jax: error: ")
    assert "cannot be written" in error
    out = str(tmp_path / "out")
    assert cli.main(["convert", str(SOURCE), out, "--layers", "2", "--dtype", "bfloat16"]) == 0
    assert capsys.readouterr().out.strip() == out
    assert_equal(restore(out, ml_dtypes.bfloat16), original(layers=2, dtype=ml_dtypes.bfloat16))


def test_faults_of_the_source_are_reported_as_a_load_reports_them(tmp_path):
    source = copy("k31_tiny", tmp_path / "source")
    (source / "model-00002-of-000003.safetensors").unlink()
    refused(lambda: convert(source, tmp_path / "out"), "model-00002", "missing")
    assert os.listdir(tmp_path) == ["source"]


# ---------------------------------------------------------------------- damage


def test_damaged_and_missing_files_are_named_at_once(out):
    group = out / "orbax" / "layer-00001.0"
    metadata = group / "_METADATA"
    raw = metadata.read_bytes()
    metadata.write_bytes(raw[:-5] + b"xxxxx")
    (group / "manifest.ocdbt").unlink()
    data = max(group.rglob("d/*"), key=lambda p: p.stat().st_size)
    os.truncate(data, 100)
    error = refused(
        lambda: restore(out),
        "layer-00001.0/_METADATA: is corrupt", "layer-00001.0/manifest.ocdbt: is missing",
        f"{data.name}: has 100 bytes",
    )  # fmt: skip
    assert len(error.problems) == 3
    shutil.rmtree(group)
    refused(lambda: restore(out), "layer-00001.0/_METADATA: is missing")
    assert restore(out, layers=1)  # does not need it


def test_what_orbax_itself_refuses_names_the_group(out, monkeypatch):
    (out / "orbax" / "outside.0" / "manifest.ocdbt").write_bytes(b"nonsense")
    monkeypatch.setattr(orbax, "compare_files", lambda *a: [])
    refused(lambda: restore(out), "orbax/outside.0: cannot be restored")


@pytest.mark.parametrize("text", ["", "[]", '{"format": "k3jax-orbax", "version": 9}', "{}"])
def test_a_manifest_that_is_none(out, text):
    (out / orbax.MANIFEST).write_text(text)
    refused(lambda: restore(out), f"{orbax.MANIFEST}: cannot be read")


def test_another_model_is_named(out):
    leaves = abstract(Config.from_hf(out), form="dense")
    refused(lambda: orbax.load(out, leaves), "experts='mxfp4'")
    leaves = abstract(Config.from_hf(out))
    leaves["embed"] = jax.ShapeDtypeStruct((5, 5), np.uint8)
    refused(lambda: orbax.load(out, leaves), "embed: shape is [5, 5]", "embed: dtype is uint8")
    leaves = abstract(Config.from_hf(out))
    refused(lambda: orbax.load(out, leaves, dtype=ml_dtypes.bfloat16), "must be bfloat16")
    path = out / orbax.MANIFEST
    values = json.loads(path.read_text())
    codes = "layers.1.ffn.w13_codes"
    for entry in values["groups"].values():
        if codes in entry["parameters"]:
            entry["parameters"][codes][0] = "float32"
    path.write_text(json.dumps(values))
    edit_config(out, lambda c: c["text_config"].update(vocab_size=352))
    refused(lambda: restore(out), f"{codes}: dtype is float32, must be uint8", "embed: shape is")
