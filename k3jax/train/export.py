"""From a training run to a checkpoint in the published format, with tokenizer and model card."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from k3jax.config import Config
from k3jax.errors import CheckpointError
from k3jax.train import state as checkpoint

RECORD = "training.json"
_COPIED = ("tiktoken.model", "tokenizer_config.json")


def packed(params: dict, config: Config, dtype=jnp.bfloat16) -> dict:
    """Float32 master weights with dense experts -> the tree a packed model has.

    Experts become MXFP4 codes and scales, the rest takes the dtype the model gives it. These are
    the very values the forward pass of training saw.
    """
    from k3jax.model import Transformer
    from k3jax.quantization import mxfp4

    abstract = nnx.to_pure_dict(nnx.split(Transformer.abstract(config, dtype))[1])

    def walk(have, want) -> Any:
        if not isinstance(want, dict):
            return jnp.asarray(have).astype(want.dtype)
        result: dict[Any, Any] = {}
        for name in want:
            if str(name).endswith("_codes"):
                expert = name.removesuffix("_codes")
                values = mxfp4.pack(jnp.asarray(have[expert], jnp.float32))
                result |= {name: values.codes, f"{expert}_scales": values.scales}
            elif not str(name).endswith("_scales"):
                result[name] = walk(have[name], want[name])
        return result

    return walk(params, abstract)


def export(
    run_dir: str | Path, out_dir: str | Path, *, max_shard_bytes: int = 5 * 10**9
) -> dict[str, int]:
    """Writes the best weights of a run as a checkpoint folder with at least two shards.

    Args:
      run_dir: folder of `k3jax.train.loop.main`.
      out_dir: gets config.json, the shards and their index, the tokenizer, ``training.json`` (the
        corpus record, the recipe, the figures) and README.md.

    Returns:
      Bytes of each file written.

    Raises:
      CheckpointError: the run has no best weights, or lacks one of its files.
    """
    from k3jax.checkpoint import save
    from k3jax.model import Transformer

    run_dir, out = Path(run_dir), Path(out_dir)
    assets = run_dir / "assets"
    absent = [n for n in (*_COPIED, "config.json", "data.json") if not (assets / n).is_file()]
    if absent or not (run_dir / "best").is_dir():
        missing = [f"assets/{n}" for n in absent] or ["best"]
        raise CheckpointError(str(run_dir), [f"{name}: missing" for name in missing])
    config = Config.from_hf(assets / "config.json")
    dense = Transformer.abstract(config, jnp.float32, experts="dense")
    params, meta = checkpoint.load(run_dir / "best", nnx.to_pure_dict(nnx.split(dense)[1]))
    save(
        out,
        jax.device_get(packed(params, config)),
        config,
        max_shard_bytes=max_shard_bytes,
        min_shards=2,
    )
    for name in _COPIED:
        shutil.copyfile(assets / name, out / name)
    record = _record(run_dir, meta, sum(x.size for x in jax.tree.leaves(params)))
    (out / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    (out / "README.md").write_text(model_card(record), encoding="utf-8")
    return {path.name: path.stat().st_size for path in sorted(out.iterdir())}


def _record(run_dir: Path, meta: dict[str, Any], parameters: int) -> dict[str, Any]:
    def read(name: str) -> dict[str, Any]:
        path = run_dir / name
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}

    settings = read("settings.json")
    settings.pop("model", None)  # a path of the machine that trained
    return {
        "parameters": parameters,
        "best_step": meta.get("best_step"),
        "dev_bits_per_byte": meta.get("dev"),
        "heldout_bits_per_byte": read("result.json").get("heldout"),
        "jax": jax.__version__,
        "settings": settings,
        "data": read("assets/data.json"),
    }


def model_card(record: dict[str, Any]) -> str:
    """README.md of the checkpoint: data, recipe, seed, figures, limits, and the record's notes."""
    data, settings = record["data"], record["settings"]
    heldout = data["sets"]["heldout"]
    train = data["sets"]["train"]
    optimizer = settings["optimizer"]

    def figure(value) -> str:
        return "not measured" if value is None else f"{value:.4f}"

    rows = [("this model, held-out files", figure(record["heldout_bits_per_byte"]))]
    rows += [
        (f"`{name}` on the same files, concatenated", figure(8 * size / heldout["bytes"]))
        for name, size in heldout["xz_bytes"].items()
    ]
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    files = ", ".join(f"`{d['path']}`" for d in heldout["documents"])
    dev = ", ".join(f"`{d['path']}`" for d in data["sets"]["dev"]["documents"])
    numbers = {
        "parameters": f"{record['parameters']:,}",
        "table": table,
        "files": files,
        "dev_files": dev,
        "num_heldout": heldout["files"],
        "heldout_bytes": f"{heldout['bytes']:,}",
        "heldout_sha": heldout["sha256"],
        "dev_figure": figure(record["dev_bits_per_byte"]),
        "train_files": f"{train['files']:,}",
        "train_bytes": f"{train['bytes']:,}",
        "train_tokens": f"{train['tokens']:,}",
        "train_sha": train["sha256"],
        "dense_share": f"{settings['dense_attention_fraction']:.0%}",
        **{name: data[name] for name in ("python", "rule")},
        **{name: record[name] for name in ("best_step", "jax")},
        **{
            name: settings[name]
            for name in ("eval_context", "eval_stride", "seed", "steps", "batch_size", "dtype")
        },
        "sequence": settings["sequence_length"],
        "notes": record.get("notes", ""),
        **{
            f"optimizer_{name}": optimizer[name]
            for name in ("name", "learning_rate", "warmup_steps", "weight_decay")
        },
    }
    return _CARD.format(**numbers)


_CARD = """# nano: a small Kimi K3.1 Pro

{parameters} parameters, every mechanism of the large model: KDA and Gated DSA layers 3:1, Block
Attention Residuals with a partial last block, LatentMoE with MXFP4 experts, its own tokenizer. For
tests, demonstrations and layout experiments; it writes plausible Python and knows nothing.

## Figures

| | bits per byte |
| --- | --- |
{table}

Measured on {num_heldout} files, {heldout_bytes} bytes, each predicted from its own beginning
(windows of {eval_context} tokens, stride {eval_stride}; the end of each file is predicted too). On
the dev files, which chose the checkpoint: {dev_figure}. Repeat with
`python -m k3jax.train.evaluate <this folder>`.

## Data

The source of the Python {python} standard library, {train_files} files, {train_bytes} bytes,
{train_tokens} tokens (sha256 of the concatenated files `{train_sha}`).
{rule}

Held out for the figure above (sha256 `{heldout_sha}`): {files}.

Dev: {dev_files}.

## Recipe

Seed {seed}; {steps} steps of {batch_size} x {sequence} tokens, best at step {best_step};
{optimizer_name} with peak rate {optimizer_learning_rate}, {optimizer_warmup_steps} warm-up steps,
cosine decay, weight decay {optimizer_weight_decay}; {dtype} compute, float32 master weights. Routed
experts are trained on their MXFP4 values, routers balanced by Quantile Balancing, the indexer
trained on dense attention for the first {dense_share} of the steps and within its selection after
that. Made with `k3jax train --config configs/train/nano.yaml` (jax {jax}).
{notes}

Python's sources are under the PSF licence; the weights are under the licence of this repository.
"""
