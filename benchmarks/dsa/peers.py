"""What others run for the same work on the same GPU: DeepGEMM's indexer, torch.topk and FlashMLA.

DeepGEMM scores fp8 keys and writes float32 scores of every pair; torch.topk reads them again. A
side that scores, selects and attends runs them one after the other in one call. FlashMLA knows 64
or 128 heads, so 96 are padded to 128 beforehand. What is made once a model step or once a token
(codes, factors, tables, schedules) is made before the clock starts.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.dsa.cases import Case
from benchmarks.dsa.ours import Workload, scale
from benchmarks.harness import peers as base
from benchmarks.harness.peers import TorchSide
from benchmarks.harness.timing import reason
from k3jax.quantization.fp8 import LARGEST

FLASHMLA, DEEPGEMM = "_flashmla_C.abi3.so", "deep_gemm"
PAGE = 64  # rows of a page, for both
HEADS = 128
GRAPH_TOKENS = 128  # more queries outlast what the host needs to launch them
SCORES, TOPK = "DeepGEMM + topk", "torch.topk"
SPARSE, SPARSE_FP8, DENSE = "FlashMLA sparse", "FlashMLA sparse fp8", "FlashMLA dense"
WHOLE = f"{SCORES} + {SPARSE}"

Call = Callable[[], Any]


def unpack(folder: str) -> Path:
    """Where both lie ready for import.

    Raises:
      InputError: a folder without them.
    """
    return base.unpack(folder, (FLASHMLA, DEEPGEMM), wheels=False)


class Peers(base.Peers):
    """DeepGEMM and FlashMLA, loaded; sides of those that are not fail with the reason.

    Attributes:
      without: an expression; peers whose name has it are left out.
    """

    def __init__(self, site: Path, without: str | None = None):
        super().__init__(site)
        self.without = without
        torch = self.torch
        self.load("FlashMLA", lambda: torch.ops.load_library(str(site / FLASHMLA)))
        self.deep_gemm: Any = self.load("DeepGEMM", lambda: importlib.import_module(DEEPGEMM))
        self.processors = torch.cuda.get_device_properties(0).multi_processor_count

    def versions(self) -> dict[str, str]:
        found = super().versions()
        return found | {"deep_gemm": getattr(self.deep_gemm, "__version__", "absent")}

    def warm(self) -> str:
        """Compiles DeepGEMM's kernels for the shapes of the rows; a line that says how it went."""
        said = []
        case = Case("select", 1, 4096)
        for tokens in (1, 16, 128):
            try:
                draw = lambda *shape: self.torch.randn(*shape, device=self.device)  # noqa: E731
                codes, factors = self._codes(draw(case.keys, case.index_dim))
                q, w = (
                    draw(tokens, case.index_heads, case.index_dim),
                    draw(tokens, case.index_heads),
                )
                positions = self._positions(Case("select", tokens, case.keys))
                form = self._paged if tokens <= 16 else self._ragged
                form([(codes, factors)], [(*self._query(q, w), positions)])[0]()
                self.torch.cuda.synchronize()
            except Exception as error:
                said.append(f"{tokens} queries: {reason(error)}")
        return "; ".join(said) or "compiled"

    def sides(self, case: Case, workload: Workload) -> list[TorchSide]:
        """The peers of a case on the arrays of its workload."""
        made = {
            "select": {SCORES: self._select, TOPK: self._topk},
            "attend": {SPARSE: self._sparse, SPARSE_FP8: self._sparse_fp8},
            "both": {WHOLE: self._whole},
            "dense": {DENSE: self._dense},
            "layer": {},
        }[case.kind]
        if case.tokens > GRAPH_TOKENS:
            made.pop(SPARSE_FP8, None)
            made.pop(DENSE, None)
        if self.without is not None:
            made = {n: make for n, make in made.items() if not re.search(self.without, n)}
        graph = case.tokens <= GRAPH_TOKENS
        return [
            self.side(name, partial(make, case, workload), graph, part=name == TOPK)
            for name, make in made.items()
        ]

    # The indexer ----------------------------------------------------------------------------------

    def _codes(self, wide):
        """float8_e4m3fn codes, and float32 factors that take the largest of a row to 448."""
        torch = self.torch
        wide = wide.float()
        factors = wide.abs().amax(-1).clamp(min=1e-10) / LARGEST
        return (wide / factors[..., None]).to(torch.float8_e4m3fn), factors.contiguous()

    def _index(self, index: dict[str, Any]):
        """Codes [S, K] and factors [S] of a cache of ours."""
        torch = self.torch
        if "keys" in index:
            return self._codes(torch.from_dlpack(index["keys"])[0])
        codes = torch.from_dlpack(index["codes"].astype("bfloat16"))[0]  # exact, and back
        factors = torch.from_dlpack(index["factors"]).reshape(-1)
        return codes.to(torch.float8_e4m3fn), factors

    def _query(self, q_THK, w_TH):
        """Codes of queries, and head weights with their factors in them."""
        codes, factors = self._codes(q_THK)
        return codes, (w_TH.float() * factors).contiguous()

    def _positions(self, case: Case):
        torch = self.torch
        at = torch.arange(case.keys - case.tokens, case.keys, device=self.device)
        return at.to(torch.int32)

    def _scores(self, case: Case, workload: Workload) -> list[Call]:
        """DeepGEMM's float32 scores [T, S]: the paged kernel for a few queries, else the ragged."""
        caches = [self._index(cache["index"]) for cache in workload.shared]
        inputs, positions = [], self._positions(case)
        for arrays in workload.inputs:
            x = self.tensors({name: arrays[name] for name in ("q_index", "w")})
            inputs.append((*self._query(x["q_index"][0], x["w"][0]), positions))
        return (self._paged if case.tokens <= 16 else self._ragged)(caches, inputs)

    def _paged(self, caches, inputs) -> list[Call]:
        """Every query is a batch row of its own that has the same pages."""
        self.need("DeepGEMM")
        torch, deep_gemm = self.torch, self.deep_gemm
        packed = []
        for codes, factors in caches:
            pages = codes.shape[0] // PAGE
            parts = [x.view(torch.uint8).reshape(pages, -1) for x in (codes, factors)]
            packed.append(torch.cat(parts, 1).view(pages, PAGE, 1, -1))
        tokens, keys = inputs[0][0].shape[0], caches[0][0].shape[0]
        lengths = (inputs[0][2] + 1).view(tokens, 1).contiguous()
        pages = torch.arange(keys // PAGE, dtype=torch.int32, device=self.device)
        table = pages.repeat(tokens, 1).contiguous()
        plan = deep_gemm.get_paged_mqa_logits_metadata(lengths, PAGE, self.processors)

        def one(i: int) -> Call:
            q, w, _ = inputs[i]
            q, cache = q[:, None].contiguous(), packed[i % len(packed)]
            return lambda: deep_gemm.fp8_fp4_paged_mqa_logits(
                (q, None), cache, w, lengths, table, plan, keys
            )

        return [one(i) for i in range(len(inputs))]

    def _ragged(self, caches, inputs) -> list[Call]:
        self.need("DeepGEMM")
        torch, deep_gemm = self.torch, self.deep_gemm
        keys = caches[0][0].shape[0]

        def one(i: int) -> Call:
            q, w, positions = inputs[i]
            first, end = torch.zeros_like(positions), positions + 1
            cache = caches[i % len(caches)]
            return lambda: deep_gemm.fp8_fp4_mqa_logits((q, None), cache, w, first, end, keys)

        return [one(i) for i in range(len(inputs))]

    def _top(self, scores, case: Case):
        """int64 [T, k] in any order. Columns behind the last key are padding."""
        if scores.shape[-1] != case.keys:
            scores = scores[:, : case.keys]
        return self.torch.topk(scores, case.topk, dim=-1, sorted=False)[1]

    def _select(self, case: Case, workload: Workload) -> list[Call]:
        scores = self._scores(case, workload)
        return [lambda one=one: self._top(one(), case) for one in scores]

    def _topk(self, case: Case, workload: Workload) -> list[Call]:
        """Of random scores that lie there already: a part of what ours does."""
        drawn = self.torch.randn(case.tokens, case.keys, device=self.device)
        return [lambda: self._top(drawn, case)] * min(8, workload.calls)

    # Attention ------------------------------------------------------------------------------------

    def _rows(self, case: Case, workload: Workload) -> list[Any]:
        """Caches [S, C]; ours, not copies."""
        return [self.torch.from_dlpack(cache["latent"])[0] for cache in workload.shared]

    def _padded(self, case: Case, workload: Workload) -> list[Any]:
        pad = self.torch.nn.functional.pad
        queries = [self.torch.from_dlpack(x["q"])[0] for x in workload.inputs]
        return [pad(q, (0, 0, 0, max(0, HEADS - case.heads))).contiguous() for q in queries]

    def _selected(self, case: Case, workload: Workload) -> list[Any]:
        taken = [self.torch.from_dlpack(x["selected"]) for x in workload.inputs]
        return [at.view(case.tokens, 1, case.topk) for at in taken]

    def _prefill(self, case: Case, q, rows, at):
        """Weighted latents [T, H, C] bf16."""
        op = self.torch.ops._flashmla_C.sparse_prefill_fwd
        cache = rows.view(case.keys, 1, case.width)
        found = op(q, cache, at, scale(case), case.rows[0], None, None, None)
        return found[0][:, : case.heads]

    def _sparse(self, case: Case, workload: Workload) -> list[Call]:
        self.need("FlashMLA")
        rows, q = self._rows(case, workload), self._padded(case, workload)
        at = self._selected(case, workload)

        def one(i: int) -> Call:
            return lambda: self._prefill(case, q[i], rows[i % len(rows)], at[i])

        return [one(i) for i in range(len(q))]

    def _sparse_fp8(self, case: Case, workload: Workload) -> list[Call]:
        """The decode kernel: latents in fp8 with a factor for 128 columns, the rest in bf16."""
        self.need("FlashMLA")
        torch, op = self.torch, self.torch.ops._flashmla_C.sparse_decode_fwd
        latent, tokens = case.rows[0], case.tokens
        packed = []
        for rows in self._rows(case, workload):
            codes, factors = self._codes(rows[:, :latent].reshape(case.keys, -1, 128))
            parts = (codes, factors, rows[:, latent:].contiguous())
            parts = [x.view(torch.uint8).reshape(case.keys, -1) for x in parts]
            joined = torch.cat(parts, 1).view(case.keys // PAGE, PAGE, 1, -1)
            packed.append(joined.view(torch.float8_e4m3fn))
        q, at = self._padded(case, workload), self._selected(case, workload)
        plan: list[Any] = [None, None]  # made by the first call for all of them

        def run(i: int):
            query, cache = q[i].view(tokens, 1, HEADS, case.width), packed[i % len(packed)]
            o, _, plan[0], plan[1] = op(
                *(query, cache, at[i], None, None, plan[0], plan[1], None, None, None),
                *(latent, scale(case), None, False),
            )
            return o.view(tokens, HEADS, latent)[:, : case.heads]

        return [lambda i=i: run(i) for i in range(len(q))]

    def _dense(self, case: Case, workload: Workload) -> list[Call]:
        """The decode kernel, with as many heads as there are."""
        self.need("FlashMLA")
        torch, op = self.torch, self.torch.ops._flashmla_C.dense_decode_fwd
        rows = [r.view(case.keys // PAGE, PAGE, 1, -1) for r in self._rows(case, workload)]
        q = [torch.from_dlpack(x["q"]) for x in workload.inputs]
        lengths = torch.full((1,), case.keys, dtype=torch.int32, device=self.device)
        pages = case.keys // PAGE
        table = torch.arange(pages, dtype=torch.int32, device=self.device).view(1, pages)
        plan: list[Any] = [None, None]

        def run(i: int):
            cache, width = rows[i % len(rows)], case.rows[0]
            o, _, plan[0], plan[1] = op(
                *(q[i], cache, width, lengths, table, scale(case), True, plan[0], plan[1], None)
            )
            return o[0]

        return [lambda i=i: run(i) for i in range(len(q))]

    def _whole(self, case: Case, workload: Workload) -> list[Call]:
        self.need("FlashMLA")
        scores = self._scores(case, workload)
        rows, q = self._rows(case, workload), self._padded(case, workload)

        def run(i: int):
            at = self._top(scores[i](), case).to(self.torch.int32)
            at = at.view(case.tokens, 1, case.topk)
            return self._prefill(case, q[i], rows[i % len(rows)], at)

        return [lambda i=i: run(i) for i in range(len(q))]
