"""What is measured: shapes, and the least bytes and operations that each of them needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.harness.ceilings import H200

L2_BYTES = 60 * 2**20  # H200
LONG, SHORT = 1_048_576, 131_072
KINDS = {
    "select": "indexer and selection",
    "attend": "attention over a selection",
    "both": "the two, one after the other",
    "dense": "attention to every earlier row",
    "layer": "a global layer with its projections",
}


@dataclass(frozen=True)
class Case:
    """One shape: ``tokens`` queries of one sequence, the last of them at the last of ``keys`` rows.

    Attributes:
      kind: one of `KINDS`.
      fp8: index keys are float8_e4m3fn with a factor a token, else bf16.
      rows: of the attended cache: width of the latent and of the part all heads share.
      inner: of a layer: width of the query latent, query and value channels of a head.
      compare: the portable form is timed too unless implementations are named.
    """

    kind: str
    tokens: int
    keys: int
    fp8: bool = False
    topk: int = 2048
    heads: int = 96
    rows: tuple[int, int] = (512, 64)
    index_heads: int = 32
    index_dim: int = 128
    hidden: int = 7168
    inner: tuple[int, int, int] = (1536, 128, 128)
    quick: bool = False
    compare: bool = False

    @property
    def name(self) -> str:
        fp8 = " fp8" if self.fp8 else ""
        return f"{self.kind}{fp8} T{self.tokens} S{self.keys}"

    @property
    def width(self) -> int:
        """Columns of a cache row."""
        return sum(self.rows)

    @property
    def selects(self) -> bool:
        return self.kind in ("select", "both", "layer")

    @property
    def row_bytes(self) -> int:
        """A row of the attended cache."""
        return 2 * self.width

    @property
    def key_bytes(self) -> int:
        """An index key: bf16, or codes and a float32 factor."""
        return self.index_dim + 4 if self.fp8 else 2 * self.index_dim

    @property
    def pairs(self) -> int:
        """Queries with the rows each may see: the last sees all, the one before one less."""
        return self.tokens * self.keys - self.tokens * (self.tokens - 1) // 2

    @property
    def moved_bytes(self) -> int:
        """Every input read once and every output written once; nothing between them."""
        return {
            "select": select_bytes,
            "attend": attend_bytes,
            "both": both_bytes,
            "dense": dense_bytes,
            "layer": layer_bytes,
        }[self.kind](self)

    @property
    def operations_by_rate(self) -> tuple[int, int]:
        """(multiplications and additions of matrix products in bf16, in fp8)."""
        bf16 = 0
        if self.kind in ("attend", "both", "layer"):
            bf16 += attend_operations(self)
        if self.kind == "dense":
            bf16 += dense_operations(self)
        if self.kind == "layer":
            bf16 += 2 * self.tokens * layer_weights(self)[0]
        scoring = score_operations(self) if self.selects else 0
        return (bf16, scoring) if self.fp8 else (bf16 + scoring, 0)

    @property
    def operations(self) -> int:
        return sum(self.operations_by_rate)

    def floor(self, rates: Mapping[str, Any]) -> tuple[float, str]:
        """(milliseconds that no version can beat, "bytes" or "operations": which says so)."""
        bf16, fp8 = self.operations_by_rate
        moving = self.moved_bytes / rates["bytes_per_second"]
        computing = bf16 / rates["operations_per_second"]
        if fp8:
            computing += fp8 / rates["fp8_operations_per_second"]
        return max((1e3 * moving, "bytes"), (1e3 * computing, "operations"))


def _query_bytes(case: Case) -> tuple[int, int]:
    """(index queries, weights and positions of a selection; absorbed queries of attention).

    bf16 queries also where keys are fp8: their codes are made on the way."""
    index = case.tokens * (case.index_heads * (2 * case.index_dim + 4) + 4)
    return index, case.tokens * case.heads * case.row_bytes


def _output_bytes(case: Case) -> int:
    """float32 weighted latents and log-sum-exp of every query and head."""
    return 4 * case.tokens * case.heads * (case.rows[0] + 1)


def select_bytes(case: Case) -> int:
    """Index keys once for all queries, what the queries bring, and int32 positions out."""
    queries, _ = _query_bytes(case)
    return case.keys * case.key_bytes + queries + 4 * case.tokens * case.topk


def score_operations(case: Case) -> int:
    """Dot products of every head with every key that a query may see. Not counted: the ReLU, the
    sum over heads (1/128 of it) and the selection itself."""
    return 2 * case.pairs * case.index_heads * case.index_dim


def attend_bytes(case: Case) -> int:
    """Selected rows once each, whoever selected them: at most all rows of the cache; positions,
    absorbed queries, and the outputs."""
    _, queries = _query_bytes(case)
    rows = min(case.tokens * case.topk, case.keys)
    return rows * case.row_bytes + 4 * case.tokens * case.topk + queries + _output_bytes(case)


def attend_operations(case: Case) -> int:
    """Scores over all columns and weighted latents, for ``topk`` rows a query."""
    return 2 * case.tokens * case.heads * case.topk * (case.width + case.rows[0])


def both_bytes(case: Case) -> int:
    """The positions stay between the two and are not counted."""
    between = 2 * 4 * case.tokens * case.topk
    return select_bytes(case) + attend_bytes(case) - between


def dense_bytes(case: Case) -> int:
    """All rows once for all queries, queries with their positions, and the outputs."""
    _, queries = _query_bytes(case)
    return case.keys * case.row_bytes + queries + 4 * case.tokens + _output_bytes(case)


def dense_operations(case: Case) -> int:
    """As `attend_operations`, for every row up to a query's position."""
    return 2 * case.pairs * case.heads * (case.width + case.rows[0])


def layer_weights(case: Case) -> tuple[int, int]:
    """(bf16 weights: q_a, q_b, kv_a, kv_b, gate, out, the indexer's q, k and head weights, three
    norms' scales; float32 ones: scale and bias of the index keys' norm), as numbers of elements."""
    D, H, (C, R) = case.hidden, case.heads, case.rows
    Q, N, V = case.inner
    index = case.index_heads * case.index_dim * Q + (case.index_dim + case.index_heads) * D
    attention = Q * D + H * (N + R) * Q + (C + R) * D + H * (N + V) * C + 2 * H * V * D
    return attention + index + Q + C, 2 * case.index_dim


def layer_bytes(case: Case) -> int:
    """Weights once, index keys once, selected rows once, a row and a key written per token, bf16
    input and output. What lies between the projections is not counted."""
    matrices, small = layer_weights(case)
    rows = min(case.tokens * case.topk, case.keys) * case.row_bytes
    written = case.tokens * (case.row_bytes + case.key_bytes)
    ends = 2 * 2 * case.tokens * case.hidden
    return 2 * matrices + 4 * small + case.keys * case.key_bytes + rows + written + ends


def rotation(case: Case, most_sets: int = 24, most_calls: int = 96) -> tuple[int, int]:
    """(caches that take turns, calls of the op) in one program.

    Calls find the L2 cache cold: caches that are read whole are together three times as large, and
    selections are pieces of permutations, so that no row returns before three times as much was
    read. The calls take half a millisecond or more, so that the launch of the program hides behind
    the last one. From 1,024 queries on reading a cache is less than a hundredth of the work.
    """
    if case.tokens >= 1024:
        return 1, 1
    sets, wanted = 1, 0.5 / case.floor(H200)[0]
    if case.kind == "attend":
        wanted = max(wanted, 3 * L2_BYTES / (case.tokens * case.topk * case.row_bytes))
    if case.kind != "layer":  # its weights are 0.5 GB
        one = case.keys * (case.key_bytes if case.selects else case.row_bytes)
        sets = max(1, min(most_sets, -(-3 * L2_BYTES // one)))
    calls = max(1, min(most_calls, round(wanted)))
    return sets, sets * -(-calls // sets)


def _cases():
    """Those that were asked for first, so that a budget of time cuts the others."""
    # (kind, keys, fp8, queries): a row each
    quick = {
        ("select", LONG, False, 1),
        ("select", LONG, True, 1),
        ("select", LONG, False, 128),
        ("select", LONG, True, 128),
        ("select", LONG, False, 1024),
        ("select", LONG, True, 1024),
        ("attend", LONG, False, 128),
        ("both", LONG, False, 1),
        ("dense", LONG, False, 1),
        ("layer", LONG, False, 1),
        ("layer", SHORT, False, 1),
    }
    every = [
        (kind, keys, fp8, tokens)
        for keys in (LONG, SHORT)
        for kind, forms in (("select", (False, True)), ("attend", (False,)), ("both", (False,)))
        for fp8 in forms
        for tokens in (1, 16, 128, 1024, 4096)
    ]
    every += [("both", LONG, True, 1), ("both", SHORT, True, 1)]
    every += [("layer", keys, False, tokens) for keys in (LONG, SHORT) for tokens in (1, 16)]
    every += [("layer", LONG, False, 4096), ("layer", LONG, True, 1)]
    every += [("dense", keys, False, tokens) for keys in (LONG, SHORT) for tokens in (1, 16)]
    every += [("dense", SHORT, False, 128), ("dense", 4096, False, 4096)]
    compared = {("select", SHORT, False, 1), ("attend", SHORT, False, 128)}
    for row in sorted(every, key=lambda row: row not in quick):  # stable
        kind, keys, fp8, tokens = row
        yield Case(kind, tokens, keys, fp8, quick=row in quick, compare=row in compared)


CASES = tuple(_cases())
TOYS = tuple(
    replace(
        case,
        topk=16,
        heads=2,
        rows=(16, 8),
        index_heads=2,
        index_dim=8,
        hidden=32,
        inner=(24, 8, 8),
    )
    for case in (
        Case("select", 3, 64, quick=True, compare=True),
        Case("select", 3, 64, fp8=True),
        Case("attend", 3, 64, quick=True),
        Case("both", 3, 64),
        Case("dense", 3, 64, quick=True),
        Case("layer", 1, 64, quick=True),
        Case("layer", 1, 64, fp8=True),
    )
)
