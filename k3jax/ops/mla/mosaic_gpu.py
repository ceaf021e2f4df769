"""Latent attention as a Pallas kernel for Hopper GPUs (Mosaic GPU).

A block has one query with up to 96 heads and a range of its keys, in steps of 64. Operands are
swapped, so that heads are columns and need no filling up to 64: scores^T = keys @ q^T and
o^T += keys^T @ p^T, both with keys in shared memory as the left operand.

* Two warpgroups compute. Each makes the scores of half of the heads and holds half of the 512
  columns of o for all of them; weights p go from one to the other through shared memory.
* A third one copies rows, from wherever each stands, into a ring of chunks of 64 keys and 64
  columns. A chunk is free again as soon as its columns of o are done, so the ring needs no room
  for two whole steps: at 96 heads q takes 108 KiB of the 227.

The subtracted maximum of a head moves only when scores exceed it by 8 powers of two: weights stay
below 256, with the same relative precision, and o is hardly ever rescaled.

Few queries leave the chip empty, so their keys are cut into parts for blocks of their own, whose
outputs a second kernel merges.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from k3jax.ops.mla import mosaic_gpu_parts as parts
from k3jax.ops.mosaic_gpu import (
    COLUMNS,
    LANE,
    LOG2E,
    PARAMETERS,
    ROWS,
    Interpret,
    by_column,
    by_row,
    mode,
    products,
    smem,
)
from k3jax.ops.rows import Rows

ROW = 576
WIDTH = 512
HEADS = 48  # of a block, at most
BLOCKS = 132  # of an H200 or H100
CHUNKS = ROW // parts.CHUNK
# Chunks in the order they are copied and let go: the last columns first, which only scores need,
# then those of both warpgroups in turn.
ORDER = (8, 0, 4, 1, 5, 2, 6, 3, 7)
TILES = WIDTH // parts.CHUNK // 2  # chunks of o of one warpgroup
SHARED = 232448  # bytes
SLACK = 8.0  # powers of two that scores may exceed their maximum by
MERGED = plgpu.Layout.WG_STRIDED((WIDTH,), vec_size=4)
LOWEST = -1e30  # a maximum before the first score

_f32, _bf16, _i32 = jnp.float32, jnp.bfloat16, jnp.int32


def refusal(q_BTHQ, rows, w_k_HNC, where) -> str | None:
    """Why the kernel cannot take these inputs; None if it can."""
    del where
    if q_BTHQ.dtype != _bf16:
        return f"q is {q_BTHQ.dtype}, not bfloat16"
    if rows.shape[-1] != ROW or w_k_HNC.shape[-1] != WIDTH:
        return f"rows of {rows.shape[-1]} and values of {w_k_HNC.shape[-1]}, not {ROW} and {WIDTH}"
    if math.prod(rows.stack.shape[:-1]) >= 2**31:
        return "the stack has 2^31 rows or more"
    return None


def ring(heads: int) -> int:
    """Chunks of the ring beside everything else in shared memory."""
    left = SHARED - heads * ((ROW + parts.BLOCK) * 2 + parts.THREADS) - 5120
    return min(left // (parts.BLOCK * parts.CHUNK * 2), 2 * CHUNKS - 1)


def _kernel(
    q_g, stack_g, where_g, bases_g, o_g, lse_g,
    q_s, ring_s, p_s, bias_s, top_s, scale_s, weight_s, scratch_s, need_s,
    arrived, filled, free, meet,
    *, kind, queries, keys, splits, page, scale, interpret,
):  # fmt: skip
    unit, split, part = (lax.axis_index(x) for x in ("unit", "split", "heads"))
    warpgroup = lax.axis_index("warpgroup")
    heads, slots = p_s.shape[0], ring_s.shape[0]
    half = heads // 2
    behind = min(slots - CHUNKS, 4)
    batch = unit // queries
    if kind == "indices":
        limit, count = _i32(keys), _i32(where_g.shape[1] // parts.BLOCK)
    else:
        limit = jnp.minimum(where_g[unit, 0] + 1, keys)
        count = (limit + parts.BLOCK - 1) // parts.BLOCK
    share = (count + splits - 1) // splits
    begin = split * share
    count = jnp.clip(count - begin, 0, share)
    slot_of = lambda g: lax.rem(g, _i32(slots))  # noqa: E731
    wrapped = lambda slot: jnp.where(slot >= slots, slot - slots, slot)  # noqa: E731

    @pl.when(warpgroup == 2)
    def _():
        plgpu.set_max_registers(40, action="decrease")
        mine = pl.ds(part * heads, heads)
        plgpu.copy_gmem_to_smem(q_g.at[unit, mine], q_s, arrived)

        def find(n):
            return parts.rows(
                *(begin + n, kind, where_g, bases_g, bias_s.at[lax.rem(n, _i32(2))]),
                *(unit, batch, limit),
                page=page,
                interpret=interpret,
            )

        def step(n, carry):
            found = find(n)

            def chunk(c, carry):
                slot, last = carry  # places of this chunk and of the one known to be there
                g = n * CHUNKS + c
                pl.when(g >= slots)(lambda: plgpu.barrier_wait(free.at[slot]))
                column = jnp.where(c == 0, CHUNKS - 1, c // 2 + jnp.where(c % 2 == 0, TILES - 1, 0))
                parts.copy(stack_g, found, column, ring_s.at[slot], interpret=interpret)
                parts.copied(behind, interpret=interpret)
                pl.when(g >= behind)(lambda: plgpu.barrier_arrive(filled.at[last]))
                return wrapped(slot + 1), jnp.where(g >= behind, wrapped(last + 1), last)

            return lax.fori_loop(0, CHUNKS, chunk, carry)

        lax.fori_loop(0, count, step, (_i32(0), _i32(0)))
        parts.copied(0, interpret=interpret)

        def finish(g, _):
            plgpu.barrier_arrive(filled.at[slot_of(g)])
            return ()

        def drain(g, _):
            plgpu.barrier_wait(free.at[slot_of(g)])
            return ()

        chunks = count * CHUNKS
        lax.fori_loop(lax.max(chunks - behind, 0), chunks, finish, ())
        lax.fori_loop(lax.max(chunks - slots, 0), chunks, drain, ())

    @pl.when(warpgroup < 2)
    def _():
        plgpu.set_max_registers(232, action="increase")
        own = pl.ds(warpgroup * half, half)
        scratch = scratch_s.at[warpgroup]
        shape, wide = (parts.BLOCK, half), (parts.CHUNK, heads)
        spread = lambda x: plgpu.layout_cast(x, COLUMNS)  # noqa: E731
        top_s[own] = spread(jnp.full((half,), LOWEST, _f32))
        parts.clear_own(weight_s.at[warpgroup], half, interpret=interpret)
        plgpu.commit_smem()
        plgpu.barrier_wait(arrived)

        def meeting(which):
            plgpu.barrier_arrive(meet.at[which])
            plgpu.barrier_wait(meet.at[which])

        def scores(begin):
            def chunk(c):
                slot = wrapped(begin + c)
                plgpu.barrier_wait(filled.at[slot])
                q = q_s.at[own, pl.ds(ORDER[c] * parts.CHUNK, parts.CHUNK)]
                return ring_s.at[slot], q.transpose((1, 0))

            if interpret:
                return products((shape, None, [chunk(c) for c in range(CHUNKS)]), interpret=True)[0]

            def issue(accumulator):
                for c in range(CHUNKS):
                    plgpu.wgmma(accumulator, *chunk(c))
                return accumulator[...]

            return pl.run_scoped(issue, plgpu.ACC(shape, _f32))

        def step(n, carry):
            *o, first = carry  # place of the first chunk of this step
            x = scores(first) * (scale * LOG2E)
            # Only behind the first chunk of a step is this there.
            bias = plgpu.load(bias_s.at[lax.rem(n, _i32(2))], layout=ROWS)
            # Not a sum: a query without rows may hold NaN.
            x = jnp.where(by_row(bias, shape) < 0, -jnp.inf, x)
            top = plgpu.load(top_s.at[own], layout=COLUMNS)
            need_s[warpgroup] = parts.above(x - by_column(top, shape), SLACK, interpret=interpret)
            meeting(0)  # after this one nobody reads the weights before
            rise = need_s[0] + need_s[1] > 0

            @pl.when(rise)
            def _():
                new = jnp.maximum(top, parts.largest(x, scratch, interpret=interpret))
                factor = jnp.exp2(top - new)
                top_s[own] = new
                scale_s[own] = factor
                parts.scale_own(weight_s.at[warpgroup], factor, interpret=interpret)
                plgpu.commit_smem()

            top = plgpu.load(top_s.at[own], layout=COLUMNS)
            p = jnp.exp2(x - by_column(top, shape))
            parts.add_own(weight_s.at[warpgroup], p, interpret=interpret)
            p_s.at[own].transpose((1, 0))[...] = p.astype(_bf16)
            plgpu.commit_smem()
            meeting(1)

            def rescale(*o):
                factor = by_column(plgpu.load(scale_s, layout=COLUMNS), wide)
                return tuple(x * factor for x in o)

            o = lax.cond(rise, rescale, lambda *o: o, *o)
            slots_o = [wrapped(first + 1 + 2 * j + warpgroup) for j in range(TILES)]

            def release(j):
                if j < 0:
                    plgpu.barrier_arrive(free.at[first])
                else:
                    plgpu.barrier_arrive(free.at[slots_o[j]])

            pl.when(warpgroup == 0)(lambda: release(-1))
            p_T = p_s.transpose((1, 0))
            values = [ring_s.at[x].transpose((1, 0)) for x in slots_o]
            if interpret:
                o = products(
                    *[(wide, x, [(v, p_T)]) for x, v in zip(o, values, strict=True)],
                    interpret=True,
                )
                for j in range(TILES):
                    release(j)
            else:

                def issue(accumulators):
                    for accumulator, v in zip(accumulators, values, strict=True):
                        plgpu.wgmma(accumulator, v, p_T)
                    for j in range(TILES):
                        plgpu.wgmma_wait(TILES - 1 - j)
                        release(j)

                o = pl.run_state(issue)([plgpu.ACC.init(x) for x in o])
            return (*o, wrapped(first + CHUNKS))

        zeros = lambda shape: plgpu.layout_cast(jnp.zeros(shape, _f32), parts.WGMMA)  # noqa: E731
        carry = (*[zeros(wide) for _ in range(TILES)], _i32(0))
        *o, _ = lax.fori_loop(0, count, step, carry)
        weight = parts.total(weight_s.at[warpgroup], half, scratch, interpret=interpret)
        seen = weight != 0  # true for a NaN
        top = plgpu.load(top_s.at[own], layout=COLUMNS)
        lse = jnp.where(seen, (top + jnp.log2(weight)) * (1 / LOG2E), -jnp.inf)
        lse_w = lse_g.at[unit, split, pl.ds(part * heads + warpgroup * half, half)]
        parts.store_columns(lse, lse_w, interpret=interpret)
        top_s[own] = jnp.where(seen, 1.0 / weight, 0.0)
        meeting(0)
        factor = by_column(plgpu.load(top_s, layout=COLUMNS), wide)
        for j, x in enumerate(o):
            columns = pl.ds((warpgroup * TILES + j) * parts.CHUNK, parts.CHUNK)
            to = o_g.at[unit, split, pl.ds(part * heads, heads), columns]
            parts.store_transposed(x * factor, to, interpret=interpret)


def _merge_kernel(o_g, lse_g, merged_g, total_g):
    """One head of one query: a thread has 4 of the 512 columns, of every part."""
    unit, head = lax.axis_index("unit"), lax.axis_index("head")
    lse = [lse_g[unit, s, head] for s in range(lse_g.shape[1])]
    top = functools.reduce(jnp.maximum, lse)
    safe = jnp.where(top == -jnp.inf, 0.0, top)
    shares = [jnp.exp2((x - safe) * LOG2E) for x in lse]
    whole = functools.reduce(lax.add, shares)
    parts_o = [
        plgpu.load(o_g.at[unit, s, head], layout=MERGED, optimized=False) * share
        for s, share in enumerate(shares)
    ]
    seen = whole != 0  # true for a NaN
    merged_g[unit, head] = functools.reduce(lax.add, parts_o) * jnp.where(seen, 1.0 / whole, 0.0)
    total_g[unit, head] = jnp.where(seen, safe + jnp.log2(whole) * (1 / LOG2E), -jnp.inf)


def _merge(o_USHW, lse_USH, *, interpret):
    """Outputs of parts of the keys, and their log-sum-exps, as those of all keys."""
    units, _, heads, _ = o_USHW.shape
    return plgpu.kernel(
        _merge_kernel,
        out_type=[
            jax.ShapeDtypeStruct((units, heads, WIDTH), _f32),
            jax.ShapeDtypeStruct((units, heads), _f32),
        ],
        grid=(heads, units),
        grid_names=("head", "unit"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=LANE, approx_math=True),
        interpret=mode(interpret),
    )(o_USHW, lse_USH)


def latent(
    q_BTHC, rows: Rows, where, *, scale: float, width: int, interpret: Interpret = False,
    splits: int | None = None,
):  # fmt: skip
    """A kernel of `k3jax.ops.mla.latent.LATENT`; inputs as `refusal` wants them.

    Args:
      interpret: whether to run in interpret mode, on a CPU; with parameters, how.
      splits: into how many parts the keys of a query are cut; chosen by default.
    """
    kind, value = where
    batch, queries, heads, _ = q_BTHC.shape
    units, keys = batch * queries, rows.shape[1]
    groups = -(-heads // HEADS)  # of heads, a block each
    group = -(-heads // (groups * 16)) * 16
    q_UHC = q_BTHC.reshape(units, heads, ROW)
    if groups * group != heads:
        q_UHC = jnp.pad(q_UHC, ((0, 0), (0, groups * group - heads), (0, 0)))
    entries = rows.stack.shape[-3]
    page_BM = rows.pages() if rows.layer is None else rows.pages() + rows.layer * entries
    where_UX = value.reshape(units, -1)
    blocks = -(-keys // parts.BLOCK)
    if kind == "indices":
        blocks = -(-where_UX.shape[1] // parts.BLOCK)
        fill = blocks * parts.BLOCK - where_UX.shape[1]
        if fill:
            where_UX = jnp.pad(where_UX, ((0, 0), (0, fill)), constant_values=parts.ABSENT)
    if splits is None:
        splits = max(1, min(BLOCKS // (units * groups), blocks))
    o_USHW, lse_USH = plgpu.kernel(
        functools.partial(
            _kernel,
            kind=kind,
            queries=queries,
            keys=keys,
            splits=splits,
            page=rows.page,
            scale=scale,
            interpret=interpret,
        ),
        out_type=[
            jax.ShapeDtypeStruct((units, splits, groups * group, WIDTH), _f32),
            jax.ShapeDtypeStruct((units, splits, groups * group), _f32),
        ],
        scratch_types=[
            smem((group, ROW), _bf16),
            smem((ring(group), parts.BLOCK, parts.CHUNK), _bf16),
            smem((group, parts.BLOCK), _bf16),
            plgpu.SMEM((2, parts.BLOCK), _f32),
            plgpu.SMEM((group,), _f32),
            plgpu.SMEM((group,), _f32),
            plgpu.SMEM((2, parts.own_size(group // 2)), _f32),
            plgpu.SMEM((2, 256), _f32),
            plgpu.SMEM((2,), _i32),
            plgpu.Barrier(num_arrivals=1),
            plgpu.Barrier(num_arrivals=1, num_barriers=ring(group)),
            plgpu.Barrier(num_arrivals=1, num_barriers=ring(group)),
            plgpu.Barrier(num_arrivals=2, num_barriers=2),
        ],
        grid=(groups, splits, units),
        grid_names=("heads", "split", "unit"),
        num_threads=3,
        thread_name="warpgroup",
        compiler_params=PARAMETERS,
        interpret=mode(interpret),
    )(
        q_UHC,
        rows.stack.reshape(-1, ROW),
        where_UX,
        page_BM * rows.page,
    )
    if splits == 1:
        o_UHW, lse_UH = o_USHW[:, 0], lse_USH[:, 0]
    else:
        o_UHW, lse_UH = _merge(o_USHW, lse_USH, interpret=interpret)
    o_BTHW = o_UHW[:, :heads, :width].reshape(batch, queries, heads, width)
    return o_BTHW, lse_UH[:, :heads].reshape(batch, queries, heads)
