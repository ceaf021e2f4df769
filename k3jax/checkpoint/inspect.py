"""A report on a checkpoint or a preset, from config and headers alone."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from k3jax.checkpoint import names
from k3jax.checkpoint.plan import INDEX, SINGLE, Plan, examine
from k3jax.config import Config, LayerSpec, resolve
from k3jax.errors import K3Error


@dataclass(frozen=True)
class Parameter:
    """A row of the table: shape in memory, stored bytes of all tensors it is made of."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    component: str
    tensors: int
    nbytes: int


@dataclass(frozen=True)
class Report:
    """What :func:`inspect` found.

    Attributes:
      summary: name of a fact -> value, in the order to show.
      parameters: one row a parameter of the text model.
      bytes_by_component: stored bytes; those of the files where there are files.
      refused: why a load would be refused; empty if it would not.
      notes: whether vision is there, unknown keys, unmatched quantisation entries.
    """

    where: str
    summary: dict[str, Any]
    parameters: tuple[Parameter, ...]
    bytes_by_component: dict[str, int]
    refused: tuple[str, ...]
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return asdict(self)


def inspect(path_or_preset: str | Path, *, layers: int | None = None) -> Report:
    """Reads the config and, where there are weights, the index and all headers.

    A config that is refused gives a report with the reasons, not an exception.

    Raises:
      ConfigError: neither a preset nor a folder with a ``config.json``.
    """
    directory = resolve(path_or_preset)
    try:
        config = Config.from_hf(directory)
    except K3Error as error:
        refused = tuple(line.strip() for line in str(error).splitlines())
        return Report(str(directory), {}, (), {}, refused, ())
    weights = any((directory / file).is_file() for file in (INDEX, SINGLE))
    weights = weights or any(directory.glob("*.safetensors"))
    plan = examine(directory, config, layers=layers) if weights else None
    shown = config if layers is None else config.truncated(layers)
    table = names.tensors(shown, plan.form if plan else None)
    by_component: dict[str, int] = {}
    rows: dict[names.Path, list[int]] = {}
    for name, spec in table.items():
        nbytes = _stored_bytes(name, spec, plan)
        by_component[spec.component] = by_component.get(spec.component, 0) + nbytes
        if spec.target is not None:
            row = rows.setdefault(spec.target, [0, 0])
            row[0] += 1
            row[1] += nbytes
    parameters = tuple(
        Parameter(
            names.join(path),
            spec.shape,
            {"model": "model dtype"}.get(spec.kind, spec.kind),
            spec.component,
            *rows[path],
        )
        for path, spec in names.parameters(shown, plan.form if plan else None).items()
    )
    notes = plan.notes if plan else ["no weights here: sizes are those of the published format"]
    if plan is None and config.unknown_keys:
        notes.append("config.json: unknown keys " + ", ".join(config.unknown_keys))
    summary = _summary(shown, len(table), sum(by_component.values()))
    refused = tuple(plan.problems) if plan else ()
    by_component = {name: nbytes for name, nbytes in by_component.items() if nbytes}
    return Report(str(directory), summary, parameters, by_component, refused, tuple(notes))


def _stored_bytes(name: str, spec: names.TensorSpec, plan: Plan | None) -> int:
    if plan is None:
        return spec.nbytes
    stored = plan.stored.get(name)
    return stored.entry.stop - stored.entry.start if stored else 0


def _kinds(specs: tuple[LayerSpec, ...]) -> str:
    return " ".join(f"{spec.attention}/{spec.ffn}" for spec in specs) or "none"


def _summary(config: Config, tensors: int, nbytes: int) -> dict[str, Any]:
    count, schedule, moe = names.count_parameters(config), config.schedule, config.moe
    attention = [spec.attention for spec in config.layers]
    dense = sum(spec.ffn == "dense" for spec in config.layers)
    result: dict[str, Any] = {
        "architecture": config.architecture,
        "layers": f"{config.num_layers}: {attention.count('kda')} KDA, "
        f"{attention.count('global')} global, {dense} dense FFN",
        "schedule": f"head {_kinds(schedule.head)}; {schedule.num_periods} x "
        f"({_kinds(schedule.period)}); tail {_kinds(schedule.tail)}",
        "hidden size": config.hidden_size,
        "vocabulary": config.vocab_size,
        "experts": f"{moe.num_experts}, top {moe.num_experts_per_token}, "
        f"{moe.num_shared_experts} shared, latent {moe.latent_size}, "
        + ("MXFP4" if config.mxfp4_experts else "plain"),
        "attention residuals": f"a block every {config.attn_res_block_size} layers, "
        f"{config.num_blocks} rows",
        "context": config.max_position_embeddings,
        "parameters": count.total,
        "active parameters": count.active,
        "tensors": tensors,
        "bytes": nbytes,
    }
    if config.dsa is not None:
        dsa = config.dsa
        result["sparse attention"] = f"top {dsa.topk}, {dsa.num_heads} heads of {dsa.head_dim}"
    return result


def size(nbytes: int) -> str:
    """Bytes for people, decimal units: 1560.9 GB is 1.561 TB."""
    power = min(int(math.log10(nbytes) // 3), 4) if nbytes > 0 else 0
    return f"{nbytes / 1000**power:.4g} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"


def render(report: Report, console: Console | None = None, *, parameters: bool = True) -> None:
    """Prints a report as tables."""
    console = console or Console()
    facts = Table(title=report.where, show_header=False, title_justify="left")
    for key, value in report.summary.items():
        text = f"{value:,}" if isinstance(value, int) else str(value)
        facts.add_row(key, f"{text} ({size(value)})" if key == "bytes" else text)
    if report.summary:
        console.print(facts)
    if parameters and report.parameters:
        table = Table(Column("parameter", overflow="fold", ratio=1), "shape", "dtype", "bytes")
        for row in report.parameters:
            shape = " x ".join(map(str, row.shape))
            table.add_row(row.path, shape, row.dtype, size(row.nbytes))
        console.print(table)
    if report.bytes_by_component:
        total = sum(report.bytes_by_component.values()) or 1
        table = Table("component", "bytes", "share")
        ranked = sorted(report.bytes_by_component.items(), key=lambda item: -item[1])
        for component, nbytes in ranked:
            table.add_row(component, size(nbytes), f"{nbytes / total:.2%}")
        console.print(table)
    for note in report.notes:
        console.print(f"note: {note}", markup=False)
    if report.refused:
        console.print(f"a load would be refused ({len(report.refused)}):", style="red")
        for line in report.refused:
            console.print(f"  {line}", markup=False)
    elif report.summary:
        console.print(
            "config and headers are sound; a load also checks scale bytes and the tokenizer"
        )
