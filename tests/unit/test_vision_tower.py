"""The tower as a module, the encoder around it, and the merge."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx

from k3jax import runtime
from k3jax.checkpoint import names
from k3jax.config import Config, VisionConfig
from k3jax.errors import InputError
from k3jax.generate.loop import generate
from k3jax.generate.timing import CompileClock
from k3jax.layers.vision import VisionTower, frame_table
from k3jax.runtime import Model
from k3jax.tokenizer import Tokenizer
from k3jax.vision import Encoder, Item, aligned, expand, prompt, read
from k3jax.vision.cost import flops, parameters
from k3jax.vision.encoder import bucket
from k3jax.vision.preprocess import normalise

CONFIG = VisionConfig(
    hidden_size=32,
    num_layers=2,
    num_heads=2,
    qkv_size=48,
    intermediate_size=64,
    patch_size=14,
    position_table=(6, 5),
    merge=(2, 2),
    text_hidden_size=64,
    projector_eps=1e-5,
)


@functools.cache
def tower() -> VisionTower:
    return VisionTower(CONFIG, nnx.Rngs(0), dtype=jnp.float32)


@functools.cache
def encoder() -> Encoder:
    return Encoder(tower())


def item(t=1, h=4, w=6, seed=0) -> Item:
    noise = np.random.default_rng(seed).integers(0, 256, (t * h * w, 588), np.uint8)
    return Item(f"item {seed}", w * 14, h * 14, (w * 14, h * 14), (t, h, w), (2, 2), noise)


class TestTower:
    def test_k3_has_the_published_size(self):
        config = Config.preset("kimi-k3")
        assert config.vision is not None
        module = VisionTower.abstract(config.vision)
        shapes = {
            ".".join(map(str, path)): math.prod(v.get_value().shape)
            for path, v in nnx.iter_graph(module)
            if isinstance(v, nnx.Variable)
        }
        projector = sum(size for name, size in shapes.items() if name.startswith("projector"))
        assert round((sum(shapes.values()) - projector) / 1e6, 2) == 401.21
        assert round(projector / 1e6, 2) == 46.14
        assert parameters(config.vision) == (sum(shapes.values()) - projector, projector)
        count = names.count_parameters(config).by_component
        assert parameters(config.vision) == (count["vision"], count["projector"])

    def test_the_table_names_every_parameter(self):
        config = Config.preset("kimi-k3")
        assert config.vision is not None
        state = nnx.state(VisionTower.abstract(config.vision))
        leaves = {path: leaf.get_value() for path, leaf in nnx.to_flat_state(state)}
        table = names.vision_parameters(config)
        assert {path: leaf.shape for path, leaf in leaves.items()} == {
            path: spec.shape for path, spec in table.items()
        }
        assert len(names.vision_tensors(config)) == 168
        counters = {path: np.zeros(spec.shape, np.int8) for path, spec in table.items()}
        for spec in names.vision_tensors(config).values():
            assert spec.target is not None
            assert counters[spec.target][spec.index].size == spec.size
            counters[spec.target][spec.index] += 1
        assert all((counter == 1).all() for counter in counters.values())

    def test_axes(self):
        found = set()
        for _, variable in nnx.iter_graph(VisionTower.abstract(CONFIG)):
            if isinstance(variable, nnx.Variable):
                axes = variable.axes  # type: ignore[attr-defined]
                assert len(axes) == len(variable.get_value().shape)
                assert len(set(axes)) == len(axes)
                found |= set(axes)
        vision = {"vision_embed", "vision_heads", "vision_mlp", "vision_layers", "patch"}
        assert found == vision | {"embed"}

    def test_padding_may_hold_anything(self):
        """NaN past the real patches changes no bit of the features."""
        one = item()
        pixels = jnp.asarray(normalise(one.patches_NP))
        module = tower()
        run = jax.jit(lambda p, g: module(p, g))
        padded = jnp.concatenate([pixels, jnp.zeros((40, 588))])
        poison = jnp.concatenate([pixels, jnp.full((40, 588), jnp.nan)])
        grid = jnp.array(one.grid)
        clean, dirty = run(padded, grid), run(poison, grid)
        assert np.isfinite(clean).all()
        assert np.array_equal(clean, dirty)

    def test_bytes_and_floats_give_the_same(self):
        one, module = item(), tower()
        run = jax.jit(lambda p, g: module(p, g))
        grid = jnp.array(one.grid)
        a, b = run(one.patches_NP, grid), run(normalise(one.patches_NP), grid)
        assert np.abs(a - b).max() <= 1e-5 * np.abs(b).max()

    def test_frames(self):
        """One frame alone has no time; equal frames differ from an image only by it."""
        image = item()
        table = np.asarray(frame_table(4, 32))
        assert np.array_equal(table[0], np.repeat([0.0, 1.0], 16))
        group = Item("", 1, 1, (1, 1), (3, 4, 6), (2, 2), np.concatenate([image.patches_NP] * 3))
        _, alone = tower().inside(image.patches_NP, jnp.array(image.grid))
        _, timed = tower().inside(group.patches_NP, jnp.array(group.grid))
        got = np.asarray(timed["embedded"]).reshape(3, 24, 32)
        want = np.asarray(alone["embedded"])[None] + table[:3, None]
        assert np.abs(got - want).max() < 1e-5
        merged = np.asarray(timed["merged"])[:6]
        frames = np.asarray(timed["encoder"]).reshape(3, 2, 2, 3, 2, 32).mean(0)
        assert np.abs(merged - frames.swapaxes(1, 2).reshape(6, 4, 32)).max() < 1e-5

    def test_flops_of_k3(self):
        config = Config.preset("kimi-k3").vision
        assert config is not None
        assert flops(config, (1, 256, 256)) / 1e12 == pytest.approx(767.6, abs=3)
        # One patch more costs its linear maps and twice its attention.
        assert flops(config, (1, 2, 4)) > 2 * flops(config, (1, 2, 2))


class TestEncoder:
    @pytest.mark.parametrize("patches", [1, 4, 63, 64, 65, 80, 81, 5476, 65_536, 66_308])
    def test_buckets(self, patches):
        size = bucket(patches)
        assert size >= patches
        assert size % 4 == 0
        assert patches <= 64 or size < 1.25 * patches
        assert bucket(size) == size

    def test_a_batch_equals_each_alone_bit_for_bit(self):
        grids = [(1, 4, 6), (1, 2, 2), (3, 4, 4), (1, 8, 8), (4, 4, 4), (1, 2, 26), (1, 10, 6)]
        items = [item(*grid, seed=seed) for seed, grid in enumerate(grids)]
        together = encoder()(items)
        for one, features in zip(items, together, strict=True):
            (alone,) = encoder()([one])
            assert features.shape == (one.tokens, 64)
            assert np.array_equal(features, alone)
            assert np.isfinite(features).all()
        backwards = encoder()(items[::-1])[::-1]
        assert all(map(np.array_equal, together, backwards))

    def test_one_compilation_a_bucket_and_none_after(self):
        fresh = Encoder(tower())
        grids = [(1, 4, 6), (1, 2, 2), (1, 8, 8), (1, 10, 8), (1, 8, 10), (1, 2, 36)]
        fresh.warm_up(grids)
        assert fresh.compilations == len({bucket(math.prod(g)) for g in grids}) == 2
        items = [item(*grid, seed=seed) for seed, grid in enumerate(grids)]
        with CompileClock() as clock:
            fresh(items)
            fresh(items[:2])
            fresh(items[1:])
        assert clock.compilations == 0
        assert fresh.compilations == 2

    def test_no_item(self):
        assert encoder()([]) == []

    def test_items_over_devices(self):
        """Eight devices, seven items of two buckets; the same numbers as on one."""
        mesh = jax.make_mesh((2, 4), ("data", "more"))
        spread = Encoder(tower(), mesh)
        grids = [(1, 4, 6), (1, 2, 2), (3, 4, 4), (1, 8, 8), (1, 10, 8), (1, 2, 26), (1, 4, 4)]
        items = [item(*grid, seed=seed) for seed, grid in enumerate(grids)]
        for a, b in zip(spread(items), encoder()(items), strict=True):
            assert np.abs(a - b).max() <= 1e-5 * np.abs(b).max()
        assert spread.compilations == 2

    def test_refused(self):
        with pytest.raises(InputError, match="5 frames together, 1 to 4"):
            encoder()([item(5, 2, 2)])
        wrong = item()
        wrong = Item("x.png", 1, 1, (1, 1), (1, 4, 8), (2, 2), wrong.patches_NP)
        with pytest.raises(InputError, match=r"x.png: patches \(24, 588\).*\(32, 588\)"):
            encoder()([wrong])


MEDIA, WORDS = 92, ("<|media_begin|>", "<|media_content|>", "<|media_end|>", "<|media_pad|>")
TOKENIZER = Tokenizer(
    {bytes([byte]): byte for byte in range(256)},
    {word: 256 + i for i, word in enumerate(WORDS)},
)


class TestMerge:
    def test_expand(self):
        assert expand([1, 9, 2, 9], [3, 1], 9) == [1, 9, 9, 9, 2, 9]
        assert expand([1, 2], [], 9) == [1, 2]

    @pytest.mark.parametrize(("counts", "found"), [([3], 2), ([3, 1, 1], 2), ([], 2)])
    def test_more_placeholders_or_fewer(self, counts, found):
        with pytest.raises(InputError, match=f"{found} image placeholders for {len(counts)}"):
            expand([1, 9, 2, 9], counts, 9)

    def test_aligned(self):
        features = [np.full((2, 3), 5.0), np.full((1, 3), 7.0)]
        rows = aligned([1, 9, 9, 2, 9], features, 9)
        assert rows[:, 0].tolist() == [0, 5, 5, 0, 7]
        with pytest.raises(InputError, match="3 feature rows for 2 expanded"):
            aligned([9, 9], features, 9)

    def test_prompt(self):
        pad = 259
        items = [item(1, 2, 4), item(1, 4, 2, seed=1)]

        def shown(text):
            return TOKENIZER.decode(prompt(TOKENIZER, text, items, pad))

        first = "<|media_begin|>image 56x28<|media_content|><|media_pad|><|media_end|>"
        second = first.replace("56x28", "28x56")
        assert shown("What?") == first + second + "What?"
        place = "<|kimi_image_placeholder|>"
        assert shown(f"a{place} b{place}c") == f"a{first} b{second}c"
        # Text that looks like a marker is text: no second placeholder.
        ids = prompt(TOKENIZER, "<|media_pad|>", items, pad)
        assert ids.count(pad) == 2
        for text in (place, place * 3):
            with pytest.raises(InputError, match="placeholders for 2 images"):
                prompt(TOKENIZER, text, items, pad)
        with pytest.raises(InputError, match=r"does not know <\|media_begin\|>"):
            prompt(Tokenizer({bytes([b]): b for b in range(256)}), "x", items, pad)


@functools.cache
def model() -> Model:
    config = tiny.config(2, (2,), dsa=False, vision=CONFIG, vocab_size=260, media_token_id=259)
    made = Model(tiny.module(config))
    made.vision = encoder()
    return made


class TestModel:
    @pytest.fixture(autouse=True)
    def one_bucket(self, monkeypatch):
        monkeypatch.setattr(runtime, "MIN_TOKENS", 128)
        monkeypatch.setattr(runtime, "MIN_CACHE", 128)

    def test_generate_with_images(self):
        """Images count in the prompt, change the answer, and go through chunked prefill."""
        pictures = [np.full((40, 60, 3), value, np.uint8) for value in (10, 200)]
        options = {"max_new_tokens": 4, "stop_ids": []}
        one = generate(model(), TOKENIZER, "ab", images=pictures, **options)
        tokens = read(pictures, CONFIG)[0].tokens
        marks = len(prompt(TOKENIZER, "ab", read(pictures, CONFIG), 259))
        assert one.prompt_tokens == marks - 2 + 2 * tokens
        chunked = generate(model(), TOKENIZER, "ab", images=pictures, prefill_chunk=20, **options)
        assert chunked.tokens == one.tokens
        swapped = generate(model(), TOKENIZER, "ab", images=pictures[::-1], **options)
        text = generate(model(), TOKENIZER, "ab", **options)
        assert len({tuple(g.tokens) for g in (one, swapped, text)}) >= 2
        by_ids = prompt(TOKENIZER, "ab", read(pictures, CONFIG), 259)
        assert generate(model(), TOKENIZER, by_ids, images=pictures, **options).tokens == one.tokens
        with pytest.raises(InputError, match="1 image placeholders for 2 images"):
            generate(model(), TOKENIZER, [5, 259], images=pictures, **options)

    def test_text_programs_do_not_change(self):
        cache = model().init_cache(1, 128)
        ids = np.array([[1, 2, 3]])
        plain, _ = model().prefill(ids, cache)
        rows = np.zeros((1, 3, 64), np.float32)
        with_rows, _ = model().prefill(ids, model().init_cache(1, 128), features_BTD=rows)
        assert np.array_equal(plain, with_rows)

    def test_refused(self):
        bare = Model(tiny.module(tiny.config(2, (2,))))
        with pytest.raises(InputError, match="vision tower is not in this checkpoint"):
            bare.encode_images([np.zeros((3, 3), np.uint8)])
        with pytest.raises(InputError, match="text-only model"):
            generate(bare, TOKENIZER, "a", images=[np.zeros((3, 3), np.uint8)])
        with pytest.raises(InputError, match=r"features \(1, 2, 64\): expected \(1, 3, 64\)"):
            model().prefill(
                np.array([[1, 2, 3]]),
                model().init_cache(1, 128),
                features_BTD=np.zeros((1, 2, 64), np.float32),
            )
