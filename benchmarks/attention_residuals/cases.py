"""What is measured: sources of a depth mix, with the least bytes and operations they need."""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.harness.ceilings import H200, floor

L2_BYTES = 60 * 2**20  # H200
KINDS = {
    "read": "one mix of all sources and the sublayer's norm",
    "direct": "the reads of a block, each of them a mix of all sources",
    "two-phase": "the same reads: the bank is scored once for all, the running sum merged in",
}


@dataclass(frozen=True)
class Case:
    """``batch`` sequences of ``tokens`` tokens, each with a full bank and a running sum.

    Attributes:
      kind: one of `KINDS`.
      bank: rows of the bank; with the running sum there is one source more.
      reads: of a block: two a layer.
      compare: the portable form is timed too unless implementations are named.
    """

    kind: str
    batch: int
    tokens: int
    bank: int = 8
    hidden: int = 7168
    reads: int = 24
    quick: bool = False
    compare: bool = False

    @property
    def name(self) -> str:
        return f"{self.kind} B{self.batch} T{self.tokens}"

    @property
    def rows(self) -> int:
        return self.batch * self.tokens

    @property
    def times(self) -> int:
        """Reads in one call."""
        return 1 if self.kind == "read" else self.reads

    @property
    def moved_bytes(self) -> int:
        """The bank once, a running sum and a result for each read, three bf16 vectors for each:
        what no form of the same reads can do without."""
        return 2 * self.hidden * (self.bank * self.rows + self.times * (2 * self.rows + 3))

    @property
    def operations(self) -> int:
        """A square sum, a product with the query and a weighted sum for each source; the norm."""
        return self.times * self.rows * self.hidden * (6 * (self.bank + 1) + 4)

    def floor(self, bytes_per_second: float, operations_per_second: float) -> tuple[float, str]:
        """See `benchmarks.harness.ceilings.floor`."""
        return floor(self.moved_bytes, self.operations, bytes_per_second, operations_per_second)


def rotation(case: Case, most_sets: int, most_calls: int) -> tuple[int, int]:
    """(inputs that take turns, calls) in one program: the inputs are three times the L2 cache where
    ``most_sets`` allow it, the calls half a millisecond or more.

    One token's sources are 0.13 MB: they come from the cache here. A block is 24 reads already, so
    there are two.
    """
    if case.kind != "read":
        return 2, 2
    read = 2 * case.hidden * case.rows * (case.bank + 1)
    sets = max(1, min(most_sets, -(-3 * L2_BYTES // read)))
    wanted = 0.5 / case.floor(H200["bytes_per_second"], H200["operations_per_second"])[0]
    calls = max(1, min(most_calls, round(wanted)))
    return sets, sets * -(-calls // sets)


CASES = (
    Case("read", 1, 4096, quick=True, compare=True),
    Case("read", 64, 1, quick=True, compare=True),
    Case("read", 1, 1, quick=True, compare=True),
    Case("direct", 64, 1, quick=True),
    Case("two-phase", 64, 1, quick=True),
)
TOYS = tuple(
    replace(case, bank=3, hidden=64, reads=4, quick=True)
    for case in (
        Case("read", 2, 3, compare=True),
        Case("direct", 2, 1),
        Case("two-phase", 2, 1),
    )
)
