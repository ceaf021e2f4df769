"""Full attention in blocks: portable JAX, and cuDNN's kernel through JAX's own entry."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from k3jax.ops.mla import blocks


def xla(q_NHD, k_NHD, v_NHD, length, *, scale, query_block, key_block):
    """Query blocks one after another, key blocks under an online softmax; padding is skipped."""
    N, _, D = q_NHD.shape
    live_N = jnp.arange(N, dtype=jnp.int32) < length
    q_NHD, k_NHD, v_NHD = (jnp.where(live_N[:, None, None], a, 0) for a in (q_NHD, k_NHD, v_NHD))
    k_HND, v_HND = k_NHD.swapaxes(0, 1), v_NHD.swapaxes(0, 1)

    def piece(q_HMD, start, size, fresh_S):
        k_HSD, v_HSD = (jax.lax.dynamic_slice_in_dim(a, start, size, 1) for a in (k_HND, v_HND))
        mask_S = start + jnp.arange(size, dtype=jnp.int32) < length
        if fresh_S is not None:
            mask_S = mask_S & fresh_S
        return blocks.partial_attention(q_HMD, k_HSD, v_HSD, mask_S[None, None], scale)

    def attend(q_BMHD):
        q_HMD = q_BMHD[0].swapaxes(0, 1)
        if key_block >= N:
            total = piece(q_HMD, 0, N, None)
        else:
            total = blocks.over_keys(
                lambda c, start, fresh_S: blocks.merge(c, piece(q_HMD, start, key_block, fresh_S)),
                blocks.empty_partial(q_HMD.shape[:2], D),
                N,
                key_block,
                length - 1,
            )
        return blocks.normalise(total).astype(q_BMHD.dtype).swapaxes(0, 1)[None]

    def block(q_BMHD, live_BM):
        return jax.lax.cond(live_BM.any(), attend, jnp.zeros_like, q_BMHD)

    out_BNHD = blocks.over_queries(block, query_block, (q_NHD[None], live_N[None]), (0, False))
    return jnp.where(live_N[:, None, None], out_BNHD[0], 0)


def cudnn(q_NHD, k_NHD, v_NHD, length, *, scale):
    """cuDNN's flash attention; it masks by lengths and needs float16 or bfloat16."""
    lengths_B = jnp.reshape(length, (1,)).astype(jnp.int32)
    live_N11 = (jnp.arange(q_NHD.shape[0], dtype=jnp.int32) < length)[:, None, None]
    q_NHD, k_NHD, v_NHD = (jnp.where(live_N11, a, 0) for a in (q_NHD, k_NHD, v_NHD))
    out_BNHD = jax.nn.dot_product_attention(
        *(q_NHD[None], k_NHD[None], v_NHD[None]),
        scale=scale,
        query_seq_lengths=lengths_B,
        key_value_seq_lengths=lengths_B,
        implementation="cudnn",
    )
    return jnp.where(live_N11, out_BNHD[0], 0)  # rows past the length are not defined there
