"""Relative L2 errors against the float64 recurrence, ours and the peers' on the same inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from benchmarks.harness.compare import error
from benchmarks.harness.timing import reason
from benchmarks.kda import ours
from benchmarks.kda.cases import EPS, LOWER_BOUND, Case
from benchmarks.kda.peers import CHUNK, FLASHKDA, Peers
from k3jax.ops.kda import reference
from k3jax.ops.short_conv import reference as conv_reference

CASES = (
    Case("prefill", 1, 512, 8, quick=True),
    Case("prefill", 1, 4096, 2),
    Case("prefill", 1, 4096, 2, near_keys=True),
    Case("decode", 4, heads=8, quick=True),
)
TOYS = (Case("prefill", 1, 40, 2, dim=16, quick=True), Case("decode", 2, heads=2, dim=16))
FLA_HEADS = 96  # its chunk kernels are tuned for these: smaller cases repeat their heads


def _float64(x):
    return jax.tree.map(lambda a: np.asarray(a).astype(np.float64), x)


def _recurrence(x, shared, state):
    """x: float64 q, k, v [B, T, H, K], z and b."""
    return reference.kda(
        reference.l2norm(x["q"]) * x["q"].shape[-1] ** -0.5,
        reference.l2norm(x["k"]),
        x["v"],
        reference.decay(x["z"], shared["A_log"], shared["dt_bias"], LOWER_BOUND),
        1 / (1 + np.exp(-x["b"])),
        state,
    )


def _mixer(x, shared, state, tails):
    """A decode step in float64: (o_BHV, state_BHVK)."""
    B, H, K = x["z"].shape
    rows = {"z": x["z"][:, None], "b": x["b"][:, None]}
    for name, qkv, w, tail in zip("qkv", x["qkv"], shared["conv"], tails, strict=True):
        rows[name] = conv_reference.short_conv(qkv[:, None], w, tail)[0].reshape(B, 1, H, K)
    o, state = _recurrence(rows, shared, state)
    o = o[:, 0] / np.sqrt(np.mean(o[:, 0] ** 2, -1, keepdims=True) + EPS)
    return o * shared["norm"] / (1 + np.exp(-x["gate"])), state


def rows(case: Case, implementations: Sequence[str], peers: Peers | None, triton: bool):
    """One dictionary for each of ours, with ``o`` and ``state`` errors and those of the peers."""
    workload = ours.Workload(case, 1, 1)
    workload.make()
    prefill = case.kind == "prefill"
    x, shared = _float64(workload.inputs[0]), _float64(workload.shared)
    if prefill:
        want = _recurrence(x, shared, None)
    else:
        (carried,) = _float64(workload.states())
        want = _mixer(x, shared, *carried)
    others = _peers(case, workload, want, peers, triton) if peers and prefill else {}
    found = []
    for name in implementations:
        row: dict[str, Any] = {"case": f"error {case.name}", "implementation": name}
        found.append(row)
        try:
            compiled, row["chosen"] = workload.compile(name)
            program = workload.program(name, compiled)
            program.launch()
            got = program.out if prefill else (program.out[0], program.arguments[2][0][0])
            row["o"], row["state"] = map(error, map(_numpy, got), want)
        except Exception as problem:
            row["failed"] = reason(problem)
        row["peers"] = others
        if "o" in others.get(FLASHKDA, {}):
            flash = others[FLASHKDA]
            row["at_most_flashkda"] = all(row.get(n, np.inf) <= flash[n] for n in ("o", "state"))
    return found


def _numpy(x):
    return np.asarray(x).astype(np.float64)


def _peers(case: Case, workload, want, peers: Peers, triton: bool) -> dict[str, dict[str, Any]]:
    """Name -> errors, or why there are none."""
    torch, found = peers.torch, {}
    x = peers.tensors(workload.inputs[0] | workload.shared)
    repeats = FLA_HEADS // case.heads
    wide = {n: t.repeat_interleave(repeats, 0 if n in ("A_log", "dt_bias") else 2).contiguous()
            for n, t in x.items()}  # fmt: skip

    def chunk():
        o, state = peers.chunk(wide)
        return o[:, :, ::repeats], state[:, ::repeats].transpose(-1, -2)

    runs = {FLASHKDA: lambda: peers.flash(x)} if peers.flash_error is None else {}
    if peers.fla_error is None and triton:
        runs[CHUNK] = chunk
    for name, run in runs.items():
        try:
            with torch.inference_mode():
                got = [t.double().cpu().numpy() for t in run()]
            found[name] = dict(zip(("o", "state"), map(error, got, want), strict=True))
        except Exception as problem:
            found[name] = {"failed": reason(problem)}
    return found


def text(rows: list[dict[str, Any]]) -> str:
    """One line a row: relative L2 errors of output and state."""
    lines = []
    for row in rows:
        ours = {row["implementation"]: row} | row["peers"]
        parts = [
            f"{name} FAILED: {e['failed']}"
            if "failed" in e
            else f"{name} o {e['o']:.2e} state {e['state']:.2e}"
            for name, e in ours.items()
        ]
        if "at_most_flashkda" in row:
            parts.append(f"at most FlashKDA's: {'yes' if row['at_most_flashkda'] else 'NO'}")
        lines.append(f"{row['case']}: " + "; ".join(parts))
    return "\n".join(lines)
