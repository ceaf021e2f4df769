"""Kimi Delta Attention: a gated delta rule with one decay a key channel."""

from __future__ import annotations

from typing import cast

import jax
import jax.numpy as jnp
from flax import nnx

from k3jax.cache.state import KDACache
from k3jax.config import Config
from k3jax.layers.params import Maker, linear
from k3jax.layers.tokens import Tokens
from k3jax.ops import kda as kda_op
from k3jax.ops.short_conv import short_conv
from k3jax.ops.stacks import put, take


def _log_uniform_decay(key, shape):
    """A_log: log of a uniform draw in [1, 16], as the Kimi Linear initialiser."""
    return jnp.log(jax.random.uniform(key, shape, jnp.float32, 1.0, 16.0))


class KimiDeltaAttention(nnx.Module):
    """Steps 1 to 9 of KDA; H heads with K = V, P = H·K."""

    def __init__(self, config: Config, make: Maker):
        kda, D = config.kda, config.hidden_size
        self.config = config
        P, K, H = kda.width, kda.head_dim, kda.num_heads
        self.q_proj = make((P, D), ("heads", "embed"))
        self.k_proj = make((P, D), ("heads", "embed"))
        self.v_proj = make((P, D), ("heads", "embed"))
        self.g_proj = make((P, D), ("heads", "embed"))
        f32 = jnp.float32
        conv_init = lambda key, shape: jax.random.uniform(key, shape, f32, -0.5, 0.5)  # noqa: E731
        self.q_conv, self.k_conv, self.v_conv = (
            make((P, kda.conv_width), ("heads", "conv"), conv_init, dtype=f32) for _ in range(3)
        )
        self.f_a_proj = make((K, D), ("gate_rank", "embed"))
        self.f_b_proj = make((P, K), ("heads", "gate_rank"))
        self.b_proj = make((H, D), ("head_count", "embed"))
        self.A_log = make((H,), ("head_count",), _log_uniform_decay, dtype=f32)
        self.dt_bias = make((P,), ("heads",), "zeros", dtype=f32)
        self.o_norm = make((K,), ("head_dim",), "ones", dtype=f32)
        self.o_proj = make((D, P), ("embed", "heads"))

    def __call__(
        self, x_own: jax.Array, cache: KDACache | None, tokens: Tokens, slot=None
    ) -> tuple[jax.Array, KDACache | None]:
        """Args:
          x_own: [.., D], the normed layer input of owned tokens.
          cache: of this layer, or of its stack when ``slot`` says which one; None for none.
          tokens: padding among them (at the end of a row) changes nothing. Drafts to verify
            (``tokens.accepted_B``) leave the state as it is and become the window of the cache,
            after the accepted rows of the window before them were replayed onto the state.
        Returns:
          (output of owned tokens, the cache after the tokens).
        """
        (x_BTD,) = tokens.gather(x_own)
        B, T, _ = x_BTD.shape
        kda = self.config.kda
        H = self.A_log.shape[0]  # of this device
        valid_BT = tokens.positions_BT >= 0
        q, k, v = (linear(x_BTD, w) for w in (self.q_proj, self.k_proj, self.v_proj))
        conv = (self.q_conv[...], self.k_conv[...], self.v_conv[...])
        z = linear(linear(x_BTD, self.f_a_proj), self.f_b_proj).reshape(B, T, H, -1)
        b = linear(x_BTD, self.b_proj)
        gate = linear(x_BTD, self.g_proj).reshape(B, T, H, -1)
        A_log, dt_bias = self.A_log[...], self.dt_bias[...].reshape(H, -1)
        norm, eps = self.o_norm[...], self.config.rms_norm_eps
        weights = (conv, A_log, dt_bias, norm)

        if tokens.accepted_B is not None:
            assert cache is not None
            o, state, tails, drafts = kda_op.replay_and_verify(
                jax.tree.map(lambda a: take(a, slot), cache.window),
                tokens.accepted_B,
                (q, k, v),
                z,
                b,
                gate,
                *weights,
                cache.state_BHVK,
                cache.tails_3BWP,
                lower_bound=kda.gate_lower_bound,
                eps=eps,
                lengths_B=jnp.sum(valid_BT, axis=1, dtype=jnp.int32),
                slot=slot,
            )
            window = jax.tree.map(lambda a, new: put(a, new, slot), cache.window, drafts)
            out = tokens.contract(o.reshape(B, T, -1), self.o_proj, x_own.dtype)
            return out, KDACache(state, tails, cast(kda_op.Window, window))

        if T == 1 and cache is not None:
            o, state, tails = kda_op.kda_decode(
                (q[:, 0], k[:, 0], v[:, 0]),
                z[:, 0],
                b[:, 0],
                gate[:, 0],
                *weights,
                cache.state_BHVK,
                cache.tails_3BWP,
                lower_bound=kda.gate_lower_bound,
                eps=eps,
                valid_B=valid_BT[:, 0],
                slot=slot,
            )
            out = tokens.contract(o.reshape(B, 1, -1), self.o_proj, x_own.dtype)
            return out, KDACache(state, tails)

        lengths_B = jnp.sum(valid_BT, axis=1, dtype=jnp.int32)
        tails = [None] * 3 if cache is None else take(cache.tails_3BWP, slot)
        mixed, new_tails = [], []
        for x, w, tail in zip((q, k, v), conv, tails, strict=True):
            y, new_tail = short_conv(x, w, tail, lengths_B)
            mixed.append(y.reshape(B, T, H, -1))
            new_tails.append(new_tail)
        o, state = kda_op.gated_kda(
            mixed[0],
            mixed[1],
            mixed[2],
            z,
            b,
            A_log,
            dt_bias,
            None if cache is None else take(cache.state_BHVK, slot),
            lower_bound=kda.gate_lower_bound,
            lengths_B=lengths_B,
        )
        o = kda_op.gated_norm(o, gate, norm, eps)
        out = tokens.contract(o.reshape(B, T, -1), self.o_proj, x_own.dtype)
        if cache is None:
            return out, None
        return out, KDACache(
            put(cache.state_BHVK, state, slot),
            put(cache.tails_3BWP, jnp.stack(new_tails), slot),
        )

    def commit(self, cache: KDACache, accepted_B: jax.Array, slot=None) -> KDACache:
        """The cache after the first ``accepted_B`` rows of its window; the window stays as it is.

        ``cache`` is of this layer, or of its stack when ``slot`` says which one.
        """
        A_log = self.A_log[...]
        state, tails = kda_op.commit(
            jax.tree.map(lambda a: take(a, slot), cache.window),
            accepted_B,
            (self.q_conv[...], self.k_conv[...], self.v_conv[...]),
            A_log,
            self.dt_bias[...].reshape(len(A_log), -1),
            cache.state_BHVK,
            cache.tails_3BWP,
            lower_bound=self.config.kda.gate_lower_bound,
            slot=slot,
        )
        return KDACache(state, tails, cache.window)
