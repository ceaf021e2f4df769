"""The command line, in process: outputs, exit statuses, one error line and no traceback."""

import io
import json
import os
import subprocess
import sys
import types

import jax.numpy as jnp
import numpy as np
import pytest
from markov_model import MarkovModel

import k3jax
import k3jax.config
from k3jax.cli import main
from k3jax.errors import CheckpointError, ConfigError
from k3jax.tokenizer import Tokenizer
from k3jax.train import balancing

V = 260
NAMES = {"[BOS]": 256, "[EOS]": 257, "[PAD]": 258, "<|sep|>": 259}
TOKENIZER = Tokenizer({bytes([byte]): byte for byte in range(256)}, NAMES, eos_id=257)


@pytest.fixture
def model(monkeypatch):
    """``k3jax.load`` gives a table model; ``loads`` counts what it was asked for."""
    table_VV = np.random.default_rng(0).normal(size=(V, V))
    table_VV[:, 128:] = -50  # ASCII only
    model = MarkovModel(table_VV, eos_token_id=257, dsa="an indexer")
    model.loads = []

    def load(where, dtype=jnp.bfloat16, tokenizer=True, vision=None):
        model.loads.append((where, jnp.dtype(dtype).name))
        return model, TOKENIZER if tokenizer else None

    monkeypatch.setattr(k3jax, "load", load, raising=False)
    from_hf = staticmethod(lambda path: model.config)
    monkeypatch.setattr(k3jax.config.Config, "from_hf", from_hf, raising=False)
    return model


@pytest.fixture
def ids(tmp_path):
    path = tmp_path / "ids.npy"
    np.save(path, np.random.default_rng(1).integers(0, V, (2, 9)))
    return path


def give_stdin(monkeypatch, data: bytes):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


def error_of(capsys) -> str:
    """The one line on stderr, without its prefix."""
    err = capsys.readouterr().err
    assert "Traceback" not in err
    prefix = "k3jax: error: "
    assert err.startswith(prefix)
    assert err.count(prefix) == 1
    assert err.endswith("\n")
    return err.removeprefix(prefix).rstrip("\n")


class TestGenerate:
    def test_text_and_timing(self, model, capsys):
        assert main(["generate", "--model", "DIR", "ab", "--max-new-tokens", "9"]) == 0
        out, err = capsys.readouterr()
        assert out == TOKENIZER.decode(model.greedy(b"ab", 9)) + "\n"
        assert err.count("\n") == 1
        assert err.count("tokens/s") == 2
        assert model.loads == [("DIR", "bfloat16")]

    def test_no_stream_and_dtype(self, model, capsys):
        args = ["generate", "ab", "--max-new-tokens", "9", "--no-stream", "--dtype", "float32"]
        assert main(args) == 0
        assert capsys.readouterr().out == TOKENIZER.decode(model.greedy(b"ab", 9)) + "\n"
        assert model.loads == [("nano", "float32")]

    def test_sampling_options_arrive(self, model, capsys):
        base = ["generate", "ab", "--temperature", "1.5", "--max-new-tokens", "20"]
        outs = []
        for extra in (["--seed", "1"], ["--seed", "1"], ["--seed", "2"], ["--top-k", "1"]):
            assert main(base + extra) == 0
            outs.append(capsys.readouterr().out)
        assert outs[0] == outs[1] != outs[2]
        assert outs[3] == TOKENIZER.decode(model.greedy(b"ab", 20)) + "\n"

    @pytest.mark.parametrize("argument", [[], ["-"]])
    def test_stdin(self, model, capsys, monkeypatch, argument):
        give_stdin(monkeypatch, "é\r\n".encode())
        assert main(["generate", *argument, "--max-new-tokens", "5"]) == 0
        want = TOKENIZER.decode(model.greedy("é\r\n".encode(), 5))
        assert capsys.readouterr().out == want + "\n"

    @pytest.mark.parametrize(
        ("args", "data", "message"),
        [
            ([], b"ab\xffc", "stdin is not UTF-8: byte 0xff at offset 2"),
            ([], b"", "the prompt is empty"),
            ([""], b"", "the prompt is empty"),
            (["x", "--temperature", "-1"], b"", "temperature -1.0 is not"),
            (["x", "--top-p", "0"], b"", "top_p 0.0"),
            (["x", "--top-k", "-3"], b"", "top_k -3"),
            (["x", "--max-new-tokens", "0"], b"", "max_new_tokens 0"),
            (["x", "--seed", "-1"], b"", "seed -1"),
        ],
    )
    def test_refused_before_the_model_is_loaded(
        self, model, capsys, monkeypatch, args, data, message
    ):
        give_stdin(monkeypatch, data)
        assert main(["generate", *args]) == 1
        error = error_of(capsys)
        assert message in error
        assert "\n" not in error
        assert model.loads == []

    def test_too_long(self, model, capsys):
        assert main(["generate", "x" * 500]) == 1
        assert "prompt of 500 tokens and max_new_tokens 64 exceed" in error_of(capsys)

    def test_no_tokenizer(self, model, capsys, monkeypatch):
        monkeypatch.setattr(k3jax, "load", lambda *_, **__: (model, None), raising=False)
        assert main(["generate", "x", "--model", "DIR"]) == 1
        assert "DIR has no tokenizer" in error_of(capsys)


class TestErrors:
    @pytest.mark.parametrize(
        ("raised", "status", "message"),
        [
            (ConfigError("index_topk_freq 2"), 1, "index_topk_freq 2"),
            (
                CheckpointError("DIR", ["a: cut", "b: gone"]),
                1,
                "DIR: 2 problems\n  a: cut\n  b: gone",
            ),
            (FileNotFoundError(2, "No such file or directory", "x/y"), 1, "x/y: No such file"),
            (PermissionError(13, "Permission denied", "x/y"), 1, "x/y: Permission denied"),
            (OSError("odd"), 1, "odd"),
            (KeyboardInterrupt(), 130, "interrupted"),
        ],
    )
    def test_one_message_no_traceback(self, capsys, monkeypatch, raised, status, message):
        def load(*_, **__):
            raise raised

        monkeypatch.setattr(k3jax, "load", load, raising=False)
        assert main(["generate", "x"]) == status
        assert error_of(capsys).startswith(message)

    def test_a_bug_keeps_its_traceback(self, monkeypatch):
        monkeypatch.setattr(k3jax, "load", lambda *_, **__: 1 / 0, raising=False)
        with pytest.raises(ZeroDivisionError):
            main(["generate", "x"])

    @pytest.mark.parametrize("args", [[], ["fly"], ["generate", "--tempature", "1"], ["inspect"]])
    def test_usage(self, args, capsys):
        with pytest.raises(SystemExit) as caught:
            main(args)
        assert caught.value.code == 2

    def test_a_closed_pipe_for_real(self):
        # `| head` closes stdout while text still comes
        code = (
            "import sys, types, k3jax.cli as cli\n"
            "def inspect(path):\n"
            "    while True: print('text', flush=True)\n"
            "module = types.SimpleNamespace(inspect=inspect, render=print)\n"
            "sys.modules['k3jax.checkpoint.inspect'] = module\n"
            "sys.exit(cli.main(['inspect', 'DIR']))\n"
        )
        buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        with subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=buffered,
        ) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            process.stdout.read(4)
            process.stdout.close()
            assert process.stderr.read() == "k3jax: error: stdout was closed before the end\n"
        assert process.returncode == 1


class TestHelp:
    def test_does_not_import_jax(self):
        code = (
            "import sys, k3jax.cli\n"
            "try: k3jax.cli.main(['--help'])\n"
            "except SystemExit as error: assert not error.code\n"
            "assert not {'jax', 'numpy', 'tiktoken'} & set(sys.modules), 'slow'\n"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        for name in ("generate", "inspect", "logits", "train"):
            assert name in done.stdout


class TestLogits:
    def run(self, ids, out, *args) -> int:
        return main(["logits", "DIR", "--tokens", str(ids), "--out", str(out), *args])

    def want(self, model, ids):
        return np.asarray(model.forward(np.load(ids))[0])

    def test_whole_pass(self, model, ids, tmp_path):
        assert self.run(ids, tmp_path / "out.npz") == 0
        with np.load(tmp_path / "out.npz") as got:
            assert got.files == ["logits"]
            assert got["logits"].dtype == np.float32
            assert np.array_equal(got["logits"], self.want(model, ids))
        assert model.loads == [("DIR", "float32")]
        assert sorted(file.name for file in tmp_path.iterdir()) == ["ids.npy", "out.npz"]

    def test_everything(self, model, ids, tmp_path):
        args = ["--hidden", "--routing", "--index", "--dtype", "bfloat16"]
        assert self.run(ids, tmp_path / "out.npz", *args) == 0
        with np.load(tmp_path / "out.npz") as got:
            kinds = {name: (got[name].dtype.name, got[name].shape[1:3]) for name in got.files}
        assert kinds == {
            "logits": ("float32", (9, V)),
            "hidden": ("float32", (2, 9)),
            "expert_ids": ("int32", (2, 9)),
            "expert_weights": ("float32", (2, 9)),
            "selected": ("int32", (2, 9)),
        }
        assert model.loads == [("DIR", "bfloat16")]

    @pytest.mark.parametrize("prefilled", [1, 4, 9])
    def test_incremental(self, model, ids, tmp_path, prefilled):
        assert self.run(ids, tmp_path / "out.npz", "--incremental", str(prefilled)) == 0
        with np.load(tmp_path / "out.npz") as got:
            assert np.array_equal(got["logits"], self.want(model, ids))
        assert model.calls == [("prefill", prefilled)] + [("decode", 1)] * (9 - prefilled)

    def test_loads(self, model, ids, tmp_path, monkeypatch, capsys):
        """The second of two experts has every token; nothing more is written than was asked for."""
        monkeypatch.setattr(balancing, "module_bias", lambda module: np.zeros((3, 2), np.float32))
        assert self.run(ids, tmp_path / "out.npz", "--loads", "single") == 0
        text = capsys.readouterr().out
        assert "2 experts, 1 devices" in text
        assert text.count("1: 2.00") == 3
        with np.load(tmp_path / "out.npz") as got:
            assert got.files == ["logits"]
        assert self.run(ids, tmp_path / "b.npz", "--loads", "nowhere") == 1
        assert "--loads: nowhere: 1 problem" in error_of(capsys)
        assert self.run(ids, tmp_path / "b.npz", "--loads", "v5e-256") == 1
        assert "--loads v5e-256: 2 slots of experts do not divide over" in error_of(capsys)

    def test_one_row(self, model, tmp_path):
        np.save(tmp_path / "row.npy", np.asarray([1, 2, 3], np.uint8))
        assert self.run(tmp_path / "row.npy", tmp_path / "out") == 0
        with np.load(tmp_path / "out") as got:
            assert got["logits"].shape == (1, 3, V)

    @pytest.mark.parametrize(
        ("array", "message"),
        [
            (np.zeros((1, 2)), "dtype float64, integers are needed"),
            (np.zeros((1, 2), bool), "dtype bool"),
            (np.zeros((1, 2, 3), int), "rank 3"),
            (np.int32(5), "rank 0"),
            (np.zeros((0, 2), int), "shape (0, 2) holds no token"),
            (np.asarray([[0, 260]]), "token id 260 at [0,1] is outside 0..259"),
            (np.asarray([[0, 1], [-1, 0]]), "token id -1 at [1,0]"),
            (np.asarray([[2**40]]), "token id 1099511627776"),
            (np.zeros((1, 513), int), "rows of 513 tokens exceed max_position_embeddings 512"),
            (np.asarray([{}], object), "not a .npy file of integers"),
        ],
    )
    def test_bad_tokens(self, model, tmp_path, capsys, array, message):
        np.save(tmp_path / "ids.npy", array, allow_pickle=True)
        assert self.run(tmp_path / "ids.npy", tmp_path / "out.npz") == 1
        error = error_of(capsys)
        assert message in error
        assert "ids.npy" in error
        assert model.loads == []
        assert not (tmp_path / "out.npz").exists()

    @pytest.mark.parametrize("data", [b"", b"hello", b"\x93NUMPY\x01\x00"])
    def test_not_an_array_file(self, model, tmp_path, capsys, data):
        (tmp_path / "ids.npy").write_bytes(data)
        assert self.run(tmp_path / "ids.npy", tmp_path / "out.npz") == 1
        assert "ids.npy is not a .npy file" in error_of(capsys)

    def test_archive(self, model, tmp_path, capsys):
        np.savez(tmp_path / "ids.npz", a=np.zeros(2, int))
        assert self.run(tmp_path / "ids.npz", tmp_path / "out.npz") == 1
        assert "is a .npz archive" in error_of(capsys)

    def test_missing_file(self, model, tmp_path, capsys):
        assert self.run(tmp_path / "none.npy", tmp_path / "out.npz") == 1
        assert "none.npy: No such file" in error_of(capsys)

    @pytest.mark.parametrize(
        ("args", "message"),
        [
            (["--incremental", "0"], "--incremental 0 is outside 1..9"),
            (["--incremental", "10"], "--incremental 10 is outside 1..9"),
            (["--incremental", "4", "--hidden"], "--hidden needs one whole pass"),
            (["--incremental", "4", "--index"], "--index needs one whole pass"),
            (["--incremental", "4", "--loads", "single"], "--loads needs one whole pass"),
        ],
    )
    def test_refused(self, model, ids, tmp_path, capsys, args, message):
        assert self.run(ids, tmp_path / "out.npz", *args) == 1
        assert message in error_of(capsys)
        assert model.loads == []

    def test_no_indexer(self, model, ids, tmp_path, capsys):
        model.config.dsa = None
        assert self.run(ids, tmp_path / "out.npz", "--index") == 1
        assert "--index: DIR has no sparse-attention indexer" in error_of(capsys)

    def test_no_directory_for_the_output(self, model, ids, tmp_path, capsys):
        assert self.run(ids, tmp_path / "none" / "out.npz") == 1
        assert "no directory" in error_of(capsys)
        assert model.loads == []

    def test_nothing_half_written(self, model, ids, tmp_path, capsys, monkeypatch):
        (tmp_path / "out.npz").write_bytes(b"old")

        def full(file, **_):
            file.write(b"half")
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(np, "savez", full)
        assert self.run(ids, tmp_path / "out.npz") == 1
        assert "No space left" in error_of(capsys)
        assert (tmp_path / "out.npz").read_bytes() == b"old"
        assert sorted(file.name for file in tmp_path.iterdir()) == ["ids.npy", "out.npz"]


class TestInspect:
    @pytest.mark.parametrize("refused", [False, True])
    def test_report(self, capsys, monkeypatch, refused):
        module = types.ModuleType("k3jax.checkpoint.inspect")
        module.inspect = lambda path: types.SimpleNamespace(
            refused=("a cut shard",) * refused, as_dict=lambda: {"path": path, "é": 1}, path=path
        )
        module.render = lambda report: print(f"table of {report.path}")
        monkeypatch.setitem(sys.modules, "k3jax.checkpoint.inspect", module)
        assert main(["inspect", "DIR"]) == int(refused)
        assert capsys.readouterr().out == "table of DIR\n"
        assert main(["inspect", "DIR", "--json"]) == int(refused)
        assert json.loads(capsys.readouterr().out) == {"path": "DIR", "é": 1}


class TestTrain:
    def test_recipe_is_passed_on(self, monkeypatch):
        seen = []
        module = types.ModuleType("k3jax.train.loop")
        module.main = lambda path, **options: seen.append((path, options))
        monkeypatch.setitem(sys.modules, "k3jax.train.loop", module)
        assert main(["train", "--config", "nano.yaml", "--steps", "7", "--no-resume"]) == 0
        absent = dict.fromkeys(("data", "out", "seconds", "batch_size"))
        assert seen == [("nano.yaml", {**absent, "steps": 7, "resume": False})]

    def test_missing_extra(self, monkeypatch, capsys):
        def no_optax(path, **options):
            raise ModuleNotFoundError("No module named 'optax'", name="optax")

        module = types.ModuleType("k3jax.train.loop")
        module.main = no_optax
        monkeypatch.setitem(sys.modules, "k3jax.train.loop", module)
        assert main(["train", "--config", "nano.yaml"]) == 1
        assert error_of(capsys) == "training needs optax: pip install 'k3jax[train]'"
