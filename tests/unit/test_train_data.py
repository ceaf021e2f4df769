"""The corpus rules, on a small made-up library and on the running interpreter's own."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from k3jax.errors import ConfigError, InputError
from k3jax.train import data
from k3jax.train.settings import DataSettings, load_settings

RECIPE = load_settings("configs/train/nano.yaml")
BODY = "".join(f"    value_{i} = compute(value_{i - 1}, {i})\n" for i in range(1, 40))


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """heapq and json are held out below; some files follow them by name, one by content."""
    root = tmp_path_factory.mktemp("lib")
    files = {
        "heapq.py": f"def push():\n{BODY}",
        "json/__init__.py": "import re\nclass Decoder: pass\n",
        "json/tool.py": "print('tool')\n",
        "queue.py": "class Queue: pass\n" * 9,
        "copy_of_it.py": f"def other():\n{BODY}    return 1\n",
        "test/test_heapq.py": "assert True\n",
        "test/test_json/test_dump.py": "assert 1\n",
        "test/test_os.py": "import os\n# ünï\r\n",
        "_heapq_like.py": "x = 1\n",
        "_pyjson.py": "x = 2\n",
        "heap.py": "x = 3\n",
        "site-packages/new.py": "x = 4\n",
        "_sysconfigdata__linux.py": "x = 5\n",
        "encodings/cp437.py": "x = 6\n",
        "empty.py": "\n",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(text.encode())
    (root / "latin.py").write_bytes(b"# caf\xe9\n")
    return root


SETTINGS = DataSettings(300, ("heapq",), ("json",), ("encodings/cp*",))


def test_split_by_name_and_content(library):
    corpus = data.load_corpus(SETTINGS, library)
    assert [d.path for d in corpus.train] == ["heap.py", "queue.py", "test/test_os.py"]
    assert [d.path for d in corpus.heldout] == ["heapq.py"]
    assert [d.path for d in corpus.dev] == ["json/__init__.py", "json/tool.py"]
    reasons = corpus.dropped
    assert reasons["test/test_heapq.py"] == "named after heapq"
    assert reasons["_pyjson.py"] == "named after json"
    assert reasons["copy_of_it.py"].startswith("shares ")
    assert set(reasons) == {
        "test/test_heapq.py",
        "test/test_json/test_dump.py",
        "_pyjson.py",
        "_heapq_like.py",
        "copy_of_it.py",
    }


def test_bytes_come_back(library):
    corpus = data.load_corpus(SETTINGS, library)
    assert corpus.train[-1].data == (library / "test/test_os.py").read_bytes()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (DataSettings(300, ("heapq",), ("heapq",)), "data.dev: 'heapq' is in data.heldout"),
        (DataSettings(300, ("nothing",), ()), "data.heldout: the library has no module 'nothing'"),
    ],
)
def test_bad_lists(library, settings, message):
    with pytest.raises(ConfigError, match=message):
        data.load_corpus(settings, library)


def test_empty_library(tmp_path):
    with pytest.raises(InputError, match="no Python source"):
        data.load_corpus(SETTINGS, tmp_path)


def test_streams_mark_documents():
    documents = [data.Document("a.py", "xy"), data.Document("b.py", "z")]
    stream = data.tokens_of(documents, lambda text: [ord(c) for c in text], 1000, 1001)
    assert stream.dtype == np.uint16
    assert stream.tolist() == [1000, 120, 121, 1001, 1000, 122, 1001]
    with pytest.raises(InputError, match=r"70000 of a\.py"):
        data.tokens_of(documents, lambda text: [70000], 1000, 1001)


@pytest.fixture(scope="module")
def corpus():
    return data.load_corpus(RECIPE.data)


class TestOwnLibrary:
    """The shipped recipe on the interpreter that runs the tests."""

    def test_sets_are_disjoint(self, corpus):
        sets = [{d.path for d in s} for s in (corpus.train, corpus.dev, corpus.heldout)]
        assert not sets[0] & sets[1] | sets[0] & sets[2] | sets[1] & sets[2]
        texts = [{d.text for d in s} for s in (corpus.train, corpus.dev, corpus.heldout)]
        assert not texts[0] & (texts[1] | texts[2])
        for module in (*RECIPE.data.dev, *RECIPE.data.heldout):
            assert not [p for p in sets[0] if data.follows_by_name(p, module)]

    def test_no_held_out_passage_in_training(self, corpus):
        """40 held-out passages of 6 lines, spread over the files, occur nowhere in training."""
        train = "\n".join(d.text for d in corpus.train)
        for document in (*corpus.dev, *corpus.heldout):
            lines = document.text.splitlines(keepends=True)
            middle = "".join(lines[len(lines) // 2 : len(lines) // 2 + 6])
            assert middle not in train or len(middle) < 60, document.path

    def test_sizes(self, corpus):
        """Measured with 3.12.1: 27.9 MB, 253 kB, 577 kB."""
        size = {n: sum(len(d.data) for d in getattr(corpus, n)) for n in ("dev", "heldout")}
        assert 200_000 < size["dev"] < 350_000
        assert 450_000 < size["heldout"] < 700_000

    def test_deterministic(self, corpus):
        again = data.load_corpus(RECIPE.data)
        for name in ("train", "dev", "heldout"):
            assert data.digest(getattr(again, name)) == data.digest(getattr(corpus, name))


def test_prepare_twice_is_the_same(tmp_path, library):
    """The whole preparation; two runs give the same bytes."""
    pytest.importorskip("k3jax.tokenizer")
    pytest.importorskip("tokenizers")
    root = tmp_path / "lib"
    root.mkdir()
    for name in ("heapq.py", "textwrap.py", "queue.py", "shlex.py", "csv.py", "bisect.py"):
        (root / name).write_bytes((data.library_root() / name).read_bytes())
    (root / "abc_copy.py").write_bytes((data.library_root() / "argparse.py").read_bytes())
    model = json.loads(Path(RECIPE.model).read_text())
    model["text_config"]["vocab_size"] = 512 + 256
    ids = {"bos_token_id": 512, "eos_token_id": 514, "pad_token_id": 767}
    model |= ids | {"media_placeholder_token_id": 533}
    model["text_config"] |= ids
    (tmp_path / "config.json").write_text(json.dumps(model))
    settings = replace(
        RECIPE,
        model=str(tmp_path / "config.json"),
        data=DataSettings(512, ("heapq", "csv"), ("bisect", "shlex")),
    )
    records = [data.prepare(settings, tmp_path / n, root) for n in "ab"]
    assert records[0] == records[1]
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes(), file.name
    heldout = np.load(tmp_path / "a" / "heldout.npy")
    assert np.sum(heldout == 512) == 2
    from k3jax.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(tmp_path / "a")
    ids = heldout[1 : np.flatnonzero(heldout == 514)[0]].tolist()
    assert tokenizer.decode(ids).encode() == (root / "csv.py").read_bytes()
    sets = records[0]["sets"]
    assert sets["heldout"]["bytes"] == sum(d["bytes"] for d in sets["heldout"]["documents"])
    assert 0 < sets["heldout"]["xz_bytes"]["xz -9"] < sets["heldout"]["bytes"]
