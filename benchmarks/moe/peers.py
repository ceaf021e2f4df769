"""What others run for the same experts on the same GPU: triton_kernels' matmul_ogs and Marlin.

Both have the packed weights of ours, brought into their layout once, and ids and weights that are
given. Neither knows SiTU. triton_kernels fuses ``gate sigmoid(gate) (up + 1)`` into the first
product and takes sorted tokens: its sort is made before the clock starts, ours is inside. Marlin
aligns tokens to tiles inside and has torch's SiLU between its products. Its library is in an
archive of its own (`peers_moe.tar.xz`), which need not be there.

    python -m benchmarks.moe.peers FOLDER SHARD SHARDS    # compiles the kernels of some rows
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.harness import peers as base
from benchmarks.harness.peers import TorchSide
from benchmarks.moe import marlin
from benchmarks.moe.cases import TOKENS, Case

SHARDS = len(TOKENS) + 1
LIBRARY, FOLDER = "_moe_C_stable_libtorch.abi3.so", "triton_kernels"
OGS, MARLIN = "triton_kernels", "Marlin"
GRAPH_TOKENS = 64  # more tokens outlast what the host needs to launch them
CHUNK = 32  # experts converted at once: 0.4 GB that become 4 GB on the way
FLOAT4 = 2 | 1 << 8 | 1 << 16 | 1 << 49  # vLLM's number for signed e2m1 without infinities

Call = Callable[[], Any]


def unpack(folder: str) -> Path:
    """Where both lie ready for import.

    Raises:
      InputError: a folder without them.
    """
    return base.unpack(folder, (LIBRARY, FOLDER), wheels=False)


class Peers(base.Peers):
    """triton_kernels and Marlin, loaded; sides of those that are not fail with the reason."""

    def __init__(self, site: Path):
        super().__init__(site)
        torch = self.torch
        self.ogs: Any = self.load(OGS, self._load_ogs)
        self.load(MARLIN, lambda: torch.ops.load_library(str(site / LIBRARY)))
        self.converted: dict[str, Any] = {}  # weights in a peer's layout

    def _load_ogs(self) -> dict[str, Any]:
        """Its modules by the last part of their names."""
        names = ("matmul_ogs", "numerics", "routing", "swiglu", "tensor", "tensor_details.layout")
        flags = importlib.import_module(f"{FOLDER}.matmul_ogs_details.opt_flags")
        flags.update_opt_flags_constraints({"split_k": 1})
        found = {n.rpartition(".")[2]: importlib.import_module(f"{FOLDER}.{n}") for n in names}
        layout = found["layout"]
        found["values"] = layout.make_default_matmul_mxfp4_w_layout(mx_axis=1)
        found["scales"] = layout.make_default_matmul_mxfp4_w_scale_layout(mx_axis=1, num_warps=8)
        return found

    def sides(self, case: Case, workload) -> list[TorchSide]:
        """The peers of a case on the arrays of its workload; none has 8-bit activations here."""
        if case.eight:
            return []
        graph = case.tokens <= GRAPH_TOKENS
        return [
            self.side(OGS, lambda: self._ogs(case, workload), graph),
            self.side(MARLIN, lambda: self._marlin(case, workload), graph),
        ]

    def _once(self, name: str, make: Callable[[], Any]):
        """Converted weights are those of all cases, as the weights themselves are."""
        self.need(name)
        if name not in self.converted:
            self.converted[name] = make()
        return self.converted[name]

    def _inputs(self, workload) -> list[tuple[Any, Any, Any]]:
        return [tuple(map(self.torch.from_dlpack, x)) for x in workload.inputs]

    def _weights(self, workload) -> list[tuple[Any, Any]]:
        """(codes, scales) of w13 and w2: ours, not copies."""
        return [tuple(map(self.torch.from_dlpack, (w.codes, w.scales))) for w in workload.shared]

    # triton_kernels -------------------------------------------------------------------------------

    def ogs_weight(self, codes, scales, count: int, interleave: bool):
        """(weight, precision) of ``count`` experts from [n, N, K/2] and [n, N, K/32], a part at a
        time. Beyond those n nothing is written.

        Args:
          interleave: row 2i is row i of the first half, row 2i + 1 row i of the second.
        """
        torch, k = self.torch, self.ogs
        convert, wrap = k["tensor"].convert_layout, k["tensor"].wrap_torch_tensor
        whole: list[Any] = [None, None]
        for first in range(0, len(codes), CHUNK):
            for i, (x, dtype, (layout, options)) in enumerate(
                ((codes, k["tensor"].FP4, k["values"]), (scales, None, k["scales"]))
            ):
                x = x[first : first + CHUNK]
                if interleave:
                    x = x.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
                one = convert(wrap(x.contiguous().mT, dtype=dtype), layout, **options)
                data = one.storage.data
                if whole[i] is None:
                    shape = (count, *data.shape[1:])
                    strides = (data[0].numel(), *data.stride()[1:])
                    kept = torch.empty_strided(shape, strides, dtype=data.dtype, device=data.device)
                    storage = k["tensor"].Storage(kept, layout((count, *x.mT.shape[1:]), **options))
                    shape = (count, *one.shape[1:])
                    whole[i] = k["tensor"].Tensor(storage, dtype=one.dtype, shape=list(shape))
                whole[i].storage.data[first : first + len(x)].copy_(data)
        flex = k["matmul_ogs"].FlexCtx(rhs_data=k["numerics"].InFlexData())
        precision = k["matmul_ogs"].PrecisionConfig(weight_scale=whole[1], flex_ctx=flex)
        return whole[0], precision

    def ogs_routing(self, ids, weights, experts: int):
        """Its tables of a routing that is given: tokens sorted by expert."""
        torch, routing = self.torch, self.ogs["routing"]
        k = ids.shape[1]
        ids, order = ids.sort(1)  # as its own routing leaves them
        flat, weights = ids.reshape(-1), weights.gather(1, order).reshape(-1)
        sorted_at = flat.argsort(stable=True)
        place = sorted_at.argsort(stable=True).to(torch.int32)
        sorted_at = sorted_at.to(torch.int32)
        count = torch.bincount(flat, minlength=experts).to(torch.int32)
        tables = routing.compute_expt_data(count, experts, flat.numel())
        scaled = weights[sorted_at.long()].contiguous()
        data = routing.RoutingData(scaled, count, experts, k, tables)
        gather = routing.GatherIndx(src_indx=sorted_at, dst_indx=place)
        return data, gather, routing.ScatterIndx(src_indx=place, dst_indx=sorted_at)

    def ogs_call(self, z, w13, w2, tables) -> Call:
        k = self.ogs["matmul_ogs"]
        data, gather, scatter = tables
        specs = k.FnSpecs("swiglu", self.ogs["swiglu"].swiglu_fn, ("alpha", "limit"))
        activation = k.FusedActivation(specs, (1.0, 1e9), 2)
        (up, up_precision), (down, precision) = w13, w2

        def run():
            first = {"gather_indx": gather, "precision_config": up_precision}
            h = k.matmul_ogs(z, up, None, data, fused_activation=activation, **first)
            second = {"scatter_indx": scatter, "precision_config": precision}
            return k.matmul_ogs(h, down, None, data, gammas=data.gate_scal, **second)

        return run

    def _ogs(self, case: Case, workload) -> list[Call]:
        def convert():
            w13, w2 = self._weights(workload)
            E = case.experts
            return self.ogs_weight(*w13, E, True), self.ogs_weight(*w2, E, False)

        w13, w2 = self._once(OGS, convert)
        return [
            self.ogs_call(z, w13, w2, self.ogs_routing(ids, weights, case.experts))
            for z, ids, weights in self._inputs(workload)
        ]

    # Marlin ---------------------------------------------------------------------------------------

    def _marlin(self, case: Case, workload) -> list[Call]:
        def convert():
            found = []
            for w in workload.shared:
                codes, scales = marlin.repacked(w.codes), marlin.reordered(w.scales)
                found.append(torch.from_dlpack(codes))
                found.append(torch.from_dlpack(scales).view(torch.float8_e8m0fnu))
            return found

        torch = self.torch
        w13, s13, w2, s2 = self._once(MARLIN, convert)
        return [self.marlin_call(case, *x, w13, s13, w2, s2) for x in self._inputs(workload)]

    def marlin_call(self, case: Case, z, ids, weights, w13, s13, w2, s2) -> Call:
        torch, ops = self.torch, self.torch.ops._moe_C
        T, k, E, L, F = case.tokens, case.chosen, case.experts, case.latent, case.inner
        rows = next((m for m in (8, 16, 32, 48) if T * k / E / m < 0.9), 64)
        padded = T * k + E * (rows - 1)
        padded = min(padded, T * k * rows) if T * k < E else padded

        def empty(*shape, dtype=torch.bfloat16):
            return torch.empty(*shape, dtype=dtype, device=self.device)

        i32 = torch.int32
        tokens, experts = empty(padded, dtype=i32), empty(-(-padded // rows), dtype=i32)
        used, lock = empty(1, dtype=i32), torch.zeros(132 * 4, dtype=i32, device=self.device)
        both, h, y = empty(T * k, 2 * F), empty(T * k, F), empty(T * k, L)

        def product(x, out, w, scales, each: int, weighted: bool, M: int, N: int, K: int):
            ops.moe_wna16_marlin_gemm(
                *(x, out, w, None, scales, None, None, None, lock, tokens, experts, used),
                *(weights, rows, each, weighted, FLOAT4, M, N, K, False, True, False, -1, -1, -1),
            )

        def run():
            ops.moe_align_block_size(ids, E, rows, tokens, experts, used, None, None)
            product(z, both, w13, s13, k, False, T, 2 * F, L)
            torch.mul(torch.nn.functional.silu(both[:, :F]), both[:, F:], out=h)
            product(h, y, w2, s2, 1, True, T * k, L, F)
            return y.view(T, k, L).sum(1)

        return run


def _shard(site: Path, shard: int, shards: int) -> None:
    """The kernels of triton_kernels for one number of tokens, or, in the last shard, Marlin's."""
    peers = Peers(site)
    if shard < len(TOKENS):
        peers.need(OGS)
        _compile_ogs(peers, TOKENS[shard])
    elif MARLIN not in peers.missing:
        _compile_marlin(peers)
    peers.torch.cuda.synchronize()


def _compile_ogs(peers: Peers, tokens: int) -> None:
    """At the real shapes: kernels depend on sizes and strides, not on what is in the arrays."""
    torch, case = peers.torch, Case(tokens)

    def weight(N: int, K: int, interleave: bool):
        bytes_ = lambda *shape: torch.zeros(shape, dtype=torch.uint8, device="cuda")  # noqa: E731
        shapes = bytes_(1, N, K // 2), bytes_(1, N, K // 32)
        return peers.ogs_weight(*shapes, case.experts, interleave)

    w13 = weight(2 * case.inner, case.latent, True)
    w2 = weight(case.latent, case.inner, False)
    ids, weights = (torch.from_numpy(x).cuda() for x in case.draws[0])
    z = torch.zeros(tokens, case.latent, device="cuda", dtype=torch.bfloat16)
    peers.ogs_call(z, w13, w2, peers.ogs_routing(ids, weights, case.experts))()


def _compile_marlin(peers: Peers) -> None:
    """The driver compiles its PTX in the first call, all of one format of weights at once."""
    torch, case = peers.torch, Case(1, experts=16)
    ids, weights = (torch.from_numpy(x).cuda() for x in case.draws[0])
    z = torch.zeros(1, case.latent, device="cuda", dtype=torch.bfloat16)
    packed = []
    for N, K in ((2 * case.inner, case.latent), (case.latent, case.inner)):
        packed.append(torch.zeros(16, K // 16, 2 * N, device="cuda", dtype=torch.int32))
        scales = torch.zeros(16, K // 32, N, device="cuda", dtype=torch.uint8)
        packed.append(scales.view(torch.float8_e8m0fnu))
    peers.marlin_call(case, z, ids, weights, *packed)()


if __name__ == "__main__":
    _shard(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
