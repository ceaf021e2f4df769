"""The router of Stable LatentMoE: which experts a token goes to, and with which weights."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from k3jax.errors import InputError
from k3jax.ops.routing import xla

IMPLEMENTATIONS = {"xla": xla.route}


def scores(x_ND: jax.Array, w_ED: jax.Array, dtype: DTypeLike = "float32") -> jax.Array:
    """Unbiased router scores ``sigmoid(w x)``, float32 [N, E]: what `route` chooses from, and what
    Quantile Balancing sets the bias by."""
    return xla.scores(x_ND, w_ED, jnp.dtype(dtype))


def route(
    x_ND: jax.Array,
    w_ED: jax.Array,
    bias_E: jax.Array,
    k: int,
    *,
    scaling: float = 1.0,
    renormalize: bool = True,
    dtype: DTypeLike = "float32",
    implementation: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """Chooses k of E experts for each of N tokens.

    ``s = sigmoid(w x)``; the k largest of ``s + bias`` are chosen; their weights are
    ``scaling * s / (sum of the chosen s + 1e-20)``, always from s and never from ``s + bias``.

    Args:
      x_ND: the normed input in full width, before the latent projection.
      w_ED: router weight.
      bias_E: float32 correction bias, for the choice only.
      k: experts per token.
      scaling: routed_scaling_factor, applied here and nowhere else.
      renormalize: divide by the sum of the chosen scores.
      dtype: of the inputs of the matrix product, "float32" (Moonshot's code) or "bfloat16" (what
        serving engines do); the product, the sigmoid and all that follows is float32. Where x and w
        are both bfloat16 already, both settings are one: their products are exact in float32.
      implementation: "auto" or "xla".

    Returns:
      ids_Nk int32, best first, ties to the lowest expert; weights_Nk float32. A NaN score is never
      preferred to a finite one; a token whose input holds NaN gets NaN weights.

    Raises:
      InputError: shapes that do not fit, k outside 1..E, or a bias that is not float32 (biases that
        went through bfloat16 have lost the differences they are there for).

    Source: Kimi K3 technical report; Moonshot's published modelling code.
    """
    experts, width = w_ED.shape
    if x_ND.ndim != 2 or x_ND.shape[1] != width or bias_E.shape != (experts,):
        raise InputError(
            f"router: x {x_ND.shape}, w {w_ED.shape} and bias {bias_E.shape} are not "
            "[N, D], [E, D] and [E]"
        )
    if not 1 <= k <= experts:
        raise InputError(f"router: k = {k} is outside 1..{experts}")
    if bias_E.dtype != jnp.float32:
        raise InputError(f"router: the bias is {bias_E.dtype}, not float32")
    name = "xla" if implementation == "auto" else implementation
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"route: implementation {name!r} is not one of {sorted(IMPLEMENTATIONS)}")
    return IMPLEMENTATIONS[name](x_ND, w_ED, bias_E, k, scaling, renormalize, jnp.dtype(dtype))
