"""The training loop: resume, step, log, evaluate, keep the best, stop in time."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from k3jax.errors import CheckpointError, InputError
from k3jax.train import state as checkpoint
from k3jax.train.settings import TrainSettings, load_settings
from k3jax.train.step import Trainer, build_transformer, data_mesh

SETS = ("train", "dev", "heldout")
ASSETS = ("tiktoken.model", "tokenizer_config.json", "data.json")


def load_streams(directory: str | Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The prepared corpus: uint16 streams by set, and data.json.

    Raises:
      InputError: a file is absent or does not have the number of tokens data.json states.
    """
    directory = Path(directory)
    try:
        record = json.loads((directory / "data.json").read_text(encoding="utf-8"))
        streams = {name: np.load(directory / f"{name}.npy") for name in SETS}
    except (OSError, ValueError) as error:
        raise InputError(f"prepared data in {directory}: {error}") from None
    for name, stream in streams.items():
        if stream.size != record["sets"][name]["tokens"]:
            raise InputError(
                f"{directory / name}.npy: {stream.size} tokens, data.json says "
                f"{record['sets'][name]['tokens']}"
            )
    return streams, record


def keep_assets(run_dir: Path, data: Path, model: Path) -> None:
    """Copies what an exported checkpoint needs besides weights into ``run_dir/assets``."""
    assets = run_dir / "assets"
    assets.mkdir(parents=True, exist_ok=True)
    for file in (*(data / name for name in ASSETS), model):
        shutil.copyfile(file, assets / file.name)


def newest_state(run_dir: Path) -> Path | None:
    """The last complete ``state-########`` folder of a run."""
    states = sorted(run_dir.glob("state-*"))
    return states[-1] if states else None


def resume_state(trainer: Trainer, run_dir: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(state, meta): the newest state, else the best weights, a fresh optimiser, else step 0."""
    like = trainer.abstract_state()
    newest, best = newest_state(run_dir), run_dir / "best"
    if newest is not None:
        state, meta = checkpoint.load(newest, like)
    elif best.is_dir():
        params, meta = checkpoint.load(best, like["params"])
        state = trainer.with_optimizer(params, int(meta["step"]))
    else:
        return trainer.initial_state(), {}
    return jax.device_put(state, trainer.replicated), meta


def _say(text: str) -> None:
    if jax.process_index() == 0:
        print(text, flush=True)


def train(
    trainer: Trainer,
    evaluations: Mapping[str, Callable],
    run_dir: str | Path,
    *,
    seconds: float | None = None,
    resume: bool = True,
) -> dict[str, Any]:
    """Trains to ``settings.steps``, to the end of the patience, or until ``seconds`` are over.

    Writes below ``run_dir``: ``state-########`` (the newest only; everything needed to go on
    exactly), ``best`` (weights of the lowest dev figure), ``log.jsonl``, ``settings.json``.

    Args:
      evaluations: "dev" and "heldout" -> f(params) -> bits per byte. Only dev chooses anything;
        heldout is measured once, on the best weights, when the run has ended.
      seconds: wall-clock budget from this call on, evaluation and saving included.

    Returns:
      {"step", "best_step", "dev", "finished", and, once finished, "heldout"}.
    """
    started = time.monotonic()
    settings, run_dir = trainer.settings, Path(run_dir)
    if not resume and run_dir.exists():
        for old in (*run_dir.glob("state-*"), run_dir / "best"):
            shutil.rmtree(old, ignore_errors=True)
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "settings.json").write_text(json.dumps(asdict(settings), indent=1) + "\n")
    log_path = run_dir / "log.jsonl"

    def log(entry: dict[str, Any]) -> None:
        with log_path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")

    state, meta = resume_state(trainer, run_dir)
    step = int(state["step"])
    best = {"dev": meta.get("dev", math.inf), "step": meta.get("best_step", step)}
    worse = int(meta.get("worse", 0))
    _say(f"step {step} of {settings.steps} on {trainer.mesh.size} x {jax.devices()[0].device_kind}")

    def facts() -> dict[str, Any]:
        return {"step": step, "dev": best["dev"], "best_step": best["step"], "worse": worse}

    def save() -> float:
        began = time.monotonic()
        path = run_dir / f"state-{step:08d}"
        checkpoint.save(path, state, facts())
        for other in run_dir.glob("state-*"):
            if other != path:
                shutil.rmtree(other)
        return time.monotonic() - began

    def measure() -> float:
        nonlocal worse
        began = time.monotonic()
        dev = evaluations["dev"](state["params"])
        improved = dev < best["dev"]
        if improved:
            best.update(dev=dev, step=step)
            worse = 0
            checkpoint.save(run_dir / "best", state["params"], facts())
        else:
            worse += 1
        took = time.monotonic() - began
        log({"step": step, "dev": dev, "seconds": time.monotonic() - started})
        _say(f"step {step:6d}  dev {dev:.4f} bits/byte{' *' if improved else ''}  ({took:.1f} s)")
        return took

    tokens_per_step = settings.batch_size * settings.sequence_length
    pending: list[dict[str, jax.Array]] = []
    since = time.monotonic()
    reserve = {"eval": 20.0, "save": 20.0, "step": 0.0, "compile": 0.0}  # seconds, until measured

    def short_of_time(extra: float = 0.0) -> bool:
        if seconds is None:
            return False
        left = seconds - (time.monotonic() - started)
        # A finished run evaluates twice more (dev and heldout).
        needed = 3 * reserve["eval"] + reserve["save"] + 2 * reserve["step"]
        return left < needed + extra

    measured_at = saved_at = -1
    out_of_time = False
    mode = None
    while step < settings.steps and not out_of_time:
        if settings.patience and worse >= settings.patience:
            _say(f"stop: {worse} evaluations without a better dev figure")
            break
        if mode != trainer.indexer_mode(step):
            if mode is not None and short_of_time(1.5 * reserve["compile"]):
                break
            mode = trainer.indexer_mode(step)
            began = time.monotonic()
            state, metrics = trainer.train_step(state, step)
            jax.block_until_ready(state["step"])
            reserve["compile"] = time.monotonic() - began
            _say(f"step {step:6d}  program {mode!r} compiled, {reserve['compile']:.1f} s")
            since = time.monotonic()
            pending = []
        else:
            state, metrics = trainer.train_step(state, step)
            pending.append(metrics)
        step += 1
        if step % settings.log_interval == 0 and pending:
            rows = jax.device_get(pending)
            took = time.monotonic() - since
            reserve["step"] = took / len(rows) * settings.log_interval
            means = {n: float(np.mean([row[n] for row in rows])) for n in rows[0]}
            speed = tokens_per_step * len(rows) / took
            rate = float(np.asarray(trainer.rate(step - 1)))
            log({"step": step, **means, "tokens_per_second": speed, "learning_rate": rate})
            shown = "  ".join(f"{n} {v:.4f}" for n, v in means.items())
            _say(f"step {step:6d}  {shown}  lr {rate:.2e}  {speed:,.0f} tokens/s")
            if not all(map(math.isfinite, means.values())):
                raise InputError(f"step {step}: a metric is not finite ({shown})")
            pending, since = [], time.monotonic()
        if step % settings.eval_interval == 0:
            reserve["eval"] = measure() + 1.0
            measured_at = step
            since, pending = time.monotonic(), []
        if step % settings.save_interval == 0:
            reserve["save"] = save() + 1.0
            saved_at = step
            since, pending = time.monotonic(), []
        if step % settings.log_interval == 0:
            out_of_time = short_of_time()
    if measured_at != step:
        measure()
    if saved_at != step or measured_at != step:
        save()
    stopped = bool(settings.patience and worse >= settings.patience)
    result: dict[str, Any] = {**facts(), "finished": step >= settings.steps or stopped}
    if result["finished"]:
        params, _ = checkpoint.load(run_dir / "best", trainer.abstract_state()["params"])
        params = jax.device_put(params, trainer.replicated)
        result["heldout"] = evaluations["heldout"](params)
        _say(f"heldout {result['heldout']:.4f} bits/byte (weights of step {best['step']})")
    else:
        _say(f"out of time at step {step}; the same command goes on from here")
    (run_dir / "result.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return result


def main(
    config_path: str | Path,
    *,
    data: str | Path | None = None,
    out: str | Path | None = None,
    seconds: float | None = None,
    resume: bool = True,
    steps: int | None = None,
    batch_size: int | None = None,
) -> dict[str, Any]:
    """Trains the model of a recipe.

    Args:
      config_path: yaml, see `TrainSettings`.
      data: prepared corpus (`k3jax.train.data.prepare`); made in ``out/data`` if None and absent.
      out: run folder; ``runs/<recipe name>`` if None.
      seconds: stop in time to have saved by then.
      resume: go on from what ``out`` holds; False starts over.
      steps, batch_size: in place of the recipe's. The rate schedule follows ``steps``, so a run is
        resumed with the value it began with.

    Returns:
      See `train`.
    """
    from k3jax.config import Config
    from k3jax.quantization.mxfp4 import fake_quantize
    from k3jax.train.data import prepare

    settings: TrainSettings = load_settings(config_path)
    changed = {"steps": steps, "batch_size": batch_size}
    settings = replace(settings, **{n: v for n, v in changed.items() if v is not None})
    run_dir = Path("runs", Path(config_path).stem) if out is None else Path(out)
    if data is None:
        data = run_dir / "data"
        if not (Path(data) / "data.json").is_file():
            _say(f"preparing the corpus in {data}")
            prepare(settings, data)
    streams, record = load_streams(data)
    config = Config.from_hf(settings.model)
    for name in ("bos", "eos"):
        want = getattr(config, f"{name}_token_id")
        if record[name] != want:
            raise CheckpointError(str(data), [f"{name} {record[name]}, the model has {want}"])
    keep_assets(run_dir, Path(data), Path(settings.model))
    sizes = ", ".join(f"{n} {s['tokens']:,} tokens" for n, s in record["sets"].items())
    _say(f"data: Python {record['python']}, {sizes}")
    trainer = Trainer(
        settings,
        config,
        build_transformer(config),
        streams["train"],
        data_mesh(),
        fake_quantize if settings.quantize_experts else None,
    )
    evaluations = {
        name: trainer.make_evaluation(
            streams[name], config.bos_token_id, record["sets"][name]["bytes"]
        )
        for name in ("dev", "heldout")
    }
    return train(trainer, evaluations, run_dir, seconds=seconds, resume=resume)
