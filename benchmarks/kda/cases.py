"""What is measured: shapes, and the least bytes and operations that each of them needs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.harness.ceilings import floor

LOWER_BOUND = -5.0
EPS = 1e-5
L2_BYTES = 60 * 2**20  # H200
TILE = 16  # rows; the smallest chunk a matrix unit works on
PACKED = (1300, 547, 2048, 963, 271, 3063)


@dataclass(frozen=True)
class Case:
    """One shape.

    Attributes:
      kind: "prefill" is `gated_kda`, "decode" is `kda_decode`, "layer" is a decode step of
        `KimiDeltaAttention` with its projections.
      lengths: of sequences of one call, each with an initial state; else all have ``tokens``.
      dim: K = V.
      compare: the portable form is timed too unless implementations are named.
      near_keys: keys nearly alike and slow decays, the hardest triangular systems.
      triton: FLA's chunk kernels are among the peers. They autotune for minutes at every new head
        count, so few cases have them.
    """

    kind: str
    batch: int
    tokens: int = 1
    heads: int = 96
    lengths: tuple[int, ...] | None = None
    dim: int = 128
    conv: int = 4
    hidden: int = 7168
    quick: bool = False
    compare: bool = False
    near_keys: bool = False
    triton: bool = False

    @property
    def name(self) -> str:
        if self.lengths is not None:
            return f"prefill {len(self.lengths)} lengths, {sum(self.lengths)} tokens H{self.heads}"
        tokens = f" T{self.tokens}" if self.kind == "prefill" else ""
        kind = "layer decode" if self.kind == "layer" else self.kind
        keys = " near keys" if self.near_keys else ""
        return f"{kind} B{self.batch}{tokens} H{self.heads}{keys}"

    @property
    def width(self) -> int:
        return self.heads * self.dim

    @property
    def state_bytes(self) -> int:
        return 4 * self.batch * self.heads * self.dim**2

    @property
    def real_tokens(self) -> int:
        return self.batch * self.tokens if self.lengths is None else sum(self.lengths)

    @property
    def moved_bytes(self) -> int:
        """Every input read once and every output written once; nothing between them."""
        if self.kind == "prefill":
            return _prefill_bytes(self)
        return _decode_bytes(self) if self.kind == "decode" else _layer_bytes(self)

    @property
    def operations(self) -> int:
        """Multiplications and additions of the arithmetic with the least of them."""
        if self.kind == "prefill":
            return _prefill_operations(self)
        step = 7 * self.batch * self.heads * self.dim**2  # decay 1, S k 2, + u k^T 2, S q 2
        if self.kind == "decode":
            return step
        return step + 2 * self.batch * _layer_weights(self)[0]

    def floor(self, bytes_per_second: float, operations_per_second: float) -> tuple[float, str]:
        """See `benchmarks.harness.ceilings.floor`."""
        return floor(self.moved_bytes, self.operations, bytes_per_second, operations_per_second)


def _prefill_bytes(case: Case) -> int:
    """bf16 q, k, v, z, o and b of real tokens; float32 state out, and in where there is one."""
    token = case.heads * (5 * case.dim + 1) * 2
    states = 1 if case.lengths is None else 2
    return case.real_tokens * token + states * case.state_bytes


def _prefill_operations(case: Case) -> int:
    """Chunks of 16 rows: products of keys and queries with keys, with values, and with the state.

    Per token and head: 2 C (3 K + 2 V) within the chunk and 6 K V across chunks. Larger chunks
    need more, the recurrence itself less but no matrix unit can do it.
    """
    K = V = case.dim
    per_token = 2 * TILE * (3 * K + 2 * V) + 6 * K * V
    return case.real_tokens * case.heads * per_token


def _decode_bytes(case: Case) -> int:
    """State and tails in and out, bf16 q, k, v, z, gate, o and b, and the float32 parameters."""
    P = case.width
    activations = 2 * case.batch * (6 * P + case.heads)
    tails = 2 * 2 * 3 * case.batch * (case.conv - 1) * P
    parameters = 4 * (3 * P * case.conv + P + case.heads + case.dim)
    return 2 * case.state_bytes + tails + activations + parameters


def _layer_weights(case: Case) -> tuple[int, int]:
    """(bf16 weights: q, k, v, g, o, f_a, f_b, b;  float32 ones: convolutions, dt_bias, A_log,
    o_norm), as numbers of elements."""
    P, D, K, H = case.width, case.hidden, case.dim, case.heads
    return 5 * P * D + K * D + P * K + H * D, 3 * P * case.conv + P + H + K


def _layer_bytes(case: Case) -> int:
    """Weights once, state and tails in and out, bf16 x and y. What lies between the projections
    and the mixer fits in the L2 cache and is not counted."""
    matrices, small = _layer_weights(case)
    tails = 2 * 2 * 3 * case.batch * (case.conv - 1) * case.width
    ends = 2 * 2 * case.batch * case.hidden
    return 2 * matrices + 4 * small + 2 * case.state_bytes + tails + ends


def rotation(case: Case, most_sets: int = 32, most_calls: int = 128) -> tuple[int, int]:
    """(sets of inputs and states, calls of the op) in one program of a decode row.

    Together the states are three times the L2 cache, so that each call finds its own cold, and the
    calls take half a millisecond, so that the launch of the program hides behind the last one.
    """
    sets = max(1, min(most_sets, -(-3 * L2_BYTES // case.state_bytes)))
    wanted = 0.5e-3 / (case.moved_bytes / 4.28e12)
    calls = max(1, min(most_calls, round(wanted)))
    return sets, sets * max(1, calls // sets)


def _prefill(tokens, heads=96, batch=1, **more):
    return Case("prefill", batch, tokens, heads, **more)


CASES = (
    _prefill(4096, compare=True, triton=True),
    _prefill(8192, quick=True, compare=True, triton=True),
    _prefill(16384),
    _prefill(65536, compare=True, triton=True),
    _prefill(8192, batch=8, triton=True),
    Case("prefill", len(PACKED), max(PACKED), lengths=PACKED, quick=True, triton=True),
    _prefill(65536, heads=12),
    Case("decode", 1, quick=True),
    Case("decode", 16),
    Case("decode", 64, quick=True, compare=True),
    Case("decode", 256, quick=True, compare=True),
    Case("decode", 512),
    Case("decode", 64, heads=12),
    Case("layer", 64, quick=True),
    _prefill(1_048_576, heads=12),
    # Past 2^31 elements a kernel with 32-bit offsets may fault, and take the process with it.
    _prefill(262_144),
    _prefill(1_048_576),
)
TOYS = tuple(
    replace(case, heads=2, dim=16, hidden=64)
    for case in (
        _prefill(48, quick=True, compare=True),
        _prefill(32, batch=2),
        Case("prefill", 3, 17, lengths=(9, 17, 1), quick=True),
        Case("decode", 3, quick=True, compare=True),
        Case("layer", 2, quick=True),
    )
)
