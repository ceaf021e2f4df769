"""Dense SiTU feed-forward and the Stable LatentMoE."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from k3jax.config import Config
from k3jax.layers.norms import rms_norm
from k3jax.layers.params import Maker, Packed, linear
from k3jax.ops import routing
from k3jax.ops.grouped_matmul import experts
from k3jax.ops.situ import situ
from k3jax.quantization import mxfp4


class FeedForward(nnx.Module):
    """down(SiTU(gate(x), up(x))): the dense layers and the shared experts."""

    def __init__(self, config: Config, width: int, make: Maker, axis: str = "mlp"):
        self.config = config
        self.gate_proj = make((width, config.hidden_size), (axis, "embed"))
        self.up_proj = make((width, config.hidden_size), (axis, "embed"))
        self.down_proj = make((config.hidden_size, width), ("embed", axis))

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        c = self.config
        hidden = situ(
            linear(x_BTD, self.gate_proj),
            linear(x_BTD, self.up_proj),
            c.situ_beta,
            c.situ_linear_beta,
        )
        return linear(hidden, self.down_proj)


class LatentMoE(nnx.Module):
    """Routed experts that work on a narrower latent, plus shared experts on the full width.

    Router and shared experts read x; the routed experts read its projection. Their weighted sum is
    normed as a whole, so it must be complete before the norm when experts are spread over devices.
    """

    def __init__(self, config: Config, make: Maker, experts: str):
        self.config = config
        moe, D = config.moe, config.hidden_size
        E, L, F = moe.num_experts, moe.latent_size, moe.intermediate_size
        self.router = make((E, D), ("experts", "embed"))
        self.router_bias = make((E,), ("experts",), "zeros", dtype=jnp.float32, kind=Packed)
        self.latent_down = make((L, D), ("latent", "embed"))
        self.latent_up = make((D, L), ("embed", "latent"))
        self.latent_norm = make((L,), ("latent",), "ones")
        self.shared = FeedForward(config, moe.shared_size, make, "shared_mlp")
        self.packed = experts == "mxfp4"
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

    def __call__(self, x_BTD: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        """[B, T, D] -> ([B, T, D], {"expert_ids", "expert_weights" [B, T, k], "router_scores"})."""
        config, moe = self.config, self.config.moe
        B, T, D = x_BTD.shape
        x_ND = x_BTD.reshape(B * T, D)
        scores = routing.scores(x_ND, self.router[...], dtype=config.router_dtype)
        ids, weights = routing.select(
            scores,
            self.router_bias[...],
            moe.num_experts_per_token,
            scaling=moe.routed_scaling_factor,
            renormalize=moe.renormalize,
        )
        routed = experts(
            linear(x_ND, self.latent_down),
            ids,
            weights,
            self._weights("w13"),
            self._weights("w2"),
            situ_beta=config.situ_beta,
            situ_linear_beta=config.situ_linear_beta,
            implementation="auto" if self.packed else "dense",
        )
        routed = rms_norm(
            routed,
            self.latent_norm[...],
            config.rms_norm_eps,
            weight_after_cast=config.norm_weight_after_cast,
        )
        out = linear(routed, self.latent_up).reshape(B, T, D) + self.shared(x_BTD)
        per_token = lambda a: a.reshape(B, T, -1)  # noqa: E731
        aux = {
            "expert_ids": per_token(ids),
            "expert_weights": per_token(weights),
            "router_scores": per_token(scores),
        }
        return out, aux
