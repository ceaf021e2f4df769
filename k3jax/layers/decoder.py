"""One decoder layer: two depth mixes, attention and feed-forward of either kind."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from k3jax.config import Config, LayerSpec
from k3jax.layers.feed_forward import FeedForward, LatentMoE
from k3jax.layers.global_attention import GlobalAttention
from k3jax.layers.kda import KimiDeltaAttention
from k3jax.layers.params import Maker
from k3jax.layers.tokens import Tokens
from k3jax.ops import attention_residuals


class DepthRead(nnx.Module):
    """The norm weight and the fixed query of one Attention Residuals read."""

    def __init__(self, config: Config, make: Maker):
        self.config = config
        self.norm = make((config.hidden_size,), ("embed",), "ones")
        # Zero queries mix evenly at the start of training, as the Attention Residuals paper does.
        self.query = make((config.hidden_size,), ("embed",), "zeros")

    def __call__(self, depth: Depth, out_norm: nnx.Variable) -> jax.Array:
        """The mix through the norm of the sublayer that reads it, [B, T, D]."""
        c = self.config
        return attention_residuals.read(
            depth.bank_NBTD,
            depth.partial_BTD,
            self.norm[...],
            self.query[...],
            out_norm[...],
            depth.count,
            eps=c.rms_norm_eps,
            out_eps=c.rms_norm_eps,
            weight_after_cast=c.norm_weight_after_cast,
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Depth:
    """What flows from layer to layer for the tokens that this device owns.

    Attributes:
      bank_NBTD: embedding and finished block sums; rows from ``count`` on are zeros.
      partial_BTD: the running sum, rounded to the model dtype after every addition.
      count: valid bank rows.
      layer: 0-based number of the next layer.
    """

    bank_NBTD: jax.Array
    partial_BTD: jax.Array
    count: jax.Array
    layer: jax.Array

    @classmethod
    def start(cls, embedding_BTD: jax.Array, num_blocks: int) -> Depth:
        bank = jnp.zeros((num_blocks, *embedding_BTD.shape), embedding_BTD.dtype)
        zero = jnp.int32(0)
        return cls(bank, embedding_BTD, zero, zero)

    def append_at_boundary(self, block_size: int) -> Depth:
        """At the first layer of a block, move the running sum to the bank and start a new one."""
        boundary = self.layer % block_size == 0
        row = jnp.minimum(self.count, self.bank_NBTD.shape[0] - 1)
        kept = jax.lax.dynamic_index_in_dim(self.bank_NBTD, row, 0, keepdims=False)
        bank = jax.lax.dynamic_update_index_in_dim(
            self.bank_NBTD, jnp.where(boundary, self.partial_BTD, kept), row, 0
        )
        partial = jnp.where(boundary, jnp.zeros_like(self.partial_BTD), self.partial_BTD)
        count = self.count + boundary.astype(jnp.int32)
        return dataclasses.replace(self, bank_NBTD=bank, partial_BTD=partial, count=count)

    def add(self, y_BTD: jax.Array) -> Depth:
        return dataclasses.replace(self, partial_BTD=self.partial_BTD + y_BTD)


class DecoderLayer(nnx.Module):
    """Read, attend, add; read, feed forward, add. There is no plain residual stream."""

    def __init__(
        self,
        config: Config,
        spec: LayerSpec,
        make: Maker,
        experts: str,
        indexer: str,
        extra_experts: int,
    ):
        self.config, self.spec = config, spec
        D = config.hidden_size
        self.attention_res = DepthRead(config, make)
        self.ffn_res = DepthRead(config, make)
        self.input_norm = make((D,), ("embed",), "ones")
        self.post_attention_norm = make((D,), ("embed",), "ones")
        if spec.attention == "kda":
            self.attention = KimiDeltaAttention(config, make)
        else:
            self.attention = GlobalAttention(config, make, indexer)
        if spec.ffn == "dense":
            self.ffn = FeedForward(config, config.intermediate_size, make)
        else:
            self.ffn = LatentMoE(config, make, experts, extra_experts)

    def __call__(self, depth: Depth, cache, tokens: Tokens, slot=None):
        """Args:
          depth: bank and running sum of owned tokens.
          cache: `KDACache`, `GlobalCache` or None; stacked when ``slot`` is given.
          tokens: positions and ownership.
          slot: the period, where caches and packed experts are stacks of periods.
        Returns:
          (depth after the layer, cache, aux arrays by name).
        """
        aux = {}
        with jax.named_scope("depth"):
            x = self.attention_res(depth, self.input_norm)
            depth = depth.append_at_boundary(self.config.attn_res_block_size)
        if isinstance(self.attention, KimiDeltaAttention):
            with jax.named_scope("kda"):
                y, cache = self.attention(x, cache, tokens, slot)
        else:
            with jax.named_scope("mla"):
                y, cache, aux = self.attention(x, cache, tokens, slot)
        with jax.named_scope("depth"):
            depth = depth.add(y)
            y = self.ffn_res(depth, self.post_attention_norm)
        if isinstance(self.ffn, FeedForward):
            with jax.named_scope("dense"):
                y = self.ffn(y, tokens)
        else:
            y, moe_aux = self.ffn(y, tokens, slot)
            aux |= moe_aux
        depth = depth.add(y)
        depth = dataclasses.replace(depth, layer=depth.layer + 1)
        return depth, cache, aux | {"hidden": depth.partial_BTD}
