"""Packed MXFP4 weights in the order that Marlin's MoE kernel reads.

A tile is 16 of K by 64 of N. Its 1,024 codes lie as the 32 lanes of a warp need them for four
products of 16 x 16, eight codes a 32-bit word, in the order 0 2 4 6 1 3 5 7 in which two of them
are unpacked at once.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

TILE, PER_WORD = 16, 8


def code_order() -> np.ndarray:
    """int [1024]: place in a tile -> place in its four 16 x 16 squares, K first in each."""
    lanes = []
    for lane in range(32):
        first, column = 2 * (lane % 4), lane // 4
        rows = (first, first + 1, first + 8, first + 9)
        lanes.append([16 * row + column + half for half in (0, 8) for row in rows])
    one = np.array(lanes)  # [32, 8] of one square
    four = one[:, None] + 256 * np.arange(4)[:, None]  # a lane's part of each square
    return four.reshape(-1, PER_WORD)[:, [0, 2, 4, 6, 1, 3, 5, 7]].reshape(-1)


def scale_order() -> np.ndarray:
    """int [64]: eight columns that a lane uses, then how pairs of them are unpacked."""
    columns = np.arange(64).reshape(8, 8).T
    return columns.reshape(-1, 4)[:, [0, 2, 1, 3]].reshape(-1)


@jax.jit
def repacked(codes_ENk: jax.Array) -> jax.Array:
    """uint8 [E, N, K/2] -> int32 [E, K/16, 2 N], one expert at a time."""
    _, N, half = codes_ENk.shape
    K, order = 2 * half, code_order()

    def one(codes_Nk):
        nibbles_NK = jnp.stack([codes_Nk & 15, codes_Nk >> 4], -1).reshape(N, K)
        squares = nibbles_NK.T.reshape(K // TILE, TILE, N // TILE, TILE).swapaxes(1, 2)
        tiles = squares.reshape(K // TILE, -1, len(order))[..., order]
        words = tiles.reshape(K // TILE, -1, PER_WORD).astype(jnp.uint32)
        words = words << (4 * jnp.arange(PER_WORD, dtype=jnp.uint32))
        return lax.bitcast_convert_type(words.sum(-1, dtype=jnp.uint32), jnp.int32)

    return lax.map(one, codes_ENk)


@jax.jit
def reordered(scales_ENg: jax.Array) -> jax.Array:
    """uint8 [E, N, K/32] -> [E, K/32, N]."""
    E, N, G = scales_ENg.shape
    turned = scales_ENg.swapaxes(1, 2).reshape(E, G, -1, 64)
    return turned[..., scale_order()].reshape(E, G, N)
