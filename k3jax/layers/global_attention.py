"""The global layers: Gated MLA (K3) and Gated DeepSeek Sparse Attention (K3.1 Pro)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from k3jax.cache.state import GlobalCache, read, write_rows
from k3jax.config import Config
from k3jax.layers.norms import layer_norm, rms_norm
from k3jax.layers.params import Maker, linear
from k3jax.ops import dsa
from k3jax.ops.mla import mla


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
        """Index keys [B, T, K]: LayerNorm in float32, model dtype in the cache."""
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
        self, x_BTD: jax.Array, cache: GlobalCache | None, positions_BT: jax.Array, slot=None
    ) -> tuple[jax.Array, GlobalCache | None, dict[str, jax.Array]]:
        """Args:
          x_BTD: the normed layer input.
          cache: of this layer, or of its stack when ``slot`` says which one; None attends within
            ``x_BTD`` only.
          positions_BT: position of each token in its sequence, -1 for padding.
        Returns:
          ([B, T, D], the cache with the new rows, aux). In K3.1 aux holds "selected" [B, T, topk]
          and, while the indexer trains, what its loss needs: "index_scores", "attention_probs"
          (summed over heads) and "index_valid", each [B, T, S].
        """
        config, m = self.config, self.config.mla
        B, T, _ = x_BTD.shape
        after_cast = config.norm_weight_after_cast
        q_latent = rms_norm(
            linear(x_BTD, self.q_a_proj),
            self.q_a_norm[...],
            m.latent_norm_eps,
            weight_after_cast=after_cast,
        )
        q = linear(q_latent, self.q_b_proj).reshape(B, T, m.num_heads, m.qk_head_dim)
        kv = linear(x_BTD, self.kv_a_proj)
        latent, rope = jnp.split(kv, [m.kv_lora_rank], axis=-1)
        latent = rms_norm(
            latent, self.kv_a_norm[...], m.latent_norm_eps, weight_after_cast=after_cast
        )
        rows = jnp.concatenate([latent, rope], axis=-1)
        # A top-k passes no gradient; the indexer has a loss of its own, which must train it alone.
        detached = jax.lax.stop_gradient(x_BTD)
        index_rows = self.indexer.keys(detached) if config.dsa is not None else None

        if cache is not None:
            latents = write_rows(cache.latent_BSC, rows, positions_BT, slot)
            keys = None
            if index_rows is not None and cache.index_key_BSK is not None:
                keys = write_rows(cache.index_key_BSK, index_rows, positions_BT, slot)
            cache = GlobalCache(latents, keys)
            rows = read(latents, slot)
            index_rows = None if keys is None else read(keys, slot)

        w = self.kv_b_proj[...].astype(x_BTD.dtype)
        w = w.reshape(m.num_heads, m.qk_nope_head_dim + m.v_head_dim, m.kv_lora_rank)
        w_k, w_v = jnp.split(w, [m.qk_nope_head_dim], axis=1)
        scale = m.qk_head_dim**-0.5
        if config.dsa is None:
            o, aux = mla(q, rows, w_k, w_v, positions_BT, scale=scale), {}
        else:
            index = (*self.indexer.queries(detached, jax.lax.stop_gradient(q_latent)), index_rows)
            o, aux = self._sparse(q, rows, w_k, w_v, positions_BT, index, scale)
        gate = jax.nn.sigmoid(linear(x_BTD, self.g_proj))
        out = linear(o.reshape(B, T, -1) * gate, self.o_proj)
        return out, cache, aux

    def _sparse(self, q, rows, w_k, w_v, positions_BT, index, scale):
        index_q, index_w, index_k = index
        topk, S = self.indexer.config.topk, rows.shape[1]
        selected = dsa.select(index_q, index_k, index_w, positions_BT, topk)
        if self.indexer_mode == "dense" or topk >= S:  # every earlier token counts
            o = mla(q, rows, w_k, w_v, positions_BT, scale=scale)
        else:
            o = dsa.attend(q, rows, w_k, w_v, selected, scale=scale)
        aux = {"selected": selected}
        if self.indexer_mode != "frozen":
            valid = jnp.arange(S) <= positions_BT[..., None]
            if self.indexer_mode == "sparse":
                valid &= _chosen(selected, S)
            probs = _attention_probs(*jax.lax.stop_gradient((q, rows, w_k)), valid, scale)
            aux |= {
                "index_scores": dsa.scores(index_q, index_k, index_w),
                "attention_probs": probs,
                "index_valid": valid,
            }
        return o, aux


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
