"""What is measured: one decode step of a period, with the least bytes and operations it needs.

Layers 88 to 91 of K3's 93, its last period, where every depth mix has nine
sources. Embedding, output mix and head do not run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import jax.numpy as jnp

from k3jax.config import Config, Schedule
from k3jax.plan import costs
from k3jax.plan.memory import Step, caches, weights
from sharding import Layout

SHORT, LONG = 8192, 131_072
PARTS: tuple[str, ...] = ("experts", "shared", "latent", "router", "kda", "mla", "depth")


@lru_cache(maxsize=1)
def whole() -> Config:
    """Kimi K3."""
    return Config.preset("kimi-k3")


class PeriodConfig(Config):
    """A model whose layers are periods and nothing else, at the end of a deeper one."""

    @property
    def schedule(self) -> Schedule:
        kinds = whole().schedule.period
        return Schedule((), kinds, len(self.layers) // len(kinds), ())

    @property
    def num_blocks(self) -> int:
        return whole().num_blocks


@dataclass(frozen=True)
class Case:
    """One token for each of ``batch`` sequences of ``context`` tokens.

    Attributes:
      periods: that the scan runs over. XLA takes a loop of one apart, so two periods with half the
        experts each show what the loop of a whole model costs.
      experts: of a layer.
      toy: small widths.
    """

    batch: int
    context: int
    periods: int = 1
    experts: int = 896
    toy: bool = False
    quick: bool = False
    compare: bool = False

    @property
    def name(self) -> str:
        what = "" if self.periods == 1 else f" {self.periods} periods of {self.experts} experts"
        return f"B{self.batch} S{self.context}{what}"

    @cached_property
    def config(self) -> PeriodConfig:
        full = whole()
        layers = full.schedule.period * self.periods
        moe, kda, mla = full.moe, full.kda, full.mla
        more: dict[str, Any] = {"layers": layers, "vision": None, "vocab_size": 64}
        if self.toy:
            more["hidden_size"] = 64
            kda = replace(kda, num_heads=2, head_dim=16)
            mla = replace(
                mla,
                num_heads=2,
                q_lora_rank=32,
                kv_lora_rank=16,
                qk_nope_head_dim=8,
                qk_rope_head_dim=8,
                v_head_dim=8,
            )
            moe = replace(moe, num_experts_per_token=3, latent_size=64, intermediate_size=32)
        more |= {"moe": replace(moe, num_experts=self.experts), "kda": kda, "mla": mla}
        return PeriodConfig(**(vars(full) | more))

    @property
    def first_layer(self) -> int:
        """Its number in the whole model, which ends with these periods and one global layer."""
        return whole().num_layers - 1 - len(self.config.layers)

    @property
    def step(self) -> Step:
        return Step("decode", self.batch, 1, self.context)

    @property
    def expert_bytes(self) -> int:
        """Codes and scales of one expert of one layer."""
        held = [w.leaf for w in weights(self.config) if w.component == "experts"]
        layers = len(self.config.layers)
        return sum(_size(leaf) for leaf in held) // (layers * self.experts)

    @property
    def resident_bytes(self) -> int:
        """Parameters and caches."""
        leaves = [w.leaf for w in weights(self.config)]
        return sum(map(_size, [*leaves, *caches(self.config, self.step).values()]))

    def parts(self, hit: float | None = None) -> dict[str, costs.Work]:
        """Bytes and operations of each of `PARTS` by itself: weights once, what the caches must
        give and take, inputs and outputs of each product, as `k3jax plan` counts them.

        Args:
          hit: experts that somebody chose, of all layers; what uniform routing gives if None.
        """
        found = costs.work(self.config, Layout.load("single"), self.step)
        if hit is not None:
            uniform = self.uniform_hits * self.expert_bytes
            moved = found["experts"].bytes - uniform + hit * self.expert_bytes
            found["experts"] = replace(found["experts"], bytes=moved)
        return {name: found[name] for name in PARTS}

    @property
    def uniform_hits(self) -> float:
        """Experts of all layers that uniform routing hits."""
        missed = (1 - self.config.moe.num_experts_per_token / self.experts) ** self.batch
        return len(self.config.layers) * self.experts * (1 - missed)

    @property
    def moved_bytes(self) -> int:
        return round(sum(part.bytes for part in self.parts().values()))

    @property
    def operations(self) -> int:
        return round(sum(part.operations for part in self.parts().values()))

    def floors(self, rates, hit: float | None = None) -> dict[str, float]:
        """Part -> milliseconds that no version of it can beat."""
        byte, operation = rates["bytes_per_second"], rates["operations_per_second"]
        parts = self.parts(hit).items()
        return {n: 1e3 * max(p.bytes / byte, p.operations / operation) for n, p in parts}


def _size(leaf) -> int:
    size = jnp.dtype(leaf.dtype).itemsize
    for length in leaf.shape:
        size *= length
    return size


CASES = (
    *(Case(batch, SHORT, quick=True) for batch in (1, 16, 64)),
    *(Case(batch, LONG, quick=batch == 64) for batch in (1, 16, 64)),
    *(Case(batch, SHORT, 2, 448, quick=batch == 16) for batch in (1, 16, 64)),
)
TOYS = (Case(2, 64, 1, 12, True, True), Case(2, 64, 2, 12, True))
