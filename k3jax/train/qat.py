"""Quantisation-aware training of the routed experts: the forward pass sees their MXFP4 values.

Only ``w13`` and ``w2`` of the experts are quantised (Kimi K3 technical report, section 4.1.4: the
latent projections, routers, shared experts and attention stay in high precision). MXFP4 values are
exact in bfloat16 and the other weights are rounded to the model's dtype in every step, so the model
that is written out is, bit for bit, the one that was trained and measured.
"""

from __future__ import annotations

import jax

from k3jax.train.optimizer import path_name

_EXPERTS = ("w13", "w2")


def is_expert(name: str) -> bool:
    """Whether a parameter path is a dense routed-expert array."""
    return name.rsplit("/", 1)[-1] in _EXPERTS


def forward_params(params, dtypes, quantize=None):
    """Master weights -> the weights of the forward pass.

    Args:
      params: nested dict of float32 master weights.
      dtypes: the same tree of dtypes: the model's own choice (float32 for gates, convolutions and
        biases, the model dtype elsewhere).
      quantize: float32 array -> its MXFP4 values with a straight-through gradient, groups of 32
        along the last axis; None leaves the experts alone.
    """

    def cast(path, value, dtype):
        if quantize is not None and is_expert(path_name(path)):
            value = quantize(value)
        return value.astype(dtype)

    return jax.tree_util.tree_map_with_path(cast, params, dtypes)
