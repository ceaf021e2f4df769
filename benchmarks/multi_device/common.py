"""What every section uses: two layouts, arrays made on devices, timing, comparing, estimates."""

from __future__ import annotations

import gc
import math
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from k3jax.config import Config
from k3jax.plan import costs, hardware
from k3jax.plan import estimate as roofline
from k3jax.plan.memory import Step
from sharding import Layout, make_mesh, resolve
from sharding import collectives as wires
from sharding.report import OTHER, Collective, collectives

PULL = {"all-reduce": "reduce-scatter", "all-reduce-max": "reduce-scatter"}  # whose rate counts


@dataclass(frozen=True)
class Side:
    """A layout and its mesh: all devices, or one of them with the same roles."""

    layout: Layout
    mesh: Mesh

    @classmethod
    def of(cls, layout: Layout, devices: int) -> Side:
        layout = replace(layout, mesh={"model": devices})
        return cls(layout, make_mesh(layout))

    @property
    def devices(self) -> int:
        return self.layout.num_devices

    def striped(self) -> Side:
        """The same with rows of the global layers' caches striped over the devices."""
        rules = {**self.layout.rules, "cache_sequence": ("model",)}
        return replace(self, layout=replace(self.layout, rules=rules))

    def form(self, name: str) -> Side:
        """The same with one form of expert dispatch."""
        forms = {"prefill": name, "decode": name}
        return replace(self, layout=replace(self.layout, dispatch=forms))


@dataclass(frozen=True)
class Sizes:
    """What is measured. ``tolerance`` bounds the relative RMS of a result against one device."""

    config: Config
    dtype: Any
    tolerance: float
    moe_tokens: tuple[int, ...]
    batch: int  # sequences of a decode step
    prompt: int  # tokens of a prefill
    context: int  # rows of the global layer's cache
    long_context: int
    long_batches: tuple[int, ...]
    buffers: tuple[int, ...]  # bytes, ascending
    layers: int  # of the slice
    slice_experts: int


@dataclass
class Bench:
    """One run: where rows are collected and how fast the links were."""

    sizes: Sizes
    one: Side
    all: Side
    rows: list[dict[str, Any]] = field(default_factory=list)
    rates: dict[str, float] = field(default_factory=dict)  # kind -> bytes a second sent

    def add(self, section: str, name: str, **values):
        row = {"section": section, "name": name, **values}
        self.rows.append(row)
        shown = "  ".join(f"{k}={show(v)}" for k, v in values.items() if v is not None)
        print(f"{section:9s} {name:28s} {shown}", flush=True)


def show(value) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@dataclass
class Result:
    """One program on one side. Times are seconds of a call."""

    seconds: float
    low: float
    high: float
    compile: float
    output: Any
    collectives: Sequence[Collective]


def draw(side: Side, leaves: Mapping[str, resolve.HasAxes], seed: int = 0) -> list[jax.Array]:
    """Pseudo-random arrays made where they live: the same numbers on every layout.

    An element is a hash of its name and indices, so nothing is generated twice or sent. The index
    along a striped axis is the position that a row stands for.
    """
    gc.collect()  # a model that is no longer used may stand in a cycle of references
    layout = side.layout
    specs = tuple(resolve.spec(layout, leaf) for leaf in leaves.values())

    def local():
        return tuple(
            _values(name, leaf, _hash(layout, name, leaf, spec, seed))
            for (name, leaf), spec in zip(leaves.items(), specs, strict=True)
        )

    made = jax.shard_map(local, mesh=side.mesh, in_specs=(), out_specs=specs, check_vma=False)
    return list(jax.jit(made)())


def _hash(layout: Layout, name: str, leaf, spec, seed: int) -> jax.Array:
    shape = resolve.local_shape(layout, leaf)
    bits = jnp.full(shape, zlib.crc32(name.encode()) + seed & 0xFFFFFFFF, jnp.uint32)
    for d, (size, part) in enumerate(zip(shape, spec, strict=True)):
        at = jax.lax.broadcasted_iota(jnp.uint32, shape, d)
        if part is not None:
            axes = part if isinstance(part, tuple) else (part,)
            device = jnp.uint32(wires.index(axes))
            if leaf.axes[d] == "cache_sequence":
                at = at * jnp.uint32(wires.size(axes)) + device
            else:
                at = at + device * jnp.uint32(size)
        bits = _mix(bits + at * jnp.uint32(0x9E3779B9) + jnp.uint32(d))
    return bits


def _mix(h: jax.Array) -> jax.Array:
    h = (h ^ (h >> 16)) * jnp.uint32(0x7FEB352D)
    h = (h ^ (h >> 15)) * jnp.uint32(0x846CA68B)
    return h ^ (h >> 16)


def _values(name: str, leaf, bits: jax.Array) -> jax.Array:
    """Uniform numbers of the spread that the model's own initialiser gives each array."""
    last, dtype = name.rpartition(".")[2], leaf.dtype
    if last.endswith("_codes"):
        return (bits & 255).astype(jnp.uint8)
    if last.endswith("_scales"):
        return jnp.full(bits.shape, 127 - 7, jnp.uint8)
    if last.endswith(("norm", "norm_scale")):
        return jnp.ones(bits.shape, dtype)
    if last in ("router_bias", "dt_bias", "k_norm_bias"):
        return jnp.zeros(bits.shape, dtype)
    unit = (bits >> 8).astype(jnp.float32) * jnp.float32(2**-24)  # 0 .. 1
    if last == "A_log":
        return jnp.log(1 + 15 * unit).astype(dtype)
    spread = {"x": 1.0, "latent_BSC": 1.0, "index_key_BSK": 1.0, "tails_3BWP": 0.5}.get(last, 0.02)
    if last.endswith("_conv"):
        spread = 0.29
    return ((unit - 0.5) * jnp.float32(math.sqrt(12) * spread)).astype(dtype)


def measure(function: Callable, arguments: Sequence[Any], state: int | None = None) -> Result:
    """Compiles, runs and times. With ``state`` the function gives (result, new state); the state is
    donated, and each call goes on from the last one's. The result of the first call is kept."""
    begin = time.perf_counter()
    donated = () if state is None else (state,)
    traced = jax.jit(function, donate_argnums=donated).trace(*arguments)
    found = collectives(traced.jaxpr)
    compiled = traced.lower().compile()
    seconds = time.perf_counter() - begin
    arguments = list(arguments)

    def call():
        out = compiled(*arguments)
        if state is None:
            return out
        arguments[state] = out[1]
        return out[0]

    first = jax.tree.map(np.asarray, call())
    return Result(*timed(call), seconds, first, found)


def timed(call: Callable[[], Any]) -> tuple[float, float, float]:
    """(median, least, most) seconds of a call that ran before. Quick ones run many in flight, so
    that the host's share of a call is not counted."""
    once = _clock(call, 1)
    if once > 0.2:
        laps = sorted([once, _clock(call, 1), _clock(call, 1)])
        return laps[1], laps[0], laps[2]
    # Host devices share a few threads: collectives of two runs in flight can starve each other.
    flight = 1 if jax.default_backend() == "cpu" else max(1, min(30, int(0.05 / once)))
    laps = sorted(_clock(call, flight) for _ in range(5))
    return laps[2], laps[0], laps[4]


def _clock(call, times: int) -> float:
    begin = time.perf_counter()
    for _ in range(times):
        out = call()
    jax.block_until_ready(out)
    return (time.perf_counter() - begin) / times


def rms(got, want) -> float:
    """Relative root mean square of the difference; NaN where either is not finite."""
    got, want = (np.asarray(a).astype(np.float64) for a in (got, want))
    return float(np.sqrt(np.mean(np.square(got - want)) / np.mean(np.square(want))))


def estimate(
    config: Config, layout: Layout, step: Step, found: Sequence[Collective], components
) -> float:
    """Seconds that `k3jax.plan` gives these components of a step."""
    chip = hardware.CHIPS[layout.chip]
    work = costs.work(config, layout, step) if components else {}
    times = roofline.times(chip, layout, work, found)
    return sum(t.total for name, t in times.items() if name in components or name == OTHER)


def sent(one: Collective) -> float:
    """Bytes that leave a device in a step. A ragged exchange counts its largest case, without the
    rows that stay."""
    stays = one.ranks if one.kind == "ragged-all-to-all" else 0
    return one.total_bytes * (1 - 1 / stays if stays else 1)


def wire_seconds(bench: Bench, found: Sequence[Collective]) -> float | None:
    """Bytes sent over the measured rates of their kinds; None before the links were measured."""
    if not bench.rates or not found:
        return None
    fallback = min(bench.rates.values())
    return sum(sent(c) / bench.rates.get(PULL.get(c.kind, c.kind), fallback) for c in found)


def compare(bench: Bench, section: str, name: str, one: Result, many: Result, **more):
    """A row: times, efficiency, bytes, and the error against one device unless ``rms`` is given."""
    error = more.pop("rms") if "rms" in more else rms(many.output, one.output)
    tolerance = more.pop("tolerance", bench.sizes.tolerance)
    devices = more.pop("devices", bench.all.devices)
    wires_s = wire_seconds(bench, many.collectives)
    planned, planned_one = more.pop("estimate", None), more.pop("estimate_one", None)
    bench.add(
        section,
        name,
        ok=bool(error <= tolerance),  # False for NaN
        rms=error,
        ms_one=1e3 * one.seconds,
        ms=1e3 * many.seconds,
        efficiency=one.seconds / (devices * many.seconds),
        spread=(many.high - many.low) / many.seconds,
        mb_sent=sum(sent(c) for c in many.collectives) / 1e6,
        wire_ms=None if wires_s is None else 1e3 * wires_s,
        plan_ms=None if planned is None else 1e3 * planned,
        plan_ratio=None if not planned else many.seconds / planned,
        plan_one_ratio=None if not planned_one else one.seconds / planned_one,
        compile_s=one.compile + many.compile,
        **more,
    )


def own_spec(side: Side) -> P:
    """Tokens in the order of their owners."""
    return P(side.layout.tensor or None)
