"""Training the real model, small: every mode runs, what must not get a gradient gets none, and the
written checkpoint is the trained model."""

import json
from dataclasses import asdict

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx

from k3jax.config import DSAConfig, KDAConfig, MLAConfig, MoEConfig
from k3jax.quantization.mxfp4 import fake_quantize
from k3jax.train import balancing, evaluate, export, loop
from k3jax.train import state as checkpoint
from k3jax.train.settings import DataSettings, OptimizerSettings, TrainSettings
from k3jax.train.step import Trainer, build_transformer, data_mesh

CONFIG = tiny.config(
    num_layers=3,  # a layer costs 15 s of compile time on one core
    global_layers=(2, 3),
    block=2,
    vocab_size=64 + 256,
    hidden_size=32,
    intermediate_size=32,
    kda=KDAConfig(num_heads=2, head_dim=16, conv_width=4, gate_lower_bound=-5.0),
    mla=MLAConfig(2, 16, 16, 8, 8, 8),
    moe=MoEConfig(8, 2, latent_size=32, intermediate_size=32, num_shared_experts=1),
    dsa=DSAConfig(num_heads=2, head_dim=8, topk=8),
    bos_token_id=256,
    eos_token_id=258,
    pad_token_id=319,
    media_token_id=277,
)
# Logits of the packed bfloat16 model against the training forward pass on the same weights: the
# experts' sums run in another order. Measured 0.008 with logits up to 1.
PACKED_BF16 = 0.05
FAST = {"xla_backend_optimization_level": 0}  # halves the compile time


def recipe(**changes):
    values = {
        "model": "none",
        "data": DataSettings(256, (), ()),
        "optimizer": OptimizerSettings(0.01, warmup_steps=2),
        "batch_size": 4,
        "sequence_length": 24,
        "steps": 12,
        "eval_interval": 6,
        "eval_context": 24,
        "eval_stride": 12,
        "eval_batch": 4,
        "log_interval": 2,
        "save_interval": 6,
        "dense_attention_fraction": 0.5,
        "index_loss_weight": 1.0,
        "balance_momentum": 0.5,
    }
    return TrainSettings(**(values | changes))


def text(seed):
    line = b"for i in range(10):\n    print(i, i * i)\n"
    body = np.frombuffer(line * 8, np.uint8).astype(np.uint16)
    return np.concatenate([np.r_[256, np.roll(body, seed + i), 258] for i in range(4)]).astype(
        np.uint16
    )


@pytest.fixture(scope="module")
def trainer():
    mesh = data_mesh(jax.devices()[:1])
    build = build_transformer(CONFIG)
    return Trainer(recipe(), CONFIG, build, text(0), mesh, fake_quantize, FAST)


@pytest.fixture(scope="module")
def finished(trainer, tmp_path_factory):
    """A whole run: dense half, sparse half, with the files an export needs."""
    out = tmp_path_factory.mktemp("run")
    start = trainer.initial_state()
    start = jax.device_get(start["params"])
    evaluations = {
        n: trainer.make_evaluation(text(i), 256, text(i).size)
        for n, i in (("dev", 1), ("heldout", 2))
    }
    result = loop.train(trainer, evaluations, out)
    return out, start, result


def test_every_mode_runs_and_learns(trainer, finished):
    out, _, result = finished
    assert set(trainer._programs) == {"dense", "sparse"}
    log = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    losses = [entry["loss"] for entry in log if "loss" in entry]
    assert losses[-1] < losses[0] - 0.5
    assert all(entry["index_loss"] > 0 for entry in log if "loss" in entry)
    assert result["finished"]
    assert result["heldout"] < 8.4  # uniform over 320 tokens is 8.3 bits, one byte each


def test_every_parameter_moves(trainer, finished):
    out, start, _ = finished
    state, _ = checkpoint.load(loop.newest_state(out), trainer.abstract_state())
    before, after = checkpoint.flatten(start), checkpoint.flatten(state["params"])
    still = [name for name, value in after.items() if np.array_equal(value, before[name])]
    # The first layer reads one source: its query and norm are inert.
    assert set(still) <= {"head/0/attention_res/query", "head/0/attention_res/norm"}
    bias = balancing.get_bias(state["params"], CONFIG)
    np.testing.assert_allclose(bias.mean(axis=1), 0, atol=1e-6)


@pytest.fixture(scope="module")
def exported(trainer, finished, tmp_path_factory):
    out, _, _ = finished
    assets = out / "assets"
    assets.mkdir()
    from k3jax.checkpoint import save
    from k3jax.tokenizer import write_tokenizer
    from k3jax.train.data import special_tokens

    # The writer makes config.json from the config.
    best, _ = checkpoint.load(out / "best", trainer.abstract_state()["params"])
    dense = export.packed(best, CONFIG)
    save(out / "blank", jax.device_get(dense), CONFIG)
    (assets / "config.json").write_bytes((out / "blank" / "config.json").read_bytes())
    ranks = {bytes([i]): i for i in range(256)}
    write_tokenizer(assets, ranks, special_tokens(CONFIG))
    body = bytes(text(2)[1:321].astype(np.uint8)).decode()
    (out / "lib").mkdir()
    (out / "lib" / "held.py").write_text(body)
    from k3jax.train import data

    documents = [data.Document("held.py", body)]
    entry = {
        "files": 1,
        "bytes": len(body),
        "tokens": 322,
        "sha256": data.digest(documents),
        "documents": [{"path": "held.py", "bytes": len(body)}],
        "xz_bytes": {"xz -9": data.xz_bytes(documents)},
    }
    record = {"python": "3", "rule": "", "sets": dict.fromkeys(("train", "dev", "heldout"), entry)}
    (assets / "data.json").write_text(json.dumps(record))
    target = tmp_path_factory.mktemp("exported") / "model"
    sizes = export.export(out, target)
    return target, sizes


def test_written_checkpoint_is_the_trained_model(trainer, finished, exported):
    from k3jax.loading import load

    out, _, _ = finished
    target, sizes = exported
    assert len([n for n in sizes if n.endswith(".safetensors")]) >= 2
    model, tokenizer = load(target, dtype=jnp.bfloat16)
    best, _ = checkpoint.load(out / "best", trainer.abstract_state()["params"])
    stored = nnx.to_pure_dict(nnx.split(model.module)[1])
    for name, want in checkpoint.flatten(export.packed(best, CONFIG)).items():
        np.testing.assert_array_equal(checkpoint.flatten(stored)[name], want, err_msg=name)
    tokens = text(2)[:32].reshape(1, 32).astype(np.int32)
    forward = jax.jit(lambda p, x: trainer.apply(p, x, "frozen", ())[0], compiler_options=FAST)
    trained = forward(best, jnp.asarray(tokens))
    np.testing.assert_allclose(model(tokens), trained, atol=PACKED_BF16)
    assert tokenizer.encode("for") == [102, 111, 114]


def test_evaluation_of_the_written_checkpoint(finished, exported, capsys):
    out, _, _ = finished
    target, _ = exported
    figures = evaluate.evaluate(target, root=out / "lib", samples=0, update=True)
    assert f"held-out files | {figures['k3jax']:.4f} |" in (target / "README.md").read_text()
    assert figures["files_match"]
    assert 0 < figures["k3jax"] < 8.4
    assert "held.py" in capsys.readouterr().out
    (out / "lib" / "held.py").write_text("import os\n" * 32)
    record = evaluate.read_record(target)
    assert not evaluate.heldout_documents(record, root=out / "lib")[1]


def test_export_without_weights_is_refused(tmp_path):
    from k3jax.errors import CheckpointError

    with pytest.raises(CheckpointError, match=r"assets/tiktoken\.model: missing"):
        export.export(tmp_path, tmp_path / "out")
    assert asdict(recipe())["steps"] == 12
