"""What others run for the same work on the same GPU: FLA's Triton kernels and FlashKDA.

The peers' folder holds `whl/` with the wheels of FLA and an archive with FlashKDA's library.

    python -m benchmarks.kda.peers FOLDER SHARD SHARDS    # compiles a part of FLA's variants
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from benchmarks.harness import peers as base
from benchmarks.harness import warming
from benchmarks.harness.peers import TorchSide
from benchmarks.harness.timing import reason
from benchmarks.kda.cases import LOWER_BOUND, Case

LIBRARY = "_flashkda_C.abi3.so"
GRAPH_TOKENS = 16_384  # longer prefills outlast what the host needs to launch them
SHARDS = 12
FLASHKDA, CHUNK = "FlashKDA", "FLA chunk"


def unpack(folder: str) -> Path:
    """Where FLA and FlashKDA of ``folder`` lie ready for import.

    Raises:
      InputError: a folder without them.
    """
    return base.unpack(folder, (LIBRARY,))


def _import_from(site: Path) -> None:
    os.environ.setdefault("FLA_TILELANG", "0")
    os.environ.setdefault("FLA_FLASH_KDA", "0")  # the rows named FLA are FLA's own kernels
    base.import_from(site)


def _shard(site: Path, shard: int, shards: int) -> None:
    """Every ``shards``-th variant of each of FLA's kernels, at the shapes of the rows."""
    _import_from(site)
    warming.take_part(shard, shards)
    peers = Peers(site)
    torch, peers.flash_error = peers.torch, "not needed"
    draw = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)  # noqa: E731
    x = {name: draw(1, 512, 96, 128) for name in "qkvz"} | {"b": draw(1, 512, 96)}
    x |= {"A_log": torch.rand(96, device="cuda"), "dt_bias": torch.zeros(96, 128, device="cuda")}
    bounds = torch.tensor([0, 200, 512], device="cuda")
    states = torch.zeros(2, 96, 128, 128, device="cuda")
    with torch.inference_mode():
        peers.chunk(x)
        peers.chunk(x | {"bounds": bounds, "state": states})
    torch.cuda.synchronize()


class Peers(base.Peers):
    """FLA and FlashKDA, loaded. What does not load is absent from the rows, and `notes` says why.

    Inputs are dictionaries of torch tensors with the names that `benchmarks.kda.ours.tokens` uses;
    packed sequences have ``bounds``, their cumulative lengths.
    """

    def __init__(self, site: Path):
        _import_from(site)
        super().__init__(site)
        torch = self.torch
        self.flash_error = self.fla_error = None
        try:
            torch.ops.load_library(str(site / LIBRARY))
        except Exception as error:
            self.flash_error = reason(error)
            self.notes.append(f"{FLASHKDA} is not there: {self.flash_error}")
        try:
            from fla.ops.kda import chunk_kda  # pyright: ignore[reportMissingImports]
            from fla.ops.kda.fused_recurrent import (  # pyright: ignore[reportMissingImports]
                fused_recurrent_kda_fwd,
            )

            self._chunk, self._recurrent = chunk_kda, fused_recurrent_kda_fwd
        except Exception as error:
            self.fla_error = reason(error)
            self.notes.append(f"FLA is not there: {self.fla_error}")

    def flash(self, x, out=None, workspace=None, final=None):
        """(o_BTHV, state_BHVK) by FlashKDA; the three buffers are made if not given."""
        torch, op = self.torch, self.torch.ops._flashkda_C
        B, T, H, K = x["q"].shape
        bounds, count = x.get("bounds"), B
        if bounds is not None:
            count = len(bounds) - 1
        if out is None:
            out = torch.empty_like(x["v"])
        if workspace is None:
            size = op.get_workspace_size(B * T, H, count)
            workspace = torch.empty(size, dtype=torch.uint8, device=self.device)
        if final is None:
            final = torch.zeros(count, H, K, K, device=self.device)
        tokens = (x["q"], x["k"], x["v"], x["z"], x["b"])
        gates = (x["A_log"], x["dt_bias"], LOWER_BOUND)
        states = (x.get("state"), final, bounds, None, None)
        op.fwd(*tokens, K**-0.5, out, workspace, *gates, *states)
        return out, final

    def chunk(self, x):
        """(o_BTHV, state_BHKV) by FLA's chunk kernels, K first."""
        return self._chunk(
            **dict(zip("qkv", (x["q"], x["k"], x["v"]), strict=True)),
            g=x["z"],
            beta=x["b"],
            A_log=x["A_log"],
            dt_bias=x["dt_bias"].reshape(-1),
            initial_state=x.get("state"),
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            safe_gate=True,
            lower_bound=LOWER_BOUND,
            cu_seqlens=x.get("bounds"),
        )

    def recurrent(self, x, state, out, v_first: bool):
        """One token by FLA's recurrent kernel; ``state`` and ``out`` are written in place."""
        return self._recurrent(
            q=x["q"],
            k=x["k"],
            v=x["v"],
            g=x["z"],
            beta=x["b"],
            A_log=x["A_log"],
            dt_bias=x["dt_bias"].reshape(-1),
            initial_state=state,
            inplace_final_state=True,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            lower_bound=LOWER_BOUND,
            out=out,
            state_v_first=v_first,
        )

    def sides(self, case: Case, workload, triton: bool = True) -> list[TorchSide]:
        """The peers of a case on the arrays of its workload."""
        if case.kind == "prefill":
            return self._prefill(case, workload, triton)
        return self._decode(case, workload) if case.kind == "decode" else []

    def _prefill(self, case: Case, workload, triton: bool) -> list[TorchSide]:
        torch, sides = self.torch, []
        x = self.tensors(workload.inputs[0] | workload.shared)
        if case.lengths is not None:
            bounds = [0, *case.lengths]
            x["bounds"] = torch.tensor(bounds, device=self.device).cumsum(0)
        graph = case.real_tokens <= GRAPH_TOKENS
        if self.flash_error is None:
            side = TorchSide(FLASHKDA, torch, [], graph)

            def flash():
                if not side.results:  # allocated in the first call, so that a failure is a row's
                    B, T, H, K = x["q"].shape
                    size = torch.ops._flashkda_C.get_workspace_size(B * T, H, case.batch)
                    workspace = torch.empty(size, dtype=torch.uint8, device=self.device)
                    final = torch.zeros(case.batch, H, K, K, device=self.device)
                    side.results = (torch.empty_like(x["v"]), final, workspace)
                out, final, workspace = side.results
                self.flash(x, out, workspace, final)

            side.functions, side.calls = [flash], 1
            sides.append(side)
        if self.fla_error is None and triton and case.triton:
            sides.append(TorchSide(CHUNK, torch, [lambda: self.chunk(x)], graph))
        return sides

    def _decode(self, case: Case, workload) -> list[TorchSide]:
        """FLA's kernel with the state in either layout; both write the same memory in turn."""
        if self.fla_error is not None:
            return []
        torch = self.torch
        B, H, K = case.batch, case.heads, case.dim
        shared = self.tensors({n: workload.shared[n] for n in ("A_log", "dt_bias")})
        inputs = []
        for arrays in workload.inputs:
            x = self.tensors(arrays)
            qkv = {n: t.reshape(B, 1, H, K) for n, t in zip("qkv", x["qkv"], strict=True)}
            inputs.append(qkv | {"z": x["z"][:, None], "b": x["b"][:, None]} | shared)
        states = [0.1 * torch.randn(B, H, K, K, device=self.device) for _ in range(workload.sets)]
        outs = [torch.empty_like(x["v"]) for x in inputs]

        def calls(v_first: bool):
            def one(at: int):
                return lambda: self.recurrent(inputs[at], states[at], outs[at], v_first)

            return [one(i % workload.sets) for i in range(workload.calls)]

        names = {"FLA recurrent [V,K]": True, "FLA recurrent [K,V]": False}
        return [TorchSide(name, torch, calls(v), True) for name, v in names.items()]


if __name__ == "__main__":
    _shard(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
