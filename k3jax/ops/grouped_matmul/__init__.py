"""The routed experts of a mixture: every token through its k experts, weighted and summed."""

from __future__ import annotations

import logging

import jax
import jax.numpy as jnp

from k3jax.errors import InputError
from k3jax.ops.grouped_matmul import xla
from k3jax.quantization.mxfp4 import MXFP4

IMPLEMENTATIONS = {"tiles": xla.tiles, "dense": xla.dense}
_log = logging.getLogger(__name__)


def experts(
    z_NL: jax.Array,
    ids_Nk: jax.Array,
    weights_Nk: jax.Array,
    w13: MXFP4 | jax.Array,
    w2: MXFP4 | jax.Array,
    *,
    situ_beta: float,
    situ_linear_beta: float | None,
    implementation: str = "auto",
    layer: jax.Array | None = None,
    out_dtype=None,
) -> jax.Array:
    """``r_n = sum_j weights[n, j] y(n, ids[n, j])``, ``y(n, e) = w2_e SiTU(w1_e z_n, w3_e z_n)``.

    Args:
      z_NL: latents, float32 or bfloat16.
      ids_Nk: int32, the experts of each token. An id outside 0..E-1 contributes nothing and costs
        nothing: for padded tokens, or experts that live elsewhere.
      weights_Nk: float32, from the router, with the routed scaling factor already in them.
      w13: [E, 2F, L], the F gate rows (w1) before the F up rows (w3); MXFP4 or plain.
      w2: [E, L, F]; MXFP4 or plain.
      layer: int32, which layer of stacks [layers, E, ...] the weights are; None if they are no
        stacks. Taking the layer out first would copy all its experts.
      out_dtype: of the result; that of z if None.
      situ_beta, situ_linear_beta: see :func:`k3jax.ops.situ.situ`.
      implementation:
        "tiles": tokens sorted by expert, one expert unpacked at a time; memory for one expert, time
          only for experts that are used. Reverse-mode gradients for z, weights and plain w13, w2.
        "dense": every expert for every token; for training small models on an accelerator.
        "auto": tiles.

    Returns:
      r_NL. Products accumulate in float32; w1 z, w3 z, the activation and y are
      rounded to the dtype of z; the weighted sum is float32 and is rounded once. A NaN in one row
      of z stays in that row, and experts a token did not choose cannot reach it.

    Raises:
      InputError: shapes or dtypes that do not fit.
      ValueError: an unknown implementation.

    Source: Kimi K3 technical report (Stable LatentMoE); Moonshot's published modelling code.
    """
    num_experts = w13.shape[-3]
    _check(z_NL, ids_Nk, weights_Nk, w13, w2, stacked=layer is not None)
    if layer is not None:
        w13, w2 = (jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), w) for w in (w13, w2))
    name = "tiles" if implementation == "auto" else implementation
    if name not in IMPLEMENTATIONS:
        names = sorted(IMPLEMENTATIONS)
        raise ValueError(f"experts: implementation {name!r} is not one of {names}")
    _log.debug("experts %s with %s -> %s", z_NL.shape, w13.shape, name)
    first = None if layer is None else layer * num_experts
    return IMPLEMENTATIONS[name](
        *(z_NL, ids_Nk, weights_Nk, w13, w2),
        first=first,
        num_experts=num_experts,
        out_dtype=jnp.dtype(out_dtype or z_NL.dtype),
        situ_beta=situ_beta,
        situ_linear_beta=situ_linear_beta,
    )


def _check(z_NL, ids_Nk, weights_Nk, w13, w2, stacked: bool) -> None:
    N, L = z_NL.shape
    lead, F = w13.shape[:-2], w2.shape[-1]
    if (
        len(lead) != (2 if stacked else 1)
        or w13.shape != (*lead, 2 * F, L)
        or w2.shape != (*lead, L, F)
    ):
        raise InputError(
            f"experts: z {z_NL.shape}, w13 {w13.shape} and w2 {w2.shape} are not "
            f"[N, L], [E, 2F, L] and [E, L, F]{', with a leading layer axis' if stacked else ''}"
        )
    if ids_Nk.shape != weights_Nk.shape or ids_Nk.ndim != 2 or ids_Nk.shape[0] != N:
        raise InputError(
            f"experts: ids {ids_Nk.shape} and weights {weights_Nk.shape} are not both [{N}, k]"
        )
    if ids_Nk.dtype != jnp.int32 or weights_Nk.dtype != jnp.float32:
        raise InputError(
            f"experts: ids {ids_Nk.dtype} and weights {weights_Nk.dtype} are not int32 and float32"
        )
