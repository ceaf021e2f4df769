"""A model of one table, with the interface of ``k3jax.model.Model``, for tests of what drives one.

The next token depends on the sum of all tokens so far, so a token lost, doubled or out of place in
the cache changes everything after it.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MarkovCache:
    sum_B: jax.Array
    lengths_B: jax.Array
    rows_S: jax.Array  # only its length counts, as a real cache's shape does

    @property
    def max_length(self) -> int:
        return self.rows_S.shape[0]


@jax.jit
def _prefill(table_VV, tokens_BT, lengths_B, cache):
    valid_BT = jnp.arange(tokens_BT.shape[1])[None] < lengths_B[:, None]
    sum_B = cache.sum_B + jnp.sum(jnp.where(valid_BT, tokens_BT, 0), 1)
    logits_BV = table_VV[sum_B % table_VV.shape[0]]
    return logits_BV, MarkovCache(sum_B, cache.lengths_B + lengths_B, cache.rows_S)


class MarkovModel:
    def __init__(self, table_VV, max_position_embeddings=512, eos_token_id=3, dsa=None):
        self.table_VV = jnp.asarray(table_VV, jnp.float32)
        self.config = SimpleNamespace(
            vocab_size=len(table_VV),
            max_position_embeddings=max_position_embeddings,
            eos_token_id=eos_token_id,
            dsa=dsa,
            moe=SimpleNamespace(num_experts=2, num_experts_per_token=1),
        )
        self.module = None
        self.calls: list[tuple[str, int]] = []

    def init_cache(self, batch, max_length):
        assert 1 <= max_length <= self.config.max_position_embeddings
        max_length = 1 << max(7, (max_length - 1).bit_length())
        zero_B = jnp.asarray(np.zeros(batch, np.int32))
        return MarkovCache(zero_B, zero_B, jnp.asarray(np.zeros(max_length, np.float32)))

    def prefill(self, tokens_BT, cache, lengths_B=None):
        tokens_BT = np.asarray(tokens_BT, np.int32)
        batch, length = tokens_BT.shape
        self.calls.append(("prefill", length))
        bucket = 1 << max(3, (length - 1).bit_length())
        padded_BT = np.pad(tokens_BT, ((0, 0), (0, bucket - length)), constant_values=7)
        lengths_B = np.full(batch, length, np.int32) if lengths_B is None else lengths_B
        return _prefill(self.table_VV, padded_BT, lengths_B, cache)

    def decode(self, tokens_B, cache):
        self.calls.append(("decode", 1))
        tokens_B1 = jnp.asarray(tokens_B, jnp.int32)[:, None]
        return _prefill(self.table_VV, tokens_B1, np.ones(tokens_B.shape, np.int32), cache)

    def forward(self, tokens_BT, collect=()):
        sum_BT = np.cumsum(np.asarray(tokens_BT), 1) % self.config.vocab_size
        logits_BTV = self.table_VV[sum_BT]
        batch, length = sum_BT.shape
        some = jnp.asarray(
            np.arange(3 * batch * length * 2).reshape(3, batch, length, 2), jnp.int32
        )
        parts = {
            "hidden": {"hidden": some.astype(jnp.bfloat16)},
            "routing": {
                "expert_ids": some,
                "expert_weights": some.astype(jnp.float32),
                "router_scores": some.astype(jnp.float32),
            },
            "index": {"selected": some},
        }
        inside: dict[str, jax.Array] = {}
        for name in collect:
            inside |= parts[name]
        return logits_BTV, inside

    def greedy(self, ids, count):
        """The oracle: what a greedy generation writes, stop ids not considered."""
        table_VV, total, out = np.asarray(self.table_VV), sum(ids), []
        for _ in range(count):
            out.append(int(table_VV[total % len(table_VV)].argmax()))
            total += out[-1]
        return out
