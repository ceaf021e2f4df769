"""Bounded memory for attention: block sizes from a byte budget, query blocks, online softmax."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

BUDGET_BYTES = 256 * 2**20
"""Temporaries one attention op aims at, counted on the global (unsharded) shapes."""

QUERY_BLOCK = 128
"""Query rows beside which key blocks are sized, once scores no longer fit in one piece."""

KEY_BLOCK_FLOOR = 512
"""Query blocks shrink before key blocks become shorter than this."""


def einsum(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """A product accumulated in float32, at full precision for float32 inputs.

    Without HIGHEST a TPU multiplies float32 in bf16. For bf16 inputs the cotangent is rounded to
    bf16 too, so that the backward products run on the same matrix units as the forward one.
    """
    if a.dtype == jnp.float32:
        return _product(subscripts, a, b)
    return _einsum_bfloat16(subscripts, a, b)


def _product(subscripts, a, b):
    return jnp.einsum(
        subscripts,
        *(a, b),
        precision=jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _einsum_bfloat16(subscripts, a, b):
    # XLA:CPU refuses some layouts of bf16 x bf16 -> float32 ("bthn,hnc->bthc" among them, at run
    # time: "Unsupported element type for DotThunk"). Decided at lowering, so that a program
    # compiled on a CPU host for another platform keeps its bf16 products.
    return jax.lax.platform_dependent(
        *(a, b),
        cpu=lambda a, b: _product(subscripts, a.astype(jnp.float32), b.astype(jnp.float32)),
        default=functools.partial(_product, subscripts),
    )


def _einsum_forward(subscripts, a, b):
    return _einsum_bfloat16(subscripts, a, b), (a, b)


def _einsum_backward(subscripts, inputs, g):
    def pull(a, b, g):
        return jax.vjp(functools.partial(jnp.einsum, subscripts), a, b)[1](g)

    def pull_float32(a, b, g):
        grads = pull(*(x.astype(jnp.float32) for x in (a, b, g)))
        return tuple(x.astype(a.dtype) for x in grads)

    a, b = inputs
    return jax.lax.platform_dependent(a, b, g.astype(a.dtype), cpu=pull_float32, default=pull)


_einsum_bfloat16.defvjp(_einsum_forward, _einsum_backward)


def power_of_two(n: int) -> int:
    """The largest power of two up to ``n``, at least 1."""
    return 1 << (max(n, 1).bit_length() - 1)


def plan(
    queries: int,
    keys: int,
    *,
    pair: int,
    per_key: int = 0,
    per_query: int = 0,
    key_floor: int = KEY_BLOCK_FLOOR,
    budget: int | None = None,
) -> tuple[int, int]:
    """Sizes (query block, key block) whose temporaries stay within a budget.

    A block of t queries and s keys costs ``t*s*pair + s*per_key + t*per_query`` bytes. One piece
    when everything fits; else whole keys under a query block of at least QUERY_BLOCK rows; else
    both are cut. Sizes below the floors are not tried, so a huge batch can exceed the budget.
    """
    budget = BUDGET_BYTES if budget is None else budget
    if queries * keys * pair + keys * per_key + queries * per_query <= budget:
        return queries, keys
    query_block = (budget - keys * per_key) // (keys * pair + per_query)
    if query_block >= min(queries, QUERY_BLOCK):
        return min(queries, power_of_two(query_block)), keys
    query_block = min(queries, QUERY_BLOCK)
    while True:
        key_block = (budget - query_block * per_query) // (query_block * pair + per_key)
        if key_block >= min(keys, key_floor) or query_block == 1:
            break
        query_block = max(1, query_block // 2)
    return query_block, min(keys, max(power_of_two(key_block), min(key_floor, 128)))


def over_queries(function: Callable, block: int, arrays: tuple, fills: tuple):
    """``function(*arrays)`` on blocks of axis 1, one after another, joined along axis 1 again.

    Arrays and results are [B, T, ...] with any B; a last short block is filled with ``fills`` (the value that marks a
    query as padding) and cut off again. Each block is rematerialised in a backward pass, so a
    training step holds the scores of one block.
    """
    length = arrays[0].shape[1]
    if block >= length:
        return function(*arrays)
    count = -(-length // block)

    def split(array, fill):
        widths = [(0, 0), (0, count * block - length)] + [(0, 0)] * (array.ndim - 2)
        array = jnp.pad(array, widths, constant_values=jnp.asarray(fill, array.dtype))
        array = array.reshape(array.shape[0], count, block, *array.shape[2:])
        return jnp.moveaxis(array, 1, 0)

    blocks = tuple(split(a, f) for a, f in zip(arrays, fills, strict=True))
    out = jax.lax.map(jax.checkpoint(lambda xs: function(*xs), prevent_cse=False), blocks)

    def join(out):
        out = jnp.moveaxis(out, 0, 1)
        return out.reshape(out.shape[0], count * block, *out.shape[3:])[:, :length]

    return jax.tree.map(join, out)


def over_keys(step: Callable, init, keys: int, block: int, last: jax.Array):
    """Fold ``step(carry, start, fresh_S)`` over key blocks [start, start + block).

    The last block is moved back to end at ``keys`` (nothing is padded or copied); ``fresh_S`` is
    False on the rows that an earlier block had already. Blocks that start after ``last``, the
    highest position any query attends to, are skipped.
    """

    def body(carry, i):
        start = jnp.minimum(i * block, keys - block)
        fresh_S = start + jnp.arange(block, dtype=jnp.int32) >= i * block
        run = jax.checkpoint(lambda c: step(c, start, fresh_S), prevent_cse=False)
        return jax.lax.cond(i * block <= last, run, lambda c: c, carry), None

    return jax.lax.scan(body, init, jnp.arange(-(-keys // block), dtype=jnp.int32))[0]


class Partial(NamedTuple):
    """Attention over some of the keys, before normalisation. All float32.

    Attributes:
      acc_XMV: sum of exp(score - top) * value.
      top_XM: highest score, -inf where no key is allowed.
      sum_XM: sum of exp(score - top).
    """

    acc_XMV: jax.Array
    top_XM: jax.Array
    sum_XM: jax.Array


def empty_partial(shape: tuple[int, ...], width: int) -> Partial:
    """The neutral element of ``merge`` for rows of ``shape`` and values of ``width``."""
    zeros = jnp.zeros(shape, jnp.float32)
    return Partial(jnp.zeros((*shape, width), jnp.float32), zeros - jnp.inf, zeros)


def partial_attention(q_XMD, k_XSD, v_XSV, mask_XMS, scale: float) -> Partial:
    """Scores, mask and weighted values of one piece; X stands for shared leading axes.

    ``k`` and ``v`` must be finite also where the mask is False (0 * NaN is NaN).
    """
    score_XMS = einsum("...md,...sd->...ms", q_XMD, k_XSD) * scale
    score_XMS = jnp.where(mask_XMS, score_XMS, -jnp.inf)
    # The result does not depend on the subtracted maximum, so no gradient passes through it.
    top_XM = jax.lax.stop_gradient(score_XMS.max(-1))
    p_XMS = jnp.exp(score_XMS - _finite(top_XM)[..., None])
    acc_XMV = einsum("...ms,...sv->...mv", p_XMS.astype(v_XSV.dtype), v_XSV)
    return Partial(acc_XMV, top_XM, p_XMS.sum(-1))


def merge(a: Partial, b: Partial) -> Partial:
    """Two partial results over disjoint keys as one (online softmax, Milakov and Gimelshein)."""
    top_XM = jnp.maximum(a.top_XM, b.top_XM)
    a, b = rescale(a, top_XM), rescale(b, top_XM)
    return Partial(a.acc_XMV + b.acc_XMV, top_XM, a.sum_XM + b.sum_XM)


def reshape(p: Partial, rows: tuple[int, ...]) -> Partial:
    """The same sums with other leading axes."""
    return Partial(p.acc_XMV.reshape(*rows, -1), p.top_XM.reshape(rows), p.sum_XM.reshape(rows))


def rescale(p: Partial, top_XM: jax.Array) -> Partial:
    """The same sums relative to ``top_XM``, which is at least ``p.top_XM``."""
    scale_XM = jnp.exp(p.top_XM - _finite(top_XM))
    return Partial(p.acc_XMV * scale_XM[..., None], top_XM, p.sum_XM * scale_XM)


def normalise(p: Partial) -> jax.Array:
    """The attention output in float32; zeros where no key is allowed."""
    return p.acc_XMV / jnp.where(p.top_XM == -jnp.inf, 1.0, p.sum_XM)[..., None]


def _finite(top_XM):
    return jnp.where(top_XM == -jnp.inf, 0.0, top_XM)
