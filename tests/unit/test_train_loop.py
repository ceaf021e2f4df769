"""The loop on a small stand-in model: it learns, resumes exactly, stops in time, keeps the best."""

import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from k3jax.errors import CheckpointError, ConfigError, InputError, K3Error
from k3jax.train import bits, loop
from k3jax.train import state as checkpoint
from k3jax.train.settings import DataSettings, OptimizerSettings, TrainSettings, load_settings
from k3jax.train.step import Trainer, data_mesh, draw_windows

VOCAB = 32
BOS = 0


class Bigram(nnx.Module):
    """Two embeddings back: enough to learn a Markov text, small enough to compile in a second."""

    def __init__(self, rngs, dtype):
        def make(*shape):
            if rngs is None:
                return nnx.Param(jax.ShapeDtypeStruct(shape, dtype))
            return nnx.Param(0.02 * jax.random.normal(rngs.params(), shape, dtype))

        self.embed, self.mix, self.lm_head = make(VOCAB, 16), make(16, 16), make(VOCAB, 16)

    def __call__(self, tokens_BT, collect=None):
        x = self.embed[...][tokens_BT]
        x = x + jnp.tanh(x @ self.mix[...].T)
        return (x @ self.lm_head[...].T).astype(jnp.float32), {}


def build(rngs, *, dtype, remat=False, indexer="frozen"):
    del remat, indexer
    return Bigram(rngs, dtype)


def text(seed, size=4000):
    """A Markov chain over 1..31 (four followers each) in documents of 250 tokens."""
    rng = np.random.default_rng(seed)
    follow = np.random.default_rng(7).integers(1, VOCAB, (VOCAB, 4))
    stream = np.zeros(size, np.uint16)
    for i in range(1, size):
        stream[i] = BOS if i % 250 == 0 else follow[stream[i - 1], rng.integers(4)]
    return stream


def recipe(**changes):
    values = {
        "model": "none",
        "data": DataSettings(256, (), ()),
        "optimizer": OptimizerSettings(0.02, warmup_steps=3),
        "batch_size": 8,
        "sequence_length": 32,
        "steps": 60,
        "dtype": "float32",
        "eval_interval": 20,
        "eval_context": 32,
        "eval_stride": 16,
        "eval_batch": 8,
        "log_interval": 5,
        "save_interval": 20,
    }
    return TrainSettings(**(values | changes))


@functools.cache
def compiled(settings):
    """A trainer keeps its programs, so runs of one recipe compile once."""
    trainer = Trainer(settings, None, build, text(0), data_mesh())
    sets = (("dev", 1), ("heldout", 2))
    return trainer, {n: trainer.make_evaluation(text(i), BOS, 4000) for n, i in sets}


def run(out, settings=None, **options):
    trainer, evaluations = compiled(settings or recipe())
    result = loop.train(trainer, evaluations, out, **options)
    state, _ = checkpoint.load(loop.newest_state(out), trainer.abstract_state())
    return result, state


def test_learns_and_reports(tmp_path):
    result, _ = run(tmp_path)
    assert result["finished"]
    assert result["step"] == 60
    assert result["heldout"] < 4.3  # uniform is 5.0 bits a token and "byte", the chain's entropy 2
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    losses = [entry["loss"] for entry in log if "loss" in entry]
    assert losses[0] > 3.3 > losses[-1]
    assert [e["step"] for e in log if "dev" in e] == [20, 40, 60]


def test_resume_is_the_uninterrupted_run(tmp_path):
    """Bitwise: same program, same order of work, state stored as float32."""
    _, whole = run(tmp_path / "whole")
    first, _ = run(tmp_path / "parts", seconds=0.0)  # the first look at the clock stops it
    assert not first["finished"]
    assert 0 < first["step"] < 60
    second, parts = run(tmp_path / "parts")
    assert second["finished"]
    for name, value in checkpoint.flatten(whole).items():
        np.testing.assert_array_equal(value, checkpoint.flatten(parts)[name], err_msg=name)


def test_goes_on_from_best_weights_alone(tmp_path):
    run(tmp_path, seconds=0.0)
    newest = loop.newest_state(tmp_path)
    for file in newest.iterdir():
        file.unlink()
    newest.rmdir()
    result, state = run(tmp_path)
    assert result["finished"]
    assert int(state["step"]) == 60


def test_patience_stops_and_best_is_kept(tmp_path):
    settings = recipe(patience=1, optimizer=OptimizerSettings(3.0, name="adamw", warmup_steps=1))
    result, _ = run(tmp_path, settings)
    assert result["finished"]
    assert result["step"] <= 60
    assert (
        result["best_step"]
        == min(
            (
                json.loads(line)
                for line in (tmp_path / "log.jsonl").read_text().splitlines()
                if '"dev"' in line
            ),
            key=lambda e: e["dev"],
        )["step"]
    )


def test_one_and_eight_devices_agree(tmp_path):
    settings = recipe(steps=5, save_interval=5)
    states = []
    for devices in (jax.devices()[:1], jax.devices()):
        trainer = Trainer(settings, None, build, text(0), data_mesh(devices))
        state = trainer.initial_state()
        for step in range(5):
            state, _ = trainer.train_step(state, step)
        states.append(checkpoint.flatten(jax.device_get(state["params"])))
    for name, value in states[0].items():
        # Measured 3e-7: sums in another order.
        np.testing.assert_allclose(states[1][name], value, atol=2e-5, err_msg=name)


def test_an_epoch_covers_the_stream_once():
    stream = jnp.arange(8 * 32 * 5 + 31, dtype=jnp.int32).astype(jnp.uint16)
    seen = [np.asarray(draw_windows(stream, jnp.int32(i), 3, 8, 32)) for i in range(4)]
    again = np.asarray(draw_windows(stream, jnp.int32(2), 3, 8, 32))
    np.testing.assert_array_equal(seen[2], again)
    targets = np.concatenate([w[:, 1:].ravel() for w in seen])
    assert len(set(targets.tolist())) == targets.size == 4 * 8 * 32
    assert (np.diff(np.stack(seen), axis=2) == 1).all()
    assert not np.array_equal(seen[0], np.asarray(draw_windows(stream, jnp.int32(5), 3, 8, 32)))
    with pytest.raises(InputError, match="fewer than batch_size 64"):
        draw_windows(stream, jnp.int32(0), 3, 64, 32)


@pytest.mark.parametrize(("context", "stride"), [(8, 8), (8, 3), (16, 5), (64, 64)])
def test_windows_count_each_token_once(context, stride):
    stream = np.concatenate([[BOS], np.arange(1, 30), [BOS], [5], [BOS], np.arange(1, 20)])
    tokens, counted = bits.windows(stream, BOS, context, stride)
    targets = np.sort(tokens[:, 1:][counted])
    np.testing.assert_array_equal(targets, np.sort(stream[stream != BOS]))
    position = tokens[:, :-1][counted]
    assert (tokens[:, 1:][counted] - position)[position > 0].min() == 1


def test_bits_of_a_uniform_model():
    stream = text(3, 700)
    tokens, counted = bits.windows(stream, BOS, 32, 16)
    total = bits.total_bits(lambda x: jnp.zeros((*x.shape, VOCAB)), tokens, counted, 4)
    assert math.isclose(total, 5 * np.sum(stream != BOS), rel_tol=1e-6)


class TestState:
    def tree(self):
        return {"a": {0: np.arange(12.0, dtype=np.float32).reshape(6, 2)}, "n": np.int32(3)}

    def test_round_trip_in_parts(self, tmp_path):
        for _ in range(2):  # the second replaces the first
            checkpoint.save(tmp_path / "s", self.tree(), {"step": 4}, max_bytes=20)
        assert len(list((tmp_path / "s").glob("*.npz"))) == 3
        assert sorted(p.name for p in tmp_path.iterdir()) == ["s"]
        tree, meta = checkpoint.load(tmp_path / "s", self.tree())
        assert meta == {"step": 4}
        np.testing.assert_array_equal(tree["a"][0], self.tree()["a"][0])

    def test_every_fault_is_named(self, tmp_path):
        checkpoint.save(tmp_path / "s", self.tree(), {})
        like = {"a": {0: np.zeros((3, 2), np.float32)}, "m": np.int32(0)}
        with pytest.raises(CheckpointError) as error:
            checkpoint.load(tmp_path / "s", like)
        assert all(n in str(error.value) for n in ("n: not part", "a/0: float32[6, 2]", "m: miss"))
        (tmp_path / "s" / "part-00.npz").unlink()
        with pytest.raises(CheckpointError, match=r"part-00\.npz"):
            checkpoint.load(tmp_path / "s", self.tree())


class TestRecipe:
    def write(self, tmp_path, text):
        (tmp_path / "r.yaml").write_text(text)
        return tmp_path / "r.yaml"

    def test_shipped_recipe(self):
        settings = load_settings("configs/train/nano.yaml")
        assert settings.model.endswith("nano/config.json")
        assert settings.optimizer.learning_rate > 0
        assert not set(settings.data.dev) & set(settings.data.heldout)

    @pytest.mark.parametrize(
        ("text", "names"),
        [
            ("- 1", "mapping"),
            ("model: x\nbatch: 3", "batch: unknown"),
            ("model: x", "data: required"),
            ("model: [", "not yaml"),
            ("model: x\ndata: {bpe_ranks: 1, heldout: a, dev: []}", "data.heldout: 'a'"),
            ("model: x\nsteps: many", "steps: 'many'|data: required"),
        ],
    )
    def test_refused_by_name(self, tmp_path, text, names):
        with pytest.raises(ConfigError, match=names):
            load_settings(self.write(tmp_path, text))

    def test_absent(self, tmp_path):
        with pytest.raises(ConfigError, match=r"none\.yaml"):
            load_settings(tmp_path / "none.yaml")

    def test_batch_must_divide(self):
        with pytest.raises(K3Error, match="batch_size 9"):
            Trainer(recipe(batch_size=9), None, build, text(0), data_mesh())
