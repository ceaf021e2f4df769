"""What a checkpoint folder holds against what its config needs, from the headers alone."""

from __future__ import annotations

import contextlib
import gc
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from k3jax.checkpoint import ignore, names, safetensors
from k3jax.config import Config

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SHOWN = 20  # problems of one kind that are spelled out
FLOATS = ("BF16", "F32", "F16")


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file: the file's name, the name inside it, its entry."""

    file: str
    name: str
    entry: safetensors.Entry


@dataclass
class Plan:
    """Result of :func:`examine`.

    Attributes:
      config: truncated to the layers asked for.
      form: "mxfp4" or "dense", how the files store experts.
      specs: the text tensors that are to be loaded, by published name.
      vision: the tensors of the vision tower that are to be loaded; empty where there are none.
      stored: where each tensor found lies, by published name.
      problems: why a load must be refused; empty means it can go on.
      notes: what the user should know though it does not stop a load.
      unmatched: entries of the quantisation lists that match nothing.
    """

    directory: Path
    config: Config
    form: str = "mxfp4"
    specs: dict[str, names.TensorSpec] = field(default_factory=dict)
    vision: dict[str, names.TensorSpec] = field(default_factory=dict)
    stored: dict[str, Stored] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unmatched: list[str] = field(default_factory=list)

    def add(self, found: list[str]) -> None:
        """Adds problems of one kind, the first few of them in full."""
        self.problems += found[:SHOWN]
        if len(found) > SHOWN:
            self.problems.append(f"... and {len(found) - SHOWN} more like the last one")


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """Collecting among half a million objects that all stay costs a quarter of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_collector_paused()
def examine(
    directory: str | Path,
    config: Config,
    *,
    layers: int | None = None,
    strict_ignore: bool = False,
    vision: bool = False,
) -> Plan:
    """Reads the index and the headers, and compares them with the table of names.

    Args:
      layers: only the first layers and the tensors outside the layers; shards that hold neither
        may be absent and are not opened.
      strict_ignore: entries of the quantisation lists that match nothing are problems.
      vision: with ``layers``, the shards of the vision tower are wanted too.
    """
    directory = Path(directory)
    plan = Plan(directory, config if layers is None else config.truncated(layers))
    partial = plan.config.num_layers < config.num_layers
    weight_map, total_size = _read_index(plan)
    if plan.problems:
        return plan
    needed = {
        file
        for name, file in weight_map.items()
        if not partial or _wanted(names.canonical(name), plan.config, vision)
    }
    listed = set(weight_map.values())
    unlisted = sorted(p.name for p in directory.glob("*.safetensors") if p.name not in listed)
    plan.add([f"{file}: the index does not name this shard" for file in unlisted])
    headers = _read_headers(plan, weight_map, needed)
    broken = needed - set(headers)
    _compare_index(plan, weight_map, headers)
    if not broken and not partial and total_size is not None:
        total = sum(e.stop - e.start for entries in headers.values() for e in entries.values())
        if total != total_size:
            plan.add([f"{INDEX}: total_size = {total_size}, the shards hold {total} bytes"])
    _collect(plan, headers, partial, vision)
    pending = {names.canonical(name) for name, file in weight_map.items() if file in broken}
    _compare_table(plan, config, pending, partial and not vision)
    found, plan.unmatched = ignore.check(config, map(names.canonical, weight_map))
    plan.add(found)
    if strict_ignore:
        plan.add([f"quantization_config: {entry} matches nothing" for entry in plan.unmatched])
    plan.notes += [f"quantization_config: {entry} matches nothing" for entry in plan.unmatched]
    if config.unknown_keys:
        plan.notes.append("config.json: unknown keys " + ", ".join(config.unknown_keys))
    return plan


def _wanted(name: str, config: Config, vision: bool) -> bool:
    layer = names.layer_of(name)
    if layer is None:
        return vision or not names.is_vision(name)
    return layer < config.num_layers


def _read_index(plan: Plan) -> tuple[dict[str, str], float | None]:
    path = plan.directory / INDEX
    if not path.is_file():
        single = plan.directory / SINGLE
        if not single.is_file():
            plan.problems.append(f"{INDEX} is missing")
            return {}, None
        try:
            return dict.fromkeys(safetensors.read_header(single), SINGLE), None
        except (safetensors.FormatError, OSError) as error:
            plan.problems.append(f"{SINGLE}: {error}")
            return {}, None
    try:
        text = path.read_text(encoding="utf-8")
        index = json.loads(text, object_pairs_hook=safetensors.no_duplicates)
    except (ValueError, RecursionError, OSError) as error:
        plan.problems.append(f"{INDEX}: cannot be read: {str(error)[:200]}")
        return {}, None
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        plan.problems.append(f"{INDEX}: has no weight_map")
        return {}, None
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or file in (".", "..", ""):
            plan.problems.append(f"{INDEX}: {name!r} is in {file!r}, which is not a file name")
    metadata = index.get("metadata") or {}
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    if total is not None and (isinstance(total, bool) or not isinstance(total, int | float)):
        plan.problems.append(f"{INDEX}: metadata.total_size = {total!r} is not a number")
        total = None
    return weight_map, total


def _read_headers(
    plan: Plan, weight_map: dict[str, str], needed: set[str]
) -> dict[str, dict[str, safetensors.Entry]]:
    headers, absent = {}, []
    users: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        users.setdefault(file, []).append(name)
    for file in sorted(needed):
        path = plan.directory / file
        if not path.is_file():
            count, first = len(users[file]), users[file][0]
            absent.append(f"{file}: the shard is missing ({count} tensors, the first is {first})")
            continue
        try:
            headers[file] = safetensors.read_header(path)
        except (safetensors.FormatError, OSError) as error:
            plan.problems.append(f"{file}: {error} (the index puts {users[file][0]} here)")
    plan.problems += absent
    return headers


def _compare_index(
    plan: Plan, weight_map: dict[str, str], headers: dict[str, dict[str, safetensors.Entry]]
) -> None:
    extra, wrong, absent = [], [], []
    for file, entries in headers.items():
        for name in entries:
            place = weight_map.get(name)
            if place is None:
                extra.append(f"{file}: holds {name}, which the index does not name")
            elif place != file:
                wrong.append(f"{file}: holds {name}, which the index puts in {place}")
    for name, file in weight_map.items():
        if file in headers and name not in headers[file]:
            absent.append(f"{file}: does not hold {name}, which the index puts here")
    for found in (extra, wrong, absent):
        plan.add(found)


def _collect(
    plan: Plan, headers: dict[str, dict[str, safetensors.Entry]], partial: bool, vision: bool
) -> None:
    twice = []
    for file, entries in headers.items():
        for stored_name, entry in entries.items():
            name = names.canonical(stored_name)
            if partial and not _wanted(name, plan.config, vision):
                continue
            other = plan.stored.get(name)
            if other is not None:
                twice.append(
                    f"{name} is stored twice: as {other.name} in {other.file} "
                    f"and as {stored_name} in {file}"
                )
            plan.stored[name] = Stored(file, stored_name, entry)
    plan.add(twice)


def _compare_table(plan: Plan, full: Config, pending: set[str], text_only: bool) -> None:
    config = plan.config
    known = plan.stored.keys() | pending
    if any(name.endswith(".weight_packed") for name in known):
        plan.form = "mxfp4"
    elif any(".experts." in name and name.endswith(".weight") for name in known):
        plan.form = "dense"
    else:
        plan.form = names.expert_form(config)
    if plan.form != names.expert_form(config):
        state = "packed" if plan.form == "mxfp4" else "plain"
        has = "a" if config.mxfp4_experts else "no"
        plan.notes.append(f"experts are {state} though the config has {has} quantization_config")
    table = names.tensors(config, plan.form)
    vision = names.vision_tensors(config)
    if vision:
        state = "present" if vision.keys() & known else "absent"
        plan.notes.append(f"vision: {'left out' if text_only else state} ({len(vision)} tensors)")
    if text_only or not any(names.is_vision(name) for name in known):
        # A text-only copy, or a few layers: the text model can be loaded without the tower.
        table = {name: spec for name, spec in table.items() if name not in vision}
    else:
        plan.vision = vision
    missing = [name for name in table if name not in known]
    indexer = [name for name in missing if table[name].component == "indexer"]
    plan.add(
        [
            f"{n}: this indexer tensor of K3.1 is missing (dense attention is no K3.1)"
            for n in indexer
        ]
    )
    plan.add([f"{name}: is missing" for name in missing if table[name].component != "indexer"])
    plan.add(_unexpected(plan, full, table))
    wrong = []
    for name, stored in plan.stored.items():
        if (spec := table.get(name)) is not None:
            wrong += _wrong(name, spec, stored, config)
    plan.add(wrong)
    plan.specs = {name: spec for name, spec in table.items() if spec.target is not None}


def _unexpected(plan: Plan, full: Config, table: dict[str, names.TensorSpec]) -> list[str]:
    result = []
    for name, stored in plan.stored.items():
        if name in table:
            continue
        layer = names.layer_of(name)
        if layer is not None and layer >= full.num_layers:
            why = f"belongs to layer {layer}, the config has layers 0..{full.num_layers - 1}"
        elif ".indexer." in name and full.dsa is None:
            why = f"is an indexer tensor of K3.1, yet this config is a {full.architecture}"
        elif names.is_vision(name) and full.vision is None:
            why = "is a vision tensor, yet the config has no vision_config"
        elif ".experts." in name and plan.form == "mxfp4" and name.endswith(".weight"):
            why = "is a plain expert weight beside packed ones"
        else:
            why = "is not a tensor of this config"
        result.append(f"{name}: {why} (in {stored.file})")
    return result


def _wrong(name: str, spec: names.TensorSpec, stored: Stored, config: Config) -> list[str]:
    entry = stored.entry
    result = []
    if not accepts(name, spec, entry.shape, config.kda.num_heads):
        wanted, got = list(spec.shape), list(entry.shape)
        result.append(f"{name}: shape is {got}, the config needs {wanted} (in {stored.file})")
    allowed = FLOATS
    if spec.kind == "uint8":
        allowed = ("U8", "F8_E8M0") if name.endswith("_scale") else ("U8",)
    if entry.dtype not in allowed:
        one_of = " or ".join(allowed)
        result.append(f"{name}: dtype is {entry.dtype}, must be {one_of} (in {stored.file})")
    return result


def accepts(name: str, spec: names.TensorSpec, shape: tuple[int, ...], heads: int) -> bool:
    """Whether a stored shape is the published one or a known other spelling with the same bytes.

    ``A_log`` may be [H], [1,1,H,1] or padded; scales may be [rows,1,groups,1]; queries and
    convolutions may come without their dimension of one.
    """
    if shape == spec.shape:
        return True
    if name.endswith(".A_log"):
        padded = len(shape) == 1 and heads <= shape[0] <= max(128, 2 * heads)
        return padded or shape == (1, 1, heads, 1)
    if name.endswith(".weight_scale"):
        return shape == (spec.shape[0], 1, spec.shape[1], 1)
    if name.endswith(("_res_proj.weight", "_conv1d.weight")):
        return shape == tuple(size for i, size in enumerate(spec.shape) if size != 1 or i == 2)
    return False
