"""What the Mosaic TPU kernels that read a cache share: its rows stay in HBM, and are copied from
there by block or one by one.

A kernel gets the stack whole, the layer as a prefetched scalar and the pages of one sequence in
scalar memory, so nothing is sliced or copied before it. Blocks are copied in pieces that lie within
a page each. A tile of bfloat16 holds the rows of a pair in the halves of 32-bit words, and a copy
cannot start inside a word: single rows are copied as pairs.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from k3jax.ops.rows import Rows

LANES, SUBLANES = 128, 8  # of a tile of 32-bit numbers
VMEM_LIMIT = 56 * 2**20
"""Bytes a kernel may use; a v5p and a core of a TPU7x have 64 MiB, v5e and v6e 128."""

PARAMETERS = pltpu.CompilerParams(
    dimension_semantics=("parallel", "parallel"),
    vmem_limit_bytes=VMEM_LIMIT,
    disable_bounds_checks=True,
)
"""Of a kernel over sequences and groups of queries. Every index is brought within bounds before it
is used; checks would be half of the cycles to copy a single row (38, without them 19)."""

MAX_PAGES = 65_536
"""Pages of a sequence. Two rows of the table, for the pipeline, are then half of scalar memory."""


def refusal(rows: Rows) -> str | None:
    """Why a kernel cannot read these rows where they lie; None if it can."""
    if rows.dtype not in (jnp.float32, jnp.bfloat16):
        return f"rows are {rows.dtype}, not float32 or bfloat16"
    if rows.page % SUBLANES:
        return f"{rows.page} rows a page, no multiple of the {SUBLANES} of a tile"
    if rows.shape[1] // rows.page > MAX_PAGES:
        return f"{rows.shape[1] // rows.page} pages a sequence, over {MAX_PAGES}"
    return None


def operands(rows: Rows) -> tuple[Array, Array, Array]:
    """(layer int32 [1], pages int32 [B, 1, M], stack [L, N, P, C]) of a view."""
    stack, layer = rows.stack, rows.layer
    if layer is None:
        stack, layer = stack[None], 0
    return jnp.asarray(layer, jnp.int32).reshape(1), rows.pages()[:, None], stack


def pages_spec(pages_B1M: Array) -> pl.BlockSpec:
    """The pages of one sequence, in scalar memory; the grid leads with sequences."""
    return pl.BlockSpec(
        (1, 1, pages_B1M.shape[2]), lambda b, *_: (b, 0, 0), memory_space=pltpu.SMEM
    )


def _place(pages_ref, page: int, at):
    """(entry, row) of row ``at`` of the sequence, which exists."""
    if pages_ref.shape[2] == 1:
        return pages_ref[0, 0, 0], at
    return pages_ref[0, 0, jax.lax.div(at, page)], jax.lax.rem(at, page)


def start_block(stack_ref, layer, pages_ref, start, block_ref, semaphore) -> None:
    """Starts to copy rows ``start`` and on into ``block_ref`` [rows, C]; ends as `wait` says.

    ``start`` is a multiple of the block's rows. Past the last row come some rows once more.
    """
    rows, page = block_ref.shape[0], stack_ref.shape[2]
    piece = math.gcd(rows, page)
    last = pages_ref.shape[2] * page - piece

    def copy(i, _):
        entry, row = _place(pages_ref, page, jnp.minimum(start + i * piece, last))
        pltpu.make_async_copy(
            stack_ref.at[layer, entry, pl.ds(pl.multiple_of(row, piece), piece)],
            block_ref.at[pl.ds(pl.multiple_of(i * piece, piece), piece)],
            semaphore,
        ).start()

    jax.lax.fori_loop(0, rows // piece, copy, None, unroll=rows // piece <= 8)


def each_block(stack_ref, layer, pages_ref, count, blocks_ref, semaphores, use) -> None:
    """``use(i, block_ref)`` on blocks 0, 1, .. ``count - 1`` of rows, each copied while the one
    before is used. ``blocks_ref`` is [2, rows, C], with a semaphore each."""

    def fetch(i):
        slot, start = jax.lax.rem(i, 2), i * blocks_ref.shape[1]
        block_ref = blocks_ref.at[slot]
        start_block(stack_ref, layer, pages_ref, start, block_ref, semaphores.at[slot])

    @pl.when(count > 0)
    def _():
        fetch(0)

    def step(i, _):
        slot = jax.lax.rem(i, 2)

        @pl.when(i + 1 < count)
        def _():
            fetch(i + 1)

        wait(blocks_ref.at[slot], semaphores.at[slot])
        use(i, blocks_ref.at[slot])

    jax.lax.fori_loop(0, count, step, None)


def start_row(stack_ref, layer, pages_ref, at, block_ref, row, semaphore) -> None:
    """Starts to copy row ``at`` of the sequence, or its pair, to a row of ``block_ref``.

    The address is that of a tile and a place within it. In one step the compiler counts 4-byte
    words from the start of the stack in 32 bits, which ends at 16 GiB.
    """
    entry, source = _place(pages_ref, stack_ref.shape[2], at)
    first = pl.multiple_of(source & -SUBLANES, SUBLANES)
    tile_ref, place = stack_ref.at[layer, entry, pl.ds(first, SUBLANES)], source & (SUBLANES - 1)
    if stack_ref.dtype == jnp.bfloat16:
        tile_ref, place = tile_ref.bitcast(jnp.uint32), place >> 1
    pltpu.make_async_copy(
        tile_ref.at[pl.ds(place, 1)], block_ref.at[pl.ds(row, 1)], semaphore
    ).start()


def halves(words_SC, at_S1, dtype):
    """Rows [S, C] out of copied words: row ``at`` is the half of its pair that it is in."""
    if dtype == jnp.float32:
        return words_SC
    even = jax.lax.rem(at_S1, 2) == 0
    bits_SC = jnp.where(even, words_SC << 16, words_SC & jnp.uint32(0xFFFF0000))
    return jax.lax.bitcast_convert_type(bits_SC, jnp.float32).astype(dtype)


def wait(block_ref, semaphore) -> None:
    """Until as many bytes have come as the block holds."""
    pltpu.make_async_copy(block_ref, block_ref, semaphore).wait()


def column(row_1X: Array) -> Array:
    """[X, LANES]: a row of 32-bit numbers along sublanes, the same in every lane."""
    return jnp.broadcast_to(row_1X, (LANES, row_1X.shape[1])).T


def dot(a, b, contract: tuple[int, int]):
    """A product in float32: bfloat16 in one pass, float32 at full precision."""
    exact = a.dtype == jnp.float32
    return jax.lax.dot_general(
        a,
        b,
        (((contract[0],), (contract[1],)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if exact else jax.lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )
