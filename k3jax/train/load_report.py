"""How evenly a batch loads the routed experts and their devices, and how evenly it could."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Column, Table

from k3jax.errors import InputError
from k3jax.ops.routing.xla import select
from k3jax.train.balancing import balanced_bias
from sharding.placement import Placement, propose, report


@dataclass(frozen=True)
class LoadReport:
    """Loads over their mean: 1 is even, E / k is everything on the same k experts.

    Attributes:
      experts_LE, devices_LP: as the batch was routed, float64 [MoE layers, experts or devices].
      balanced_experts_LE, balanced_devices_LP: with ``balanced_bias_LE``, which is fitted to the
        same scores: the least that a bias can leave.
    """

    experts_LE: np.ndarray
    devices_LP: np.ndarray
    balanced_experts_LE: np.ndarray
    balanced_devices_LP: np.ndarray
    balanced_bias_LE: np.ndarray

    def peaks(self) -> dict[str, np.ndarray]:
        """Largest load over the mean, [MoE layers] for each of the four."""
        loads = {
            "experts": self.experts_LE,
            "devices": self.devices_LP,
            "balanced_experts": self.balanced_experts_LE,
            "balanced_devices": self.balanced_devices_LP,
        }
        return {name: load.max(axis=1) for name, load in loads.items()}


def expert_loads(
    scores_LNE: jax.Array,
    bias_LE: jax.Array,
    k: int,
    *,
    shards: int = 1,
    extra: int = 0,
    valid_N: np.ndarray | None = None,
) -> LoadReport:
    """The report of a batch.

    Args:
      scores_LNE: router scores, float32 [MoE layers, tokens, experts]: ``router_scores`` of
        `Model.forward` with ``collect=("routing",)``, its batch and positions made one axis.
      bias_LE: the biases it was routed with, float32 [MoE layers, experts].
      k: experts per token, below E.
      shards: devices that the experts of a layer are spread over.
      extra: slots for copies of busy experts, placed as `k3jax.experts.with_copies` places them for
        the loads at hand.
      valid_N: bool, False for padding.

    Raises:
      InputError: shapes that do not fit, no token, or experts that do not divide over the shards.
    """
    if scores_LNE.ndim != 3 or bias_LE.shape != (len(scores_LNE), scores_LNE.shape[-1]):
        raise InputError(
            f"loads: scores {scores_LNE.shape} and bias {bias_LE.shape} are not [layers, tokens, "
            "experts] and [layers, experts]"
        )
    L, N, E = scores_LNE.shape
    if not L or not 0 < k < E:
        raise InputError(f"loads: k = {k} of {E} experts in {L} layers")
    kept_N = np.ones(N, bool) if valid_N is None else np.asarray(valid_N)
    if kept_N.shape != (N,) or kept_N.dtype != bool:
        raise InputError(f"loads: valid {kept_N.dtype} {kept_N.shape} is not bool [{N}]")
    if np.isnan(np.asarray(scores_LNE)[:, kept_N]).any() or np.isnan(np.asarray(bias_LE)).any():
        raise InputError("loads: scores or biases hold NaN")
    if not kept_N.any():
        raise InputError("loads: no token")

    @jax.jit
    def measure(scores_NE, bias_E):
        def counts(bias_E):
            return jnp.bincount(select(scores_NE + bias_E, k).reshape(-1), length=E)

        even_E = balanced_bias(scores_NE, bias_E, k)
        return counts(bias_E), counts(even_E), even_E

    rows: list[tuple[np.ndarray, ...]] = []
    for scores_NE, bias_E in zip(scores_LNE, jnp.asarray(bias_LE, jnp.float32), strict=True):
        scores_NE = jnp.asarray(np.asarray(scores_NE, np.float32)[kept_N])
        now_E, then_E, even_E = map(np.asarray, measure(scores_NE, bias_E))
        loads = now_E, _devices(now_E, shards, extra), then_E, _devices(then_E, shards, extra)
        rows.append((*loads, even_E))
    *figures, fitted_LE = (np.stack(column) for column in zip(*rows, strict=True))
    experts_LE, devices_LP, even_LE, even_LP = (a / a.mean(axis=1, keepdims=True) for a in figures)
    return LoadReport(experts_LE, devices_LP, even_LE, even_LP, fitted_LE)


def _devices(load_E: np.ndarray, shards: int, extra: int) -> np.ndarray:
    try:
        placement = Placement.plain(load_E.size)
        if extra:
            placement = propose(load_E, load_E.size + extra, shards)
        return report(load_E, placement, shards).per_shard
    except ValueError as error:
        raise InputError(str(error)) from None


def render(loads: LoadReport, console: Console | None = None) -> None:
    """Prints one line a layer: the largest load over the mean, and where it is."""
    console = console or Console()
    titles = ("MoE layer", "busiest expert", "device", "balanced: expert", "device")
    table = Table(*(Column(t, justify="right") for t in titles))
    peaks, busiest = loads.peaks(), loads.experts_LE.argmax(axis=1)
    for layer, figures in enumerate(zip(*peaks.values(), strict=True)):
        first, *rest = (f"{f:.2f}" for f in figures)
        table.add_row(str(layer), f"{busiest[layer]}: {first}", *rest)
    if len(busiest) > 1:
        table.add_section()
        table.add_row("largest", *(f"{p.max():.2f}" for p in peaks.values()))
    devices = loads.devices_LP.shape[1]
    console.print(f"load over its mean: {loads.experts_LE.shape[1]} experts, {devices} devices")
    console.print(table)
