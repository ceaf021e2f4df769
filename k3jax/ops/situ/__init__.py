"""SiTU, the gated activation of Kimi K3's feed-forward layers."""

from __future__ import annotations

import jax

from k3jax.ops.situ import xla

IMPLEMENTATIONS = {"xla": xla.situ}


def situ(
    gate: jax.Array,
    up: jax.Array,
    beta: float,
    linear_beta: float | None,
    *,
    implementation: str = "auto",
) -> jax.Array:
    """``b tanh(gate / b) sigmoid(gate) * c tanh(up / c)`` with b = beta, c = linear_beta.

    Args:
      gate, up: [..., F], one dtype.
      beta: bound of the gate; K3 has 4.
      linear_beta: bound of the other factor; K3 has 25. None leaves ``up`` as it is.
      implementation: "auto" or "xla".

    Returns:
      [..., F] in the dtype of ``gate``. Computed in float32 and rounded once. The sigmoid takes the
      raw gate, not the bounded one. Magnitudes stay below ``beta * linear_beta``.

    Raises:
      ValueError: an unknown implementation.

    Source: Kimi K3 technical report; Moonshot's published modelling code.
    """
    name = "xla" if implementation == "auto" else implementation
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"situ: implementation {name!r} is not one of {sorted(IMPLEMENTATIONS)}")
    return IMPLEMENTATIONS[name](gate, up, beta, linear_beta)
