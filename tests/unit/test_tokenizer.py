"""Tokenizer: the split, special ids, files, streaming decode, training of the vocabulary."""

import base64
import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3jax import tokenizer as module
from k3jax.errors import CheckpointError, InputError
from k3jax.tokenizer import (
    StreamDecoder,
    Tokenizer,
    pieces,
    read_tiktoken,
    write_tiktoken,
    write_tokenizer,
)
from k3jax.train.bpe import train_bpe

BYTES = {bytes([byte]): byte for byte in range(256)}
CORPUS = (
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1)\n\n"
    "# 月之暗面 means the dark side of the moon; 月之暗面 again\n"
    "It's theirs, isn't it? We've seen 1234567 names and 12345 numbers.\n"
) * 3
# Flags, skin tones, ZWJ families, combining marks, a BOM, the last code point.
HARD = (
    "naïve 漢字 \U0001f1e9\U0001f1ea\U0001f1ef\U0001f1f5"
    " \U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f44d\U0001f3fd"
    " e\u0301 \ufeff \u0000\x7f\u0080\u07ff\u0800\uffff\U00010000\U0010ffff"
)
SPLIT_SECONDS = 20.0  # measured 1.3 s on 2 shared cores; a quadratic split takes minutes


@pytest.fixture(scope="module")
def trained() -> Tokenizer:
    ranks = train_bpe([CORPUS], 300)
    return Tokenizer(ranks, {"[BOS]": 300, "[EOS]": 301, "<|sep|>": 302}, bos_id=300, eos_id=301)


def split(text: str) -> list[str]:
    """The splitter's pieces: with every part of the text a token, each piece is one token."""
    data = text.encode()
    parts = {data[a:b] for a in range(len(data)) for b in range(a + 2, len(data) + 1)}
    ranks = BYTES | {part: 256 + place for place, part in enumerate(sorted(parts))}
    tokenizer = Tokenizer(ranks)
    return [tokenizer.decode([token]) for token in tokenizer.encode(text)]


class TestSplit:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("I'LL we've it's don'T he'd", "I'LL| we've| it's| don'T| he'd"),
            (
                "'tis 'quoted'",
                "'tis| '|quoted|'",
            ),  # one leading mark joins a word; a space takes it
            ("x'REal", "x'RE|al"),
            ("HTTPServer camelCase ÉCOLE", "HTTPServer| camel|Case| ÉCOLE"),
            ("漢字abc漢字 漢", "漢字|abc|漢字| |漢"),
            ("don't漢's", "don't|漢|'s"),
            ("漢字です。カタカナ", "漢字|です|。カタカナ"),
            ("12345 1 ٣٤٥٦", "123|45| |1| |٣٤٥|٦"),
            ("v2x10", "v|2|x|10"),
            ("a\u0301b", "a\u0301b"),
            ("f(x);\r\n\r\ny", "f|(x|);\r\n\r\n|y"),
            (" += ((", " +=| (("),
            ("_foo __init__(", "_foo| __|init|__("),
            ("\tx", "\tx"),
            ("a  b", "a| | b"),
            ("a\n\n  b", "a|\n\n| | b"),
            ("  \n\n  \nz", "  \n\n  \n|z"),
            ("end   ", "end|   "),
            ("end \n  ", "end| \n|  "),
            ("x\u3000y", "x|\u3000y"),
            ("hi 🇩🇪", "hi| 🇩🇪"),
        ],
    )
    def test_table(self, text, expected):
        assert split(text) == expected.split("|")

    @given(st.text(max_size=12))
    @settings(max_examples=15, deadline=None)
    def test_pieces_are_the_text(self, text):
        assert "".join(split(text)) == text


class TestEncode:
    @given(st.text(alphabet=st.sampled_from("ab 漢字é\n'[]<|>BOSEsep\U0001f469\u200d")))
    @settings(max_examples=200, deadline=None)
    def test_round_trip(self, trained, text):
        for allow in (False, True):
            assert trained.decode(trained.encode(text, allow_special=allow)) == text

    def test_merges_are_used(self, trained):
        assert len(trained.encode(CORPUS)) < 0.8 * len(CORPUS.encode())

    def test_marker_text_is_ordinary_unless_allowed(self, trained):
        text = "a[BOS]<|sep|>b"
        assert trained.encode(text, allow_special=True) == [97, 300, 302, 98]
        assert max(trained.encode(text)) < 300
        assert trained.encode("<|sep|", allow_special=True) == trained.encode("<|sep|")

    def test_segments(self, trained):
        segments = [("[BOS]", True), ("[BOS] ret", False), ("urn", False), ("<|sep|>", True)]
        ids = trained.encode_segments(segments)
        assert ids[0] == 300
        assert ids[-1] == 302
        assert ids[1:-1] == trained.encode("[BOS] ret") + trained.encode("urn")
        assert trained.encode(" ret") + trained.encode("urn") != trained.encode(" return")

    def test_empty(self, trained):
        assert trained.encode("") == []
        assert trained.decode([]) == ""

    def test_lone_surrogate(self, trained):
        with pytest.raises(InputError, match=r"surrogate U\+D83D at character 2"):
            trained.encode("ab\ud83d")

    @pytest.mark.parametrize("token", [-1, 303, 2**40])
    def test_id_out_of_range(self, trained, token):
        with pytest.raises(InputError, match=f"token id {token} is outside 0..302"):
            trained.decode([97, token])

    def test_special_ids_decode_to_their_names(self, trained):
        assert trained.decode([300, 97, 302]) == "[BOS]a<|sep|>"


class TestPieces:
    @pytest.mark.parametrize(
        "text", ["a" * 7, "ab  cd", "a b" * 9, "aaaa    bbbb", " " * 11, "", "a"]
    )
    def test_limits(self, monkeypatch, text):
        monkeypatch.setattr(module, "MAX_PIECE", 10)
        monkeypatch.setattr(module, "MAX_RUN", 3)
        parts = list(pieces(text))
        assert "".join(parts) == text
        for part in parts:
            assert len(part) <= 10
            assert max((len(run) for run in module._RUN.findall(part)), default=0) <= 3

    def test_cuts_only_long_runs(self, monkeypatch):
        monkeypatch.setattr(module, "MAX_PIECE", 100)
        monkeypatch.setattr(module, "MAX_RUN", 3)
        assert list(pieces("abcde fg hijklmno")) == ["abc", "de fg hij", "klm", "no"]

    def test_long_runs(self, trained):
        begin = time.perf_counter()
        for unit in ("a", " ", "\n", ".", "漢", "1", "a b"):
            text = unit * 200_000
            assert trained.decode(trained.encode(text)) == text
        assert time.perf_counter() - begin < SPLIT_SECONDS


def line(token: bytes, rank: object) -> bytes:
    return base64.b64encode(token) + f" {rank}\n".encode()


class TestFiles:
    @pytest.fixture
    def directory(self, tmp_path):
        write_tiktoken(tmp_path / "tiktoken.model", BYTES | {b"ab": 256})
        return tmp_path

    def test_round_trip(self, directory, trained):
        assert read_tiktoken(directory / "tiktoken.model") == BYTES | {b"ab": 256}
        special = {300: "[BOS]", 301: "[EOS]", 303: "[PAD]"}
        ranks = {trained.token_bytes(rank): rank for rank in range(300)}
        write_tokenizer(directory, ranks, special)
        loaded = Tokenizer.load(directory)
        assert loaded.encode(CORPUS) == trained.encode(CORPUS)
        assert (loaded.bos_id, loaded.eos_id, loaded.pad_id) == (300, 301, 303)
        assert loaded.add_bos
        assert loaded.stop_ids == {301}
        assert loaded.special_tokens["<|reserved_token_302|>"] == 302
        assert loaded.vocab_size == 556
        assert sorted(file.name for file in directory.iterdir()) == [
            "tiktoken.model",
            "tokenizer_config.json",
        ]

    def test_no_config(self, directory):
        tokenizer = Tokenizer.load(directory)
        assert tokenizer.vocab_size == 257 + 256
        assert tokenizer.special_tokens["<|reserved_token_257|>"] == 257
        assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (None, None, None)
        assert tokenizer.stop_ids == frozenset()
        assert not tokenizer.add_bos

    def test_config_ids_and_own_eos_stop(self, directory):
        added = {"257": "[BOS]", "258": "[EOS]", "259": "<|end_of_msg|>"}
        decoder = {key: {"content": name, "special": True} for key, name in added.items()}
        names = {"added_tokens_decoder": decoder, "eos_token": {"content": "[EOS]"}}
        top = {"bos_token_id": 257, "eos_token_id": 259, "text_config": {"vocab_size": 265}}
        (directory / "tokenizer_config.json").write_text(json.dumps(names))
        (directory / "config.json").write_text(json.dumps(top))
        tokenizer = Tokenizer.load(directory)
        assert tokenizer.vocab_size == 265
        assert (tokenizer.bos_id, tokenizer.eos_id) == (257, 259)
        assert tokenizer.stop_ids == {258, 259}
        assert tokenizer.encode("<|reserved_token_264|>", allow_special=True) == [264]

    def test_missing(self, tmp_path):
        with pytest.raises(CheckpointError, match=r"tiktoken\.model: not found"):
            Tokenizer.load(tmp_path)

    @pytest.mark.parametrize(
        ("lines", "message"),
        [
            ([b"YQ==\n"], "line 1: not 'base64 rank': 'YQ=='"),
            ([line(b"a", 0), b"!!!! 1\n"], r"line 2: not 'base64 rank': '!!!! 1'"),
            ([line(b"a", 0), b"\n", line(b"b", "x")], "line 3: not"),
            ([line(b"a", 0), line(b"b", -1)], "line 2: not"),
            ([line(b"a", 0), b"Yg== 1 2\n"], "line 2: not"),
            ([line(b"a", 0), b"Y\xff== 1\n"], "line 2: not"),
            ([line(b"a", 0), line(b"b", 1), line(b"a", 2)], "line 3: token b'a' again, .* line 1"),
            ([line(b"a", 0), line(b"b", 0)], "line 2: rank 0 again, first on line 1"),
            ([line(b"a", 0), line(b"b", 2), line(b"c", 3)], "line 2: rank 2, 1 is missing"),
            ([line(b"a", 1)], "line 1: rank 1, 0 is missing"),
            ([], "no token"),
        ],
    )
    def test_bad_lines(self, tmp_path, lines, message):
        (tmp_path / "tiktoken.model").write_bytes(b"".join(lines))
        with pytest.raises(CheckpointError, match=message):
            read_tiktoken(tmp_path / "tiktoken.model")

    def test_all_bad_lines_in_one_report_but_not_thousands(self, tmp_path):
        (tmp_path / "tiktoken.model").write_bytes(b"x\n" * 1000)
        with pytest.raises(CheckpointError) as caught:
            read_tiktoken(tmp_path / "tiktoken.model")
        assert len(caught.value.problems) == module.MAX_PROBLEMS + 1
        assert caught.value.problems[-1] == "and 980 more"

    def test_byte_without_token(self, tmp_path):
        write_tiktoken(tmp_path / "tiktoken.model", {bytes([byte]): byte for byte in range(255)})
        with pytest.raises(CheckpointError, match="byte 0xff has no token"):
            Tokenizer.load(tmp_path)

    @pytest.mark.parametrize(
        ("names", "message"),
        [
            ("{", "not JSON"),
            ("[]", "a JSON object is needed, not list"),
            ('{"added_tokens_decoder": []}', "is not an object"),
            (
                '{"added_tokens_decoder": {"256": {"content": "x"}}}',
                "id 256 .x. is outside 257..512",
            ),
            (
                '{"added_tokens_decoder": {"513": {"content": "x"}}}',
                "id 513 .x. is outside 257..512",
            ),
            ('{"added_tokens_decoder": {"x": {"content": "x"}}}', "entry 'x'"),
            ('{"added_tokens_decoder": {"257": {"content": 5}}}', "entry '257'"),
            (
                '{"added_tokens_decoder": {"257": {"content": "x"}, "259": {"content": "x"}}}',
                "name 'x' for both 257 and 259",
            ),
            ('{"add_bos_token": true}', "no bos id"),
        ],
    )
    def test_bad_names(self, directory, names, message):
        (directory / "tokenizer_config.json").write_text(names)
        with pytest.raises(CheckpointError, match=message):
            Tokenizer.load(directory)

    @pytest.mark.parametrize(
        ("config", "message"),
        [
            ({"vocab_size": 200}, "257 ranks, but vocab_size is 200"),
            ({"vocab_size": 260, "eos_token_id": 260}, "eos_id 260 is outside 0..259"),
            ({"eos_token_id": "3"}, "eos_token_id '3' is not an int"),
        ],
    )
    def test_bad_config(self, directory, config, message):
        (directory / "config.json").write_text(json.dumps(config))
        with pytest.raises(CheckpointError, match=message):
            Tokenizer.load(directory)


class TestStreamDecoder:
    """Joined stream = one-shot decode, whatever the tokens cut (a byte is a token here)."""

    byte_level = Tokenizer(BYTES)

    def joined(self, parts) -> str:
        decoder = StreamDecoder(self.byte_level)
        return "".join([decoder.feed(*part) for part in parts]) + decoder.flush()

    def test_every_character_byte_by_byte(self):
        points = [*range(0xD800), *range(0xE000, 0x20000), *range(0x20000, 0x110000, 61), 0x10FFFF]
        decoder = StreamDecoder(self.byte_level)
        for point in points:
            character = chr(point)
            data = character.encode()
            assert [decoder.feed(byte) for byte in data] == [""] * (len(data) - 1) + [character]
        assert decoder.flush() == ""

    def test_every_cut(self):
        data = HARD.encode()
        for cut in range(len(data) + 1):
            assert self.joined([data[:cut], data[cut:]]) == HARD
            # Stopped by max_new_tokens inside a character: U+FFFD exactly as the one-shot has it.
            assert self.joined([[byte] for byte in data[:cut]]) == data[:cut].decode(
                errors="replace"
            )

    @given(st.lists(st.binary(max_size=4), max_size=12))
    @settings(max_examples=300, deadline=None)
    def test_any_bytes(self, parts):
        assert self.joined(parts) == self.byte_level.decode(b"".join(parts))

    @given(st.lists(st.integers(0, 302), max_size=30))
    @settings(max_examples=200, deadline=None)
    def test_any_tokens(self, trained, ids):
        decoder = StreamDecoder(trained)
        text = "".join(decoder.feed(token) for token in ids) + decoder.flush()
        assert text == trained.decode(ids)

    def test_flush_starts_afresh(self):
        decoder = StreamDecoder(self.byte_level)
        assert decoder.feed(0xE6) == ""
        assert decoder.flush() == "\ufffd"
        assert decoder.feed(*"漢".encode()) == "漢"


class TestTrainBPE:
    def test_ranks(self):
        ranks = train_bpe([CORPUS], 300)
        assert list(ranks.values()) == list(range(300))
        assert list(ranks)[:256] == list(BYTES)
        for token, rank in list(ranks.items())[256:]:
            halves = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
            assert any(
                a in ranks and b in ranks and max(ranks[a], ranks[b]) < rank for a, b in halves
            )
            text = token.decode(errors="ignore")
            assert len(split(text)) <= 1  # no merge crosses the split

    def test_equal_texts_give_equal_ranks(self):
        texts = [CORPUS, HARD * 5, CORPUS[::-1]]
        assert list(train_bpe(texts, 330)) == list(train_bpe(iter(texts), 330))

    def test_refusals(self):
        with pytest.raises(InputError, match="vocab_size 255"):
            train_bpe([CORPUS], 255)
        with pytest.raises(InputError, match="the text gives 257 tokens, 400"):
            train_bpe(["ab ab"], 400)
