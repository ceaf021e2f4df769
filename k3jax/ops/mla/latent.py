"""Kernels of attention in the latent space, and what is done around them.

A kernel takes absorbed queries of all heads and the cache rows that a query may see, a range or a
selection, and gives softmax-weighted rows. It serves dense MLA, DSA, and devices that hold a share
of the rows each.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from k3jax.ops import target
from k3jax.ops.choice import Kernel
from k3jax.ops.mla import blocks, mosaic_gpu, xla
from k3jax.ops.rows import Rows

if TYPE_CHECKING:
    from k3jax.ops.mla import Spread

Attention = Callable[..., tuple[jax.Array, jax.Array]]

# name -> f(q_BTHC, rows, where, *, scale, width) -> (o_BTHW float32, lse_BTH float32)
#
# q_BTHC are absorbed queries, ``rows`` a view [B, S, C] of the same dtype, ``where`` is
# ("positions", int32_BT): a query sees rows s <= position, none at -1; or ("indices", int32_BTk):
# it sees those rows, negative entries and those past the cache are absent. With scores
# scale * q . row in float32, ``o`` is softmax(scores) times the first ``width`` columns of the rows
# and ``lse`` the log of the sum of exp(scores); zeros and -inf for a query that sees no row. Rows
# that nobody sees may hold anything, NaN included.
LATENT: dict[str, Attention] = {"mosaic_gpu": mosaic_gpu.latent}

# What "auto" tries, in this order; refusals take (q_BTHQ, rows, w_k_HNC, where).
KERNELS: dict[str, Kernel] = {"mosaic_gpu": Kernel(target.is_hopper, mosaic_gpu.refusal)}

QUERIES = 1024
"""Queries at a time before a kernel: 304 KiB each, absorbed and attended, at K3's sizes."""


def attention(
    name, q_BTHQ, rows: Rows, w_k_HNC, w_v_HVC, where, *, scale, spread: Spread | None = None,
    query_block: int | None = None, key_block: int | None = None,
) -> jax.Array:  # fmt: skip
    """``k3jax.ops.mla.dispatch`` with a kernel; its gradient is that of the portable form."""
    del key_block  # a kernel's own
    options = {"scale": scale, "spread": spread}
    forward = functools.partial(_attention, LATENT[name], query_block=query_block or QUERIES)
    if spread is not None:  # for inference
        return forward(q_BTHQ, rows, w_k_HNC, w_v_HVC, where, **options)
    kind, value = where

    @jax.custom_vjp
    def run(q_BTHQ, rows, w_k_HNC, w_v_HVC, value):
        return forward(q_BTHQ, rows, w_k_HNC, w_v_HVC, (kind, value), **options)

    def keep(*inputs):
        return run(*inputs), inputs

    def pull(inputs, cotangent):
        from k3jax.ops.mla import portable

        def form(q_BTHQ, stack, w_k_HNC, w_v_HVC):
            view = jax.tree.unflatten(structure, [stack, *rest])
            at = (kind, inputs[-1])
            return portable("absorbed", q_BTHQ, view, w_k_HNC, w_v_HVC, at, scale=scale)

        (stack, *rest), structure = jax.tree.flatten(inputs[1])
        q, stack, w_k, w_v = jax.vjp(form, inputs[0], stack, *inputs[2:4])[1](cotangent)
        return q, jax.tree.unflatten(structure, [stack, *[None] * len(rest)]), w_k, w_v, None

    run.defvjp(keep, pull)
    return run(q_BTHQ, rows, w_k_HNC, w_v_HVC, value)


def _attention(
    kernel, q_BTHQ, rows, w_k_HNC, w_v_HVC, where, *, scale, spread, query_block
) -> jax.Array:
    kind, value = where
    width = w_v_HVC.shape[-1]

    def one_block(q_BTHQ, value):
        live_BT = value >= 0 if kind == "positions" else (value >= 0).any(-1)
        if spread is None:
            q_BTHQ = jnp.where(live_BT[..., None, None], q_BTHQ, 0)
        q_BTHC = xla.absorb_query(q_BTHQ, w_k_HNC)
        if spread is not None:
            q_BTHC = spread.queries(q_BTHC)
        o_BTHW, lse_BTH = kernel(q_BTHC, rows, (kind, value), scale=scale, width=width)
        if spread is not None:
            total = spread.merge(blocks.Partial(o_BTHW, lse_BTH, jnp.ones_like(lse_BTH)))
            o_BTHW = blocks.normalise(total)
        return xla.value_from_latent(o_BTHW.astype(q_BTHQ.dtype), w_v_HVC)

    return blocks.over_queries(one_block, query_block, (q_BTHQ, value), (0, -1))
