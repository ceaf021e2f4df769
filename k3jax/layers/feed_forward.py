"""Dense SiTU feed-forward and the Stable LatentMoE."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from k3jax.config import Config
from k3jax.layers.norms import rms_norm
from k3jax.layers.params import Maker, Packed, linear
from k3jax.layers.tokens import Tokens
from k3jax.ops import routing
from k3jax.ops.grouped_matmul import experts
from k3jax.ops.situ import situ
from k3jax.quantization import mxfp4
from sharding import collectives
from sharding.experts import dispatch
from sharding.placement import physical


class FeedForward(nnx.Module):
    """down(SiTU(gate(x), up(x))): the dense layers and the shared experts."""

    def __init__(self, config: Config, width: int, make: Maker, axis: str = "mlp"):
        self.config, self.axis = config, axis
        self.gate_proj = make((width, config.hidden_size), (axis, "embed"))
        self.up_proj = make((width, config.hidden_size), (axis, "embed"))
        self.down_proj = make((config.hidden_size, width), ("embed", axis))

    def hidden(self, x_BTD: jax.Array) -> jax.Array:
        """The activations of this device's columns."""
        c = self.config
        gate, up = linear(x_BTD, self.gate_proj), linear(x_BTD, self.up_proj)
        return situ(gate, up, c.situ_beta, c.situ_linear_beta)

    def __call__(self, x_own: jax.Array, tokens: Tokens) -> jax.Array:
        """Owned tokens [.., D] -> the same."""
        if self.axis not in tokens.parallel.split:
            return linear(self.hidden(x_own), self.down_proj)
        (x_BTD,) = tokens.gather(x_own)
        return tokens.contract(self.hidden(x_BTD), self.down_proj, x_own.dtype)


class LatentMoE(nnx.Module):
    """Routed experts that work on a narrower latent, plus shared experts on the full width.

    Router and shared experts read x; the routed experts read its projection. Their weighted sum is
    normed as a whole, so it must be complete before the norm when experts are spread over devices.

    With ``extra`` slots, busy experts are stored several times, and ``copies`` and ``slot_order``
    say where: the copies of expert e are ``slot_order[c : c + copies[e]]``, c the copies before e.
    """

    def __init__(self, config: Config, make: Maker, experts: str, extra: int = 0):
        self.config, self.extra = config, extra
        moe, D = config.moe, config.hidden_size
        E, L, F = moe.num_experts, moe.latent_size, moe.intermediate_size
        self.router = make((E, D), ("router_experts", "embed"))
        self.router_bias = make((E,), ("router_experts",), "zeros", dtype=jnp.float32, kind=Packed)
        self.latent_down = make((L, D), ("latent", "embed"))
        self.latent_up = make((D, L), ("embed", "latent"))
        self.latent_norm = make((L,), ("latent_norm",), "ones")
        self.shared = FeedForward(config, moe.shared_size, make, "shared_mlp")
        self.packed = experts == "mxfp4"
        if extra:
            one = {"init": "ones", "dtype": jnp.int32, "kind": Packed}
            self.copies = make((E,), ("router_experts",), **one)
            self.slot_order = make((E + extra,), ("router_experts",), **one)
            E += extra
        if self.packed:
            self._packed(make, "w13", (E, 2 * F, L), ("experts", "expert_mlp2", "expert_latent"))
            self._packed(make, "w2", (E, L, F), ("experts", "expert_latent", "expert_mlp"))
        else:
            self.w13 = make((E, 2 * F, L), ("experts", "expert_mlp2", "expert_latent"))
            self.w2 = make((E, L, F), ("experts", "expert_latent", "expert_mlp"))

    def _packed(self, make: Maker, name: str, shape, axes):
        E, out, width = shape
        codes = lambda key, s: jax.random.randint(key, s, 0, 256)  # noqa: E731
        # Codes have a root mean square of 2.7: this byte brings a random expert near ``std``.
        scales = lambda key, s: jnp.full(s, 127 - 7)  # noqa: E731
        u8, group = jnp.uint8, mxfp4.GROUP
        code_axes, scale_axes = (*axes[:2], axes[2] + "/2"), (*axes[:2], axes[2] + f"/{group}")
        self_codes = make((E, out, width // 2), code_axes, codes, dtype=u8, kind=Packed)
        self_scales = make((E, out, width // group), scale_axes, scales, dtype=u8, kind=Packed)
        setattr(self, f"{name}_codes", self_codes)
        setattr(self, f"{name}_scales", self_scales)

    def _weights(self, name: str):
        if not self.packed:
            return getattr(self, name)[...]
        return mxfp4.MXFP4(
            getattr(self, f"{name}_codes")[...], getattr(self, f"{name}_scales")[...]
        )

    def __call__(
        self, x_own: jax.Array, tokens: Tokens, slot=None
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Args:
          x_own: [.., D], the normed input of owned tokens.
          tokens: how they travel; padding among them reaches no expert.
          slot: the layer within packed expert weights that are stacks of layers; None if not.
        Returns:
          ([.., D], {"expert_ids", "expert_weights" [.., k], "router_scores" [.., E]}).
        """
        config, moe, dtype = self.config, self.config.moe, x_own.dtype
        lead, D = x_own.shape[:-1], x_own.shape[-1]
        x_ND = x_own.reshape(-1, D)
        with jax.named_scope("router"):
            ids, weights = routing.route(
                x_ND,
                self.router[...],
                self.router_bias[...],
                moe.num_experts_per_token,
                scaling=moe.routed_scaling_factor,
                renormalize=moe.renormalize,
                dtype=config.router_dtype,
            )
        split = tokens.parallel.split
        with jax.named_scope("shared"):
            # All tokens of the group where a projection is split, else those that are owned.
            (x_BTD,) = tokens.gather(x_own) if split & {"latent", "shared_mlp"} else (x_own,)
        with jax.named_scope("latent"):
            z = linear(x_BTD if "latent" in split else x_own, self.latent_down)
            z = tokens.exchange(z) if "latent" in split else z
        routed = self._routed(z.reshape(x_ND.shape[0], -1), ids, weights, tokens, slot)
        routed = rms_norm(
            routed.reshape(*lead, -1),
            self.latent_norm[...],
            config.rms_norm_eps,
            weight_after_cast=config.norm_weight_after_cast,
        )
        complete, partial = [], []  # of owned tokens; to be summed over the tensor axes
        with jax.named_scope("latent"):
            if "latent" in split:
                routed_BTl = tokens.exchange_back(routed)
                partial.append(linear(routed_BTl, self.latent_up, out_dtype=jnp.float32))
            else:
                complete.append(linear(routed, self.latent_up))
        with jax.named_scope("shared"):
            if "shared_mlp" in split:
                hidden = self.shared.hidden(x_BTD)
                partial.append(linear(hidden, self.shared.down_proj, out_dtype=jnp.float32))
            else:
                complete.append(self.shared(x_own, tokens))
            if partial:  # both in one exchange
                complete.append(tokens.reduce(functools.reduce(jnp.add, partial)).astype(dtype))
        out = functools.reduce(jnp.add, complete)
        aux = {
            "expert_ids": ids.reshape(*lead, -1),
            "expert_weights": weights.reshape(*lead, -1),
            "router_scores": routing.scores(x_ND, self.router[...], config.router_dtype).reshape(
                *lead, -1
            ),
        }
        return out, aux

    def _routed(self, z_NL, ids_Nk, weights_Nk, tokens: Tokens, slot) -> jax.Array:
        """The weighted sum of every token's experts, wherever they live; [N, L]."""
        w13, w2 = self._weights("w13"), self._weights("w2")

        def compute(z, ids, weights, out_dtype=jnp.float32):
            with jax.named_scope("experts"):
                return experts(
                    *(z, ids, weights, w13, w2),
                    situ_beta=self.config.situ_beta,
                    situ_linear_beta=self.config.situ_linear_beta,
                    activations=self.config.moe.expert_activations,
                    implementation="auto" if self.packed else "dense",
                    layer=slot if self.packed else None,
                    out_dtype=out_dtype,
                )

        p = tokens.parallel
        positions_N = tokens.own_positions.reshape(-1)
        if self.extra:
            # Any copy gives the same numbers; neighbours in a batch take different ones.
            number_N = positions_N + jnp.arange(len(ids_Nk), dtype=jnp.int32)
            ids_Nk = physical(ids_Nk, number_N, self.copies[...], self.slot_order[...])
        if not p.experts:
            return compute(z_NL, ids_Nk, weights_Nk, z_NL.dtype)
        ids_Nk = jnp.where(positions_N[:, None] >= 0, ids_Nk, -1)
        count = w13.shape[-3] * collectives.size(p.experts)
        with jax.named_scope("experts"):
            r_NL = dispatch(p.dispatch, p.experts, z_NL, ids_Nk, weights_Nk, count, compute)
        return r_NL.astype(z_NL.dtype)
