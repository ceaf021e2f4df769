"""The experts in plain JAX: tiles of rows that share an expert, or every expert for every token."""

from __future__ import annotations

import functools
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.typing import DTypeLike

from k3jax.ops.situ import situ
from k3jax.quantization import mxfp8
from k3jax.quantization.mxfp4 import MXFP4

Weight = MXFP4 | jax.Array


class TileMap(NamedTuple):
    """Which expert each tile of rows belongs to, and which assignments its rows are.

    Assignment ``n * k + j`` is the j-th expert of token n. Only the first ``used`` tiles hold rows.
    """

    expert_T: jax.Array  # int32
    assignment_TM: jax.Array  # int32, N * k where a row is padding
    used: jax.Array  # int32


def tile_rows(tokens: int, k: int, num_experts: int) -> int:
    """Rows of a tile: an expert's mean load as a power of two in 8..128, at most ``tokens``."""
    mean = max(1, tokens * k // num_experts)
    return min(tokens, max(8, min(128, 1 << (mean - 1).bit_length())))


def tile_map(ids_Nk: jax.Array, num_experts: int, rows: int) -> TileMap:
    """Sorts the assignments by expert and cuts each expert's run into tiles of ``rows``.

    The number of tiles is static: A assignments over U = min(A, E) experts, each with at most
    rows - 1 rows of padding, need at most (A + U (rows - 1)) / rows tiles.
    """
    total = ids_Nk.size
    num_tiles = (total + min(total, num_experts) * (rows - 1)) // rows
    expert_A = ids_Nk.reshape(total)  # ids outside 0..E-1 sort outside the bounds below
    order_A = jnp.argsort(expert_A, stable=True).astype(jnp.int32)
    bounds = jnp.searchsorted(expert_A[order_A], jnp.arange(num_experts + 1, dtype=jnp.int32))
    begin_E, end_E = bounds[:-1].astype(jnp.int32), bounds[1:].astype(jnp.int32)

    tiles_E = (end_E - begin_E + rows - 1) // rows
    after_E = jnp.cumsum(tiles_E, dtype=jnp.int32)  # tiles up to and with this expert
    tile_T = jnp.arange(num_tiles, dtype=jnp.int32)
    expert_T = jnp.searchsorted(after_E, tile_T, side="right").astype(jnp.int32)
    expert_T = jnp.minimum(expert_T, num_experts - 1)
    first_T = begin_E[expert_T] + (tile_T - after_E[expert_T] + tiles_E[expert_T]) * rows
    row_TM = first_T[:, None] + jnp.arange(rows, dtype=jnp.int32)
    real_TM = row_TM < end_E[expert_T][:, None]
    assignment_TM = jnp.where(real_TM, order_A[jnp.minimum(row_TM, total - 1)], total)
    return TileMap(expert_T, assignment_TM, after_E[-1])


def _one_expert(w: Weight, e: jax.Array, dtype: DTypeLike) -> tuple[jax.Array, ...]:
    """Expert ``e`` of [E, out, in]: (weight,), or its even and odd columns where it is packed.

    The packed bytes are sliced first, then unpacked.
    """
    w = jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, e, keepdims=False), w)
    if not isinstance(w, MXFP4):
        return (w.astype(dtype),)
    # Without the constraint the layout that the product wants reaches back to the stack, and a TPU
    # transposes all experts of all layers first (20 GB a device at K3's size).
    codes = with_layout_constraint(w.codes, Layout((0, 1)))
    return MXFP4(codes, w.scales).halves(dtype)


def _dot(x_MI: jax.Array, parts: tuple[jax.Array, ...]) -> jax.Array:
    """[M, O] accumulated in float32 and rounded to the dtype of x."""
    x_MIp = x_MI.reshape(x_MI.shape[0], -1, len(parts))
    halves = [
        lax.dot_general(
            x_MIp[:, :, i],
            w_OI,
            (((1,), (1,)), ((), ())),
            precision=lax.Precision.HIGHEST,  # no TF32 or bfloat16 for float32 inputs
            preferred_element_type=jnp.float32,
        )
        for i, w_OI in enumerate(parts)
    ]
    return functools.reduce(jnp.add, halves).astype(x_MI.dtype)


class _Constants(NamedTuple):
    situ_beta: float
    situ_linear_beta: float | None
    rows: int
    num_experts: int
    out_dtype: jnp.dtype
    activations: str | None


def _activation(gate: jax.Array, up: jax.Array, beta, linear_beta, activations) -> jax.Array:
    """SiTU in the dtype of ``gate``: rounded to it, or straight from float32 to MXFP8."""
    if activations is None:
        return situ(gate, up, beta, linear_beta)
    wide = situ(gate.astype(jnp.float32), up.astype(jnp.float32), beta, linear_beta)
    return mxfp8.round_trip(wide).astype(gate.dtype)


def _mlp(constants: _Constants, z_ML, weight_M, w13, w2) -> jax.Array:
    """Weighted output of one expert for the rows of one tile, float32 [M, L]."""
    gate_MF, up_MF = jnp.split(_dot(z_ML, w13), 2, axis=-1)
    c = constants
    h_MF = _activation(gate_MF, up_MF, c.situ_beta, c.situ_linear_beta, c.activations)
    return _dot(h_MF, w2).astype(jnp.float32) * weight_M[:, None]


def _tile_inputs(z_NL, weights_Nk, assignment_M):
    """(token_M, z_ML, weight_M). Padding rows are zeros, not copies: a copied NaN would reach
    the weight gradients even with a zero cotangent."""
    token_M = assignment_M // weights_Nk.shape[1]
    z_ML = z_NL.at[token_M].get(mode="fill", fill_value=0)
    weight_M = weights_Nk.reshape(-1).at[assignment_M].get(mode="fill", fill_value=0)
    return token_M, z_ML, weight_M


# The loop runs only over used tiles, a number known at run time, which JAX does not differentiate;
# and its transposed form would add a whole zero-padded [E, 2F, L] a tile. So both are written out.
@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _tiles(constants: _Constants, z_NL, ids_Nk, weights_Nk, w13: Weight, w2: Weight, first):
    tiles = tile_map(ids_Nk, constants.num_experts, constants.rows)

    def add_tile(t, r_NL):
        e = tiles.expert_T[t] + first
        token_M, z_ML, weight_M = _tile_inputs(z_NL, weights_Nk, tiles.assignment_TM[t])
        out_ML = _mlp(
            constants, z_ML, weight_M, *(_one_expert(w, e, z_NL.dtype) for w in (w13, w2))
        )
        # A token's experts come in ascending order whatever its batch mates are.
        return r_NL.at[token_M].add(out_ML, mode="drop")

    r_NL = lax.fori_loop(0, tiles.used, add_tile, jnp.zeros(z_NL.shape, jnp.float32))
    return r_NL.astype(constants.out_dtype)


def _tiles_forward(constants, *arrays):
    return _tiles(constants, *arrays), arrays


def _tiles_backward(constants, arrays, dr_NL):
    z_NL, ids_Nk, weights_Nk, w13, w2, first = arrays
    tiles = tile_map(ids_Nk, constants.num_experts, constants.rows)
    dr_NL = dr_NL.astype(jnp.float32)

    def start(w):
        return None if isinstance(w, MXFP4) else jnp.zeros(w.shape, jnp.float32)

    def add_tile(t, carry):
        dz_NL, dweight_A, dw13, dw2 = carry
        e, assignment_M = tiles.expert_T[t] + first, tiles.assignment_TM[t]
        token_M, z_ML, weight_M = _tile_inputs(z_NL, weights_Nk, assignment_M)
        one = tuple(_one_expert(w, e, z_NL.dtype) for w in (w13, w2))
        _, pull = jax.vjp(partial(_mlp, constants), z_ML, weight_M, *one)
        dz_ML, dweight_M, dw13_e, dw2_e = pull(dr_NL.at[token_M].get(mode="fill", fill_value=0))
        dz_NL = dz_NL.at[token_M].add(dz_ML.astype(jnp.float32), mode="drop")
        dweight_A = dweight_A.at[assignment_M].add(dweight_M, mode="drop")
        dw13 = None if dw13 is None else dw13.at[e].add(dw13_e[0].astype(jnp.float32))
        dw2 = None if dw2 is None else dw2.at[e].add(dw2_e[0].astype(jnp.float32))
        return dz_NL, dweight_A, dw13, dw2

    carry = (
        jnp.zeros(z_NL.shape, jnp.float32),
        jnp.zeros(weights_Nk.size, jnp.float32),
        start(w13),
        start(w2),
    )
    dz_NL, dweight_A, dw13, dw2 = lax.fori_loop(0, tiles.used, add_tile, carry)
    return (
        dz_NL.astype(z_NL.dtype),
        None,
        dweight_A.reshape(weights_Nk.shape),
        None if dw13 is None else dw13.astype(w13.dtype),
        None if dw2 is None else dw2.astype(w2.dtype),
        None,
    )


_tiles.defvjp(_tiles_forward, _tiles_backward)


def tiles(
    z_NL: jax.Array,
    ids_Nk: jax.Array,
    weights_Nk: jax.Array,
    w13: Weight,
    w2: Weight,
    *,
    first: jax.Array | None,
    num_experts: int,
    out_dtype: jnp.dtype,
    situ_beta: float,
    situ_linear_beta: float | None,
    activations: str | None,
) -> jax.Array:
    """See :func:`k3jax.ops.grouped_matmul.experts`. Holds one unpacked expert at a time.

    Expert e is row ``first + e`` of the weights.
    """
    if ids_Nk.size == 0:
        return jnp.zeros(z_NL.shape, out_dtype)
    tokens, k = ids_Nk.shape
    rows = tile_rows(tokens, k, num_experts)
    constants = _Constants(situ_beta, situ_linear_beta, rows, num_experts, out_dtype, activations)
    z_NL = z_NL if activations is None else mxfp8.round_trip(z_NL)
    first = jnp.int32(0) if first is None else first
    return _tiles(constants, z_NL, ids_Nk, weights_Nk, w13, w2, first)


def dense(
    z_NL: jax.Array,
    ids_Nk: jax.Array,
    weights_Nk: jax.Array,
    w13: Weight,
    w2: Weight,
    *,
    first: jax.Array | None,
    num_experts: int,
    out_dtype: jnp.dtype,
    situ_beta: float,
    situ_linear_beta: float | None,
    activations: str | None,
) -> jax.Array:
    """See :func:`k3jax.ops.grouped_matmul.experts`. E / k times the arithmetic.

    What a token did not choose is replaced by zero before weighting, since 0 * inf is NaN. That
    holds for the value; a NaN among the weights of an unchosen expert still reaches gradients.
    """
    dtype = z_NL.dtype
    z_NL = z_NL if activations is None else mxfp8.round_trip(z_NL)
    if first is not None:
        cut = lambda a: lax.dynamic_slice_in_dim(a, first, num_experts)  # noqa: E731
        w13, w2 = jax.tree.map(cut, (w13, w2))
    w13, w2 = (w.unpack(dtype) if isinstance(w, MXFP4) else w.astype(dtype) for w in (w13, w2))
    chosen_NkE = ids_Nk[:, :, None] == jnp.arange(w13.shape[0], dtype=jnp.int32)
    combine_NE = jnp.where(chosen_NkE, weights_Nk[:, :, None], 0.0).sum(axis=1)
    chosen_NE = chosen_NkE.any(axis=1)

    einsum = partial(
        jnp.einsum, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
    gate_ENF, up_ENF = jnp.split(einsum("nl,eol->eno", z_NL, w13).astype(dtype), 2, axis=-1)
    h_ENF = _activation(gate_ENF, up_ENF, situ_beta, situ_linear_beta, activations)
    y_ENL = einsum("enf,elf->enl", h_ENF, w2).astype(dtype)
    y_ENL = jnp.where(chosen_NE.T[:, :, None], y_ENL, 0).astype(jnp.float32)
    return (y_ENL * combine_NE.T[:, :, None]).sum(axis=0).astype(out_dtype)
