"""Bidirectional attention over the patches of one image or frame group."""

from __future__ import annotations

import logging

import jax
import jax.numpy as jnp

from k3jax.ops.mla import blocks
from k3jax.ops.vision_attention import xla as forms

__all__ = ["IMPLEMENTATIONS", "attend", "choose"]

log = logging.getLogger(__name__)

IMPLEMENTATIONS = ("xla", "cudnn")


def attend(
    q_NHD: jax.Array,
    k_NHD: jax.Array,
    v_NHD: jax.Array,
    length: jax.Array | int,
    *,
    scale: float,
    implementation: str = "auto",
    query_block: int | None = None,
    key_block: int | None = None,
) -> jax.Array:
    """softmax(scale * q k^T) v over the first ``length`` rows; every row sees every other.

    No form builds the N x N scores: "xla" goes by blocks of ``k3jax.ops.mla.blocks.BUDGET_BYTES``,
    "cudnn" is cuDNN's flash attention. Scores and softmax are float32; float32 products use full
    precision.

    Args:
      q_NHD, k_NHD, v_NHD: N rows of H heads, float32 or bfloat16, one dtype. Rows from ``length``
        on may hold anything, NaN included.
      length: real rows, an int32 scalar that may be traced; 0 gives zeros.
      scale: D ** -0.5 in MoonViT.
      implementation: "auto", "xla" or "cudnn".
      query_block, key_block: rows at a time in the "xla" form, None for a size from the budget.
    Returns:
      [N, H, D] in the queries' dtype; zeros from ``length`` on.
    Raises:
      ValueError: an unknown implementation, or shapes or dtypes that do not fit; named.

    Source: Moonshot's published modelling code (attention over all t*h*w patches of an item).
    """
    arrays = (q_NHD, k_NHD, v_NHD)
    if len({(a.shape, a.dtype) for a in arrays}) != 1 or q_NHD.ndim != 3:
        kinds = ", ".join(f"{a.dtype}{list(a.shape)}" for a in arrays)
        raise ValueError(f"vision_attention: q, k, v must be [N, H, D] of one kind, got {kinds}")
    if q_NHD.dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f"vision_attention: {q_NHD.dtype}, must be float32 or bfloat16")
    reason = "asked for"
    if implementation == "auto":
        implementation, reason = choose(q_NHD)
    length = jnp.asarray(length, jnp.int32)
    if implementation == "cudnn":
        log.debug("vision_attention: cudnn (%s)", reason)
        return forms.cudnn(*arrays, length, scale=scale)
    if implementation != "xla":
        known = ", ".join(("auto", *IMPLEMENTATIONS))
        raise ValueError(f"vision_attention: implementation {implementation!r} is none of {known}")
    N, H, D = q_NHD.shape
    # Scores and weights in float32; a query row carries its sums and one update of them.
    plan = blocks.plan(N, N, pair=8 * H, per_query=H * D * (q_NHD.dtype.itemsize + 8))
    sizes = (query_block or plan[0], min(key_block or plan[1], N))
    log.debug("vision_attention: xla (%s); %d rows in blocks of %d x %d", reason, N, *sizes)
    return forms.xla(*arrays, length, scale=scale, query_block=sizes[0], key_block=sizes[1])


def choose(q_NHD: jax.Array) -> tuple[str, str]:
    """The form "auto" takes for these queries on the default device, and why.

    A program compiled ahead of time for another device should name its form.
    """
    device = jax.devices()[0]
    if device.platform != "gpu" or "cuda" not in device.client.platform_version:
        return "xla", "not on an NVIDIA GPU"
    if q_NHD.dtype != jnp.bfloat16 or q_NHD.shape[-1] % 8 or q_NHD.shape[-1] > 128:
        return "xla", f"cuDNN does not take {q_NHD.dtype} heads of {q_NHD.shape[-1]}"
    return "cudnn", "bfloat16 on an NVIDIA GPU"
