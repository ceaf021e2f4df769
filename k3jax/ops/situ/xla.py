"""SiTU in plain JAX; XLA fuses it into its neighbours."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def situ(gate: jax.Array, up: jax.Array, beta: float, linear_beta: float | None) -> jax.Array:
    """See :func:`k3jax.ops.situ.situ`."""
    g, u = gate.astype(jnp.float32), up.astype(jnp.float32)
    if linear_beta is not None:
        u = linear_beta * jnp.tanh(u / linear_beta)
    return (beta * jnp.tanh(g / beta) * jax.nn.sigmoid(g) * u).astype(gate.dtype)
