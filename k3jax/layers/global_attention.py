"""The global layers: Gated MLA (K3) and Gated DeepSeek Sparse Attention (K3.1 Pro)."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from k3jax.cache.state import GlobalCache
from k3jax.config import Config
from k3jax.layers.norms import layer_norm, rms_norm
from k3jax.layers.params import Maker, linear
from k3jax.layers.tokens import Stripe, Tokens
from k3jax.ops import dsa
from k3jax.ops.mla import Spread, mla
from k3jax.ops.rows import Rows, Scaled
from k3jax.quantization import fp8
from sharding.parallel import SINGLE


class Indexer(nnx.Module):
    """Scores every earlier token for a query with a few small heads and one shared key a token."""

    def __init__(self, config: Config, make: Maker):
        assert config.dsa is not None
        self.config = config.dsa
        H, K, D = config.dsa.num_heads, config.dsa.head_dim, config.hidden_size
        self.wq_b = make((H * K, config.mla.q_lora_rank), ("index_heads", "q_latent"))
        self.wk = make((K, D), ("index_dim", "embed"))
        self.weights_proj = make((H, D), ("index_head_count", "embed"))
        self.k_norm_scale = make((K,), ("index_dim",), "ones", dtype=jnp.float32)
        self.k_norm_bias = make((K,), ("index_dim",), "zeros", dtype=jnp.float32)

    def queries(self, x_BTD, q_latent_BTR) -> tuple[jax.Array, jax.Array]:
        """(q [B, T, H, K], head weights [B, T, H] float32 that carry both scales)."""
        q = linear(q_latent_BTR, self.wq_b)
        q = q.reshape(*q.shape[:2], self.config.num_heads, self.config.head_dim)
        scale = (self.config.num_heads * self.config.head_dim) ** -0.5
        return q, linear(x_BTD, self.weights_proj, out_dtype=jnp.float32) * jnp.float32(scale)

    def keys(self, x_BTD) -> jax.Array:
        """Index keys [B, T, K]: LayerNorm in float32, then the model dtype."""
        eps = self.config.key_norm_eps
        return layer_norm(
            linear(x_BTD, self.wk), self.k_norm_scale[...], self.k_norm_bias[...], eps
        )


class GlobalAttention(nnx.Module):
    """Latent attention without rotation and with an output gate; sparse where the config has DSA.

    ``indexer`` is how the indexer trains: "frozen" (it selects, nothing more), "dense" (attention
    sees every earlier token while the indexer learns where it goes) or "sparse" (attention sees the
    selection, the indexer learns within it).
    """

    def __init__(self, config: Config, make: Maker, indexer: str = "frozen"):
        self.config, self.indexer_mode = config, indexer
        m, D, H = config.mla, config.hidden_size, config.mla.num_heads
        self.q_a_proj = make((m.q_lora_rank, D), ("q_latent", "embed"))
        self.q_a_norm = make((m.q_lora_rank,), ("q_latent",), "ones")
        self.q_b_proj = make((H * m.qk_head_dim, m.q_lora_rank), ("heads", "q_latent"))
        self.kv_a_proj = make((m.cache_width, D), ("kv_cache", "embed"))
        self.kv_a_norm = make((m.kv_lora_rank,), ("kv_latent",), "ones")
        self.kv_b_proj = make(
            (H * (m.qk_nope_head_dim + m.v_head_dim), m.kv_lora_rank), ("heads", "kv_latent")
        )
        self.g_proj = make((H * m.v_head_dim, D), ("heads", "embed"))
        self.o_proj = make((D, H * m.v_head_dim), ("embed", "heads"))
        if config.dsa is not None:
            self.indexer = Indexer(config, make)

    def __call__(
        self, x_own: jax.Array, cache: GlobalCache | None, tokens: Tokens, slot=None
    ) -> tuple[jax.Array, GlobalCache | None, dict[str, jax.Array]]:
        """Args:
          x_own: [.., D], the normed layer input of owned tokens.
          cache: of this layer, or of its stack when ``slot`` says which one; None attends within
            the call only.
          tokens: positions and ownership.
        Returns:
          (output of owned tokens, the cache with the new rows, aux). In K3.1 aux holds "selected"
          [B, T, topk] (absent when the cache is striped over devices) and, while the indexer
          trains, what its loss needs: "index_scores", "attention_probs" (summed over heads) and
          "index_valid", each [B, T, S].
        """
        config, m = self.config, self.config.mla
        after_cast = config.norm_weight_after_cast
        # Small projections run on owned tokens, and their results travel with x.
        q_latent_own = rms_norm(
            linear(x_own, self.q_a_proj),
            self.q_a_norm[...],
            m.latent_norm_eps,
            weight_after_cast=after_cast,
        )
        kv = linear(x_own, self.kv_a_proj)
        latent, rope = jnp.split(kv, [m.kv_lora_rank], axis=-1)
        latent = rms_norm(
            latent, self.kv_a_norm[...], m.latent_norm_eps, weight_after_cast=after_cast
        )
        rows_own = jnp.concatenate([latent, rope], axis=-1)
        # A top-k passes no gradient; the indexer has a loss of its own, which must train it alone.
        detached_own = jax.lax.stop_gradient(x_own)
        parts = [x_own, q_latent_own, rows_own]
        if config.dsa is not None:
            parts.append(self.indexer.keys(detached_own))
        x, q_latent, rows_BTC, *index_rows = tokens.gather(*parts)
        B, T, _ = x.shape
        q = linear(q_latent, self.q_b_proj).reshape(B, T, -1, m.qk_head_dim)
        stripe = Stripe(tokens.parallel if cache is not None else SINGLE)
        cache, rows, index_rows = self._write(
            cache, rows_BTC, index_rows[0] if index_rows else None, stripe, tokens, slot
        )
        w = self.kv_b_proj[...].reshape(-1, m.qk_nope_head_dim + m.v_head_dim, m.kv_lora_rank)
        w_k, w_v = jnp.split(w, [m.qk_nope_head_dim], axis=1)
        visible = stripe.visible(tokens.cache_positions_BT if cache else tokens.positions_BT)
        spread = None
        if stripe.parallel.cache_sequence:
            spread = Spread(stripe.heads, stripe.merge(m.kv_lora_rank))
        attention = partial(mla, q, rows, w_k, w_v, visible, scale=self.scale, spread=spread)
        aux = {}
        if config.dsa is None:
            o = attention()
        else:
            assert index_rows is not None
            own = (detached_own, jax.lax.stop_gradient(q_latent_own))
            group = jax.lax.stop_gradient((x, q_latent))
            sparse = config.dsa.topk < rows.shape[1] * stripe.count
            if spread is None:
                with jax.named_scope("indexer"):
                    selected = self._select(own, group, index_rows, visible, tokens)
                aux = {"selected": selected}
            elif sparse:
                with jax.named_scope("indexer"):
                    selected = self._select_spread(group, index_rows, visible, stripe)
            if self.indexer_mode == "dense" or not sparse:  # every earlier token counts
                o = attention()
            else:
                o = dsa.attend(*(q, rows, w_k, w_v, selected), scale=self.scale, spread=spread)
            if self.indexer_mode != "frozen":
                aux |= self._indexer_aux(own, index_rows, q, rows, w_k, visible, selected)
        gate = jax.nn.sigmoid(linear(x, self.g_proj))
        out = tokens.contract(o.reshape(B, T, -1) * gate, self.o_proj, x_own.dtype)
        return out, cache, aux

    @property
    def scale(self) -> float:
        return self.config.mla.qk_head_dim**-0.5

    def _write(self, cache, rows_BTC, index_rows_BTK, stripe: Stripe, tokens: Tokens, slot):
        """(cache with the new rows, views of its latents and index keys); the new rows themselves
        where there is no cache."""
        index, key, factor = self.config.dsa, index_rows_BTK, None
        # Keys in eight bits pass no gradient: an indexer that trains sees what they are made of.
        if index and index.scaled_keys and (cache is not None or self.indexer_mode == "frozen"):
            key, factor = fp8.quantize(key)
        if cache is None:
            new = GlobalCache(rows_BTC, key, factor)
            return None, new.latents(), new.index_keys()
        new = [r if r is None else stripe.sequences(r) for r in (rows_BTC, key, factor)]
        table = cache.table_BM
        if table is not None:  # of every sequence that this device holds rows of
            cache = dataclasses.replace(cache, table_BM=stripe.sequences(table))
        cache = cache.write(*new, stripe.target(tokens.cache_positions_BT), slot)
        views = cache.latents(slot), cache.index_keys(slot)
        return dataclasses.replace(cache, table_BM=table), *views

    def _select(
        self, own, group, index_rows: Rows | Scaled, visible_BT, tokens: Tokens
    ) -> jax.Array:
        """Selected rows [B, T, topk] where every device of a group holds the same rows: each
        selects for the tokens it owns, and the selections are gathered."""
        topk, shape = self.indexer.config.topk, tokens.rectangle()
        if not tokens.parallel.tensor or shape is None:
            q, w = self.indexer.queries(*group)
            return dsa.select(q, index_rows, w, visible_BT, topk)
        count, length, first = shape
        cut = lambda a: a.reshape(count, length, *a.shape[2:])  # noqa: E731
        q, w = map(cut, self.indexer.queries(*own))
        index_rows = index_rows.sequences(first, count)
        selected = dsa.select(q, index_rows, w, cut(tokens.own_positions), topk)
        return tokens.gather(selected.reshape(*own[0].shape[:-1], topk))[0]

    def _select_spread(
        self, group, index_rows: Rows | Scaled, visible_BT, stripe: Stripe
    ) -> jax.Array:
        """This device's rows among the selection of every query, [B', T, k], -1 for none."""
        q, w = self.indexer.queries(*map(stripe.sequences, group))
        topk = self.indexer.config.topk
        rank, at = dsa.candidates(q, index_rows, w, visible_BT, topk)
        length = index_rows.shape[1] * stripe.count
        kept = dsa.keep(rank, stripe.position(at), topk, length, stripe.all_reduce)
        return jnp.where(kept, at, -1)

    def _indexer_aux(
        self, own, index_rows: Rows | Scaled, q, rows: Rows, w_k, positions_BT, selected
    ):
        """What trains the indexer, on one device."""
        index_q, index_w = self.indexer.queries(*own)
        S = rows.shape[1]
        valid = jnp.arange(S) <= positions_BT[..., None]
        if self.indexer_mode == "sparse":
            valid &= _chosen(selected, S)
        frozen = jax.lax.stop_gradient((q, rows.whole(), w_k))
        return {
            "index_scores": dsa.scores(index_q, index_rows, index_w),
            "attention_probs": _attention_probs(*frozen, valid, self.scale),
            "index_valid": valid,
        }


def _chosen(selected_BTk: jax.Array, S: int) -> jax.Array:
    """bool [B, T, S]: which positions stand in the selection."""
    B, T, _ = selected_BTk.shape
    target = jnp.where(selected_BTk < 0, S, selected_BTk)
    index = (jnp.arange(B)[:, None, None], jnp.arange(T)[:, None], target)
    return jnp.zeros((B, T, S), bool).at[index].set(True, mode="drop")


def _attention_probs(q_BTHQ, rows_BSC, w_k_HNC, valid_BTS, scale: float) -> jax.Array:
    """Attention probabilities over the valid keys, summed over heads: float32 [B, T, S]."""
    C = w_k_HNC.shape[-1]

    def one_head(total, head):
        q_BTQ, w_k_NC = head
        k = jnp.einsum("bsc,nc->bsn", rows_BSC[..., :C], w_k_NC)
        k = jnp.concatenate([k, rows_BSC[..., C:]], axis=-1)
        scores = jnp.einsum("btq,bsq->bts", q_BTQ, k, preferred_element_type=jnp.float32)
        return total + jax.nn.softmax(scores * scale, axis=-1, where=valid_BTS), None

    zero = jnp.zeros(valid_BTS.shape, jnp.float32)
    return jax.lax.scan(one_head, zero, (jnp.moveaxis(q_BTHQ, 2, 0), w_k_HNC))[0]
