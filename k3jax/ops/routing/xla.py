"""The router in plain JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

EPS = 1e-20


def select(score_NE: jax.Array, k: int) -> jax.Array:
    """int32 [N, k]: the k largest of each row, best first, ties to the lowest index, NaN last."""
    # lax.top_k puts NaN first and +0.0 before -0.0. Adding 0.0 would turn -0.0 into +0.0 but is
    # an identity to a compiler, so compare instead.
    score_NE = jnp.where(jnp.isnan(score_NE), -jnp.inf, score_NE)
    score_NE = jnp.where(score_NE == 0.0, 0.0, score_NE)
    return lax.top_k(lax.stop_gradient(score_NE), k)[1].astype(jnp.int32)


def route(
    x_ND: jax.Array,
    w_ED: jax.Array,
    bias_E: jax.Array,
    k: int,
    scaling: float,
    renormalize: bool,
    dtype: np.dtype,
) -> tuple[jax.Array, jax.Array]:
    """See :func:`k3jax.ops.routing.route`."""
    score_NE = scores(x_ND, w_ED, dtype)
    ids_Nk = select(score_NE + bias_E, k)
    weights_Nk = jnp.take_along_axis(score_NE, ids_Nk, axis=1)
    if renormalize:
        weights_Nk = weights_Nk / (weights_Nk.sum(axis=1, keepdims=True) + EPS)
    return ids_Nk, weights_Nk * scaling


def scores(x_ND: jax.Array, w_ED: jax.Array, dtype: np.dtype) -> jax.Array:
    """See :func:`k3jax.ops.routing.scores`."""
    if x_ND.dtype == w_ED.dtype == jnp.bfloat16:
        # Products of two bfloat16 are exact in float32: the sum is the same one, up to its order,
        # as of inputs made float32 first, which would write a K3 router's 25.7 MB at every call.
        dtype = jnp.dtype(jnp.bfloat16)
    logits_NE = lax.dot_general(
        x_ND.astype(dtype),
        w_ED.astype(dtype),
        (((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST,  # a TPU's default rounds float32 inputs to bfloat16
        preferred_element_type=jnp.float32,
    )
    return jax.nn.sigmoid(logits_NE)
