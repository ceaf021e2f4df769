"""What is measured: tokens and their experts, with the least bytes and operations they need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from benchmarks.harness.ceilings import floor
from k3jax.quantization.mxfp4 import GROUP

TOKENS = (1, 16, 64, 512, 4096)
ROUTINGS = {
    "uniform": "experts are alike",
    "zipf": "the expert of rank r is chosen as if it had 1 / r of the first one's odds",
    "hot expert": "one expert is among those of every token, the others are alike",
}


@dataclass(frozen=True)
class Case:
    """``tokens`` latents through ``chosen`` of ``experts`` each, with given ids and weights.

    Attributes:
      routing: one of `ROUTINGS`.
      eight: products read MXFP8 activations (W4A8).
      latent, inner: L and F.
      calls: of the op in one program, each with a draw of its own. Experts of one call are 280 MB
        or more, so the next one finds none of its own in the L2 cache.
      compare: the portable form is timed too unless implementations are named.
    """

    tokens: int
    routing: str = "uniform"
    eight: bool = False
    experts: int = 896
    chosen: int = 16
    latent: int = 3584
    inner: int = 3072
    calls: int = 1
    quick: bool = False
    compare: bool = False

    @property
    def name(self) -> str:
        return f"T{self.tokens} {self.routing}{' W4A8' if self.eight else ''}"

    @cached_property
    def draws(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """(int32 ids [T, k], float32 weights [T, k] that add up to 1) of each call."""
        rng = np.random.default_rng(self.tokens)
        return [self._draw(rng) for _ in range(self.calls)]

    def _draw(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        T, E, k = self.tokens, self.experts, self.chosen
        odds = np.ones(E)
        if self.routing == "zipf":
            odds = 1 / (1.0 + rng.permutation(E))
        keys = np.log(odds) + rng.gumbel(size=(T, E))  # the k largest are k draws without return
        if self.routing == "hot expert":
            keys[:, E // 2] = np.inf
        ids = np.argsort(-keys, axis=1, kind="stable")[:, :k].astype(np.int32)
        weights = rng.uniform(0.2, 1, (T, k))
        return ids, (weights / weights.sum(1, keepdims=True)).astype(np.float32)

    @property
    def hit(self) -> float:
        """Experts that somebody chose, the mean of all calls."""
        return float(np.mean([len(np.unique(ids)) for ids, _ in self.draws]))

    @property
    def most(self) -> int:
        """Tokens of the busiest expert, of all calls."""
        return max(int(np.bincount(ids.reshape(-1)).max()) for ids, _ in self.draws)

    @property
    def expert_bytes(self) -> int:
        """Codes and scales of w1, w3 and w2."""
        return 3 * self.latent * self.inner * (GROUP // 2 + 1) // GROUP

    @property
    def packed_bytes(self) -> int:
        """Of all experts."""
        return self.experts * self.expert_bytes

    @property
    def moved_bytes(self) -> int:
        """Experts that are hit once each, bf16 latents in and out, ids and weights."""
        tokens = self.tokens * (2 * 2 * self.latent + 8 * self.chosen)
        return round(self.hit * self.expert_bytes) + tokens

    @property
    def operations(self) -> int:
        return 2 * 3 * self.tokens * self.chosen * self.latent * self.inner

    def floor(self, rates: Mapping[str, Any]) -> tuple[float, str]:
        """See `benchmarks.harness.ceilings.floor`."""
        rate = "fp8_operations_per_second" if self.eight else "operations_per_second"
        return floor(self.moved_bytes, self.operations, rates["bytes_per_second"], rates[rate])


def _cases():
    """Those that were asked for first, so that a budget of time cuts the others."""
    calls = {1: 8, 16: 2}
    for tokens in TOKENS:
        yield Case(tokens, calls=calls.get(tokens, 1), quick=True, compare=tokens in (1, 64))
    yield Case(64, eight=True, quick=True)
    for routing in ("zipf", "hot expert"):
        for tokens in TOKENS:
            yield Case(tokens, routing, calls=calls.get(tokens, 1))
    for tokens in TOKENS:
        if tokens != 64:
            yield Case(tokens, eight=True, calls=calls.get(tokens, 1))


CASES = tuple(_cases())
TOYS = tuple(
    replace(case, experts=12, chosen=3, latent=64, inner=32)
    for case in (
        Case(1, calls=2, quick=True, compare=True),
        Case(5, "zipf"),
        Case(5, "hot expert"),
        Case(5, eight=True, quick=True),
    )
)
