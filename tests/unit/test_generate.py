"""The generation loop, driven by a table instead of a model."""

import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from markov_model import MarkovModel

import k3jax
import k3jax.generate.loop
from k3jax.errors import InputError, K3Error
from k3jax.generate import Generation, generate, sample
from k3jax.generate.timing import CompileClock
from k3jax.tokenizer import Tokenizer

RANKS = {bytes([byte]): byte for byte in range(256)}
V = 260
BOS, EOS, OWN_EOS = 256, 258, 257
NAMES = {"[BOS]": BOS, "[EOS]": OWN_EOS, "<|end_of_msg|>": EOS, "[PAD]": 259}


def make_tokenizer(**options) -> Tokenizer:
    return Tokenizer(RANKS, NAMES, bos_id=BOS, eos_id=EOS, stop_ids=[OWN_EOS], **options)


TOKENIZER = make_tokenizer()


def make_model(seed=0, **options) -> MarkovModel:
    return MarkovModel(
        np.random.default_rng(seed).normal(scale=2, size=(V, V)), eos_token_id=EOS, **options
    )


def script(prompt: str, tokens) -> MarkovModel:
    """A model that answers ``prompt`` with exactly these tokens."""
    table_VV = np.zeros((V, V))
    total = sum(prompt.encode())
    for token in tokens:
        assert not table_VV[total % V].any(), "two steps share a row"
        table_VV[total % V, token] = 9
        total += token
    return MarkovModel(table_VV, eos_token_id=EOS)


class TestGreedy:
    @pytest.mark.parametrize("chunk", [None, 1, 7, 16, 1000])
    def test_tokens(self, chunk):
        model, prompt = make_model(), "def fibonacci(n):"
        got = generate(model, TOKENIZER, prompt, 40, stop_ids=[], prefill_chunk=chunk)
        assert got.tokens == model.greedy(prompt.encode(), 40)
        assert got.text == TOKENIZER.decode(got.tokens)
        assert (got.finish_reason, got.prompt_tokens) == ("length", 17)
        chunks = [n for name, n in model.calls if name == "prefill"]
        assert sum(chunks) == 17
        assert max(chunks) <= (chunk or 17)
        assert model.calls.count(("decode", 1)) == 39  # the last token is not decoded

    def test_prompt_of_ids(self):
        model = make_model()
        by_ids = generate(model, make_tokenizer(add_bos=True), [104, 105], 8, stop_ids=[])
        assert by_ids.tokens == generate(model, TOKENIZER, "hi", 8, stop_ids=[]).tokens

    def test_bos_goes_first_where_the_tokenizer_says_so(self):
        model = make_model()
        got = generate(model, make_tokenizer(add_bos=True), "hi", 8, stop_ids=[])
        assert got.tokens == model.greedy([BOS, 104, 105], 8)
        assert got.prompt_tokens == 3

    def test_one_token(self):
        got = generate(make_model(), TOKENIZER, "x", 1, stop_ids=[])
        assert len(got.tokens) == 1
        assert got.tokens_per_second == 0

    def test_package_is_the_function(self):
        # whichever submodule was imported first
        got = k3jax.generate(make_model(), TOKENIZER, "x", 2, stop_ids=[])
        assert isinstance(got, Generation)
        assert k3jax.generate.loop.generate is generate


class TestStop:
    @pytest.mark.parametrize("stop", [EOS, OWN_EOS])
    def test_default_stop_ids(self, stop):
        got = generate(script("a", [98, 99, stop]), TOKENIZER, "a", 40)
        assert got.tokens == [98, 99]
        assert got.text == "bc"
        assert got.finish_reason == "stop"

    def test_stop_at_once(self):
        got = generate(script("a", [EOS]), TOKENIZER, "a", 5)
        assert (got.tokens, got.text, got.finish_reason) == ([], "", "stop")
        assert got.tokens_per_second == 0

    def test_own_stop_ids_replace_the_default(self):
        got = generate(script("a", [98, EOS, 99, 100]), TOKENIZER, "a", 40, stop_ids=[100])
        assert got.tokens == [98, EOS, 99]
        assert got.text == "b<|end_of_msg|>c"

    def test_stop_as_the_last_allowed_token(self):
        got = generate(script("a", [98, EOS]), TOKENIZER, "a", 2)
        assert (got.tokens, got.finish_reason) == ([98], "stop")


class TestStream:
    # Bytes of "é漢👍" in an order of sums that no two steps share.
    TEXT = "é漢👍x"

    def test_pieces_are_whole_characters(self):
        seen = []
        model = script("a", [*self.TEXT.encode(), EOS])
        got = generate(model, TOKENIZER, "a", 40, on_text=seen.append)
        assert seen == list(self.TEXT)
        assert got.text == self.TEXT

    @pytest.mark.parametrize("length", range(1, 11))
    def test_cut_inside_a_character(self, length):
        seen = []
        data = self.TEXT.encode()
        got = generate(script("a", data), TOKENIZER, "a", length, on_text=seen.append)
        assert got.text == "".join(seen) == data[:length].decode(errors="replace")
        assert all(seen)


class TestSampled:
    def test_seed_decides(self):
        model = make_model()
        runs = [
            generate(model, TOKENIZER, "ab", 30, temperature=1.0, seed=seed, stop_ids=[]).tokens
            for seed in (5, 5, 6)
        ]
        assert runs[0] == runs[1] != runs[2]

    def test_each_step_has_its_own_key(self):
        model = MarkovModel(np.zeros((V, V)), eos_token_id=EOS)
        got = generate(model, TOKENIZER, "a", 6, temperature=1.0, seed=7, stop_ids=[]).tokens
        flat_BV, key = np.zeros((1, V), np.float32), jax.random.key(7)
        want = [int(sample(flat_BV, jax.random.fold_in(key, step), 1.0)[0]) for step in range(6)]
        assert got == want
        assert len(set(got)) > 3

    def test_chunked_prefill_changes_nothing(self):
        model = make_model()
        options = {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 3, "stop_ids": []}
        whole = generate(model, TOKENIZER, "abcdefghij", 30, **options)
        parts = generate(model, TOKENIZER, "abcdefghij", 30, prefill_chunk=3, **options)
        assert whole.tokens == parts.tokens

    def test_top_k_1_is_greedy(self):
        model = make_model()
        got = generate(model, TOKENIZER, "ab", 30, temperature=5.0, top_k=1, stop_ids=[])
        assert got.tokens == model.greedy(b"ab", 30)


class TestRefusals:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"prompt": ""}, "the prompt is empty"),
            ({"prompt": []}, "the prompt is empty"),
            ({"prompt": [3, 260]}, "token id 260 at position 1 is outside 0..259"),
            ({"prompt": [-1]}, "token id -1 at position 0"),
            ({"prompt": "x\udc80"}, "lone surrogate"),
            ({"prompt": "x" * 500, "max_new_tokens": 13}, "500 tokens and max_new_tokens 13.*512"),
            ({"max_new_tokens": 0}, "max_new_tokens 0"),
            ({"temperature": -1.0}, "temperature -1.0"),
            ({"top_p": 0.0}, "top_p 0.0"),
            ({"top_p": 1.5}, "top_p 1.5"),
            ({"top_k": -1}, "top_k -1"),
            ({"seed": -1}, "seed -1"),
            ({"seed": 2**32}, "seed 4294967296"),
            ({"prefill_chunk": 0}, "prefill_chunk 0"),
        ],
    )
    def test_bad_input_never_reaches_the_model(self, options, message):
        model = make_model()
        with pytest.raises(InputError, match=message):
            generate(model, TOKENIZER, **({"prompt": "x"} | options))
        assert model.calls == []

    def test_exactly_the_limit(self):
        got = generate(make_model(), TOKENIZER, "x" * 500, 12, stop_ids=[])
        assert len(got.tokens) == 12

    def test_cache_shorter_than_asked(self):
        model = make_model()
        model.init_cache = lambda batch, max_length: SimpleNamespace(max_length=4)
        with pytest.raises(InputError, match="the cache's 4"):
            generate(model, TOKENIZER, "abc", 2)

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_logits_not_finite(self, temperature):
        model = script("a", [98, 99])
        row = (97 + 98) % V
        model.table_VV = model.table_VV.at[row, 7].set(np.nan)
        seen = []
        with pytest.raises(K3Error, match="logits of new token 1"):
            generate(
                model, TOKENIZER, "a", 9, temperature=temperature, top_k=1, on_text=seen.append
            )
        assert seen == ["b"]


class TestTiming:
    def test_compilation_is_counted_apart(self, monkeypatch):
        pause = 0.02
        model = make_model(seed=9, max_position_embeddings=4096)
        decode = model.decode

        def slow(tokens_B, cache):
            time.sleep(pause)
            return decode(tokens_B, cache)

        monkeypatch.setattr(model, "decode", slow)
        prompt = "x" * 1500  # a cache length and a bucket that no other test uses
        cold = generate(model, TOKENIZER, prompt, 6, stop_ids=[])
        warm = generate(model, TOKENIZER, prompt, 6, stop_ids=[])
        assert cold.compile_seconds > 0
        assert warm.compile_seconds == 0
        for run in (cold, warm):
            parts = run.prefill_seconds + run.decode_seconds + run.compile_seconds
            assert 0 < parts <= run.seconds + 1e-6
            assert run.decode_seconds >= 4 * pause
            assert run.tokens_per_second == 5 / run.decode_seconds
        assert "5" in str(warm)
        assert "tokens/s" in str(warm)

    def test_no_compilation_after_warm_up(self):
        # Every pair of a prompt bucket (8, 16, .. 512) and a cache length (128, 256, 512).
        model = make_model()
        rng = np.random.default_rng(1)

        def run(length, seed=0, **options):
            generate(model, TOKENIZER, [5] * length, 2, seed=seed, stop_ids=[], **options)

        for length in (8, 16, 32, 64, 120, 128, 250, 256, 500):
            run(length)
        with CompileClock() as clock:
            for seed in range(200):
                run(
                    int(rng.integers(1, 510)),
                    seed=seed,
                    temperature=float(rng.choice([0, 0.5, 1])),
                    top_k=int(rng.integers(0, 9)),
                    top_p=float(rng.choice([0.5, 1])),
                )
        assert clock.compilations == 0
