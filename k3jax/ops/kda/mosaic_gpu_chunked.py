"""KDA over many tokens as two Pallas kernels for Hopper GPUs (Mosaic GPU).

The chunked form of `xla.py` with chunks of 64 rows, K = V = 128, bfloat16 operands, float32 sums:

* `_solve_kernel` runs over all chunks and heads in any order: gate, norms, Z and the inverse.
  A persistent block has two warpgroups, each with a chunk of its own, and fetches the next one
  while it works. It writes 1 KiB a row: Qp, Kp, Ks (see `xla.py`), T = inverse diag(beta) and Z.
* `_scan_kernel` runs over heads and sequences, chunks in order: U = T (v - Kp S^T),
  O = Qp S^T + Z U, S <- S diag(decay) + U^T Ks. The state stands in registers as [V, K], half of V
  in each of two warpgroups, so that it, U^T and what is erased are left operands without a way
  through shared memory. A third warpgroup copies chunks in.

Decays. With g >= -5 nats the sum over 16 rows is at least -80, so exp of it and of its negative are
normal numbers in float32 and bfloat16. Products within a tile of 16 rows take its begin as
reference, exp(g(begin, i]) and exp(-g(begin, j]); what lies above the diagonal may overflow and is
masked. Products between tiles take a border between them, where both exponents are negative.
Sums of g are products with masks of 0 and +-1; g has 11 bits there (float16), 8 times the precision
of the bfloat16 z it comes from.

The inverse merges blocks as in `xla.py`, in float16: entries of blocks of unit keys are at most 1,
so its 11 bits cost 5e-4 where T is rounded to 8 bits after it.

Errors on random inputs: outputs 4.0e-3, states 2.8e-3 (relative L2).

Few heads leave the chip empty in the second kernel, which then runs over stretches of a sequence at
once: first for the affine maps S -> S M + B of all but the last stretch (from S = 0 with the
values, from S = I without), then, with the entry states that compose them, for the outputs.

Shared memory: 226 KiB (solve: for each of two warpgroups 6 tiles of 8 KiB for q, k, z and what
replaces them, 2 for the gate and 3 for sides of products; 6 masks), 182 KiB (scan: two stages of
80 KiB, outputs 16 KiB). Registers a thread: 255 and 168 (232 where it computes).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from k3jax.ops.kda.packing import Packing, pack
from k3jax.ops.mosaic_gpu import (
    COLUMNS,
    LANE,
    LOG2E,
    ROWS,
    WGMMA,
    Interpret,
    by_column,
    by_row,
    first_row,
    iota,
    mode,
    products,
    sigmoid,
    smem,
)

CHUNK = 64
DIM = 128  # K and V
TILE = (CHUNK, CHUNK)
LOWEST_BOUND = -5.0  # 16 rows of it, 115 powers of two, still are normal numbers
SOLVERS = 2  # warpgroups of a block; three would have 168 registers each and spill
BLOCKS = 132  # of an H200 or H100
STAGES = 2
# Chunks and heads of one pass of both kernels: 5.6 GB between them. Longer inputs take passes.
PASS = 65536 * 96 // CHUNK
# The second kernel moves memory at its full rate from about this many sequences and heads on.
FULL = 64
STRETCH = 8  # chunks of a stretch at least

_f32, _bf16, _f16 = jnp.float32, jnp.bfloat16, jnp.float16
_HALVES = (0, 1)  # of the 128 channels
# Sums of g for each row: from the begin of its tile of 16 up to and with it, behind it to the end
# of the tile, between it and the border at row 32, from the entry, to the end, and of all rows.
_FROM_TILE, _TO_TILE_END, _ROW_32, _FROM_ENTRY, _TO_END, _WHOLE = range(6)


def refusal(q_BTHK, v_BTHV, z_BTHK, b_BTH, lower_bound, packing) -> str | None:
    """Why the kernels cannot take these inputs; None if they can."""
    del packing
    if q_BTHK.shape[-1] != DIM or v_BTHV.shape[-1] != DIM:
        return f"K = {q_BTHK.shape[-1]}, V = {v_BTHV.shape[-1]}, not {DIM}"
    for name, x in (("q", q_BTHK), ("v", v_BTHV), ("z", z_BTHK)):
        if x.dtype != jnp.bfloat16:
            return f"{name} is {x.dtype}, not bfloat16"
    if not jnp.issubdtype(b_BTH.dtype, jnp.floating):
        return f"b is {b_BTH.dtype}, not floating"
    if lower_bound is None or lower_bound < LOWEST_BOUND:
        return f"lower bound {lower_bound}: decays of 16 rows below {LOWEST_BOUND} overflow"
    return None


class _Solved(NamedTuple):
    """Chunks solved for an unknown entry state; N chunks of all batch rows, one after another."""

    rows_NH6CC: Array  # Qp, Kp, Ks, two halves of the channels each
    inverse_NHCC: Array
    scores_NHCC: Array
    decay_NHK: Array


def _solve_kernel(
    q_g, k_g, z_g, b_g, rate_g, dt_bias_g, real_g, first_g, rows_g, inverse_g, scores_g, decay_g,
    rows_all, gate_all, b_all, dt_bias_all, spare_all, left_all, masks, filled,
    *, blocks, chunks, heads, total, scale, lower_bound, interpret,
):  # fmt: skip
    """A warpgroup's chunks: at, at + stride, ...; `real_g` has the real rows of each chunk."""
    warpgroup = lax.axis_index("warpgroup")
    begin = lax.axis_index("block") * SOLVERS + warpgroup
    stride = blocks * SOLVERS
    matmul = functools.partial(products, interpret=interpret)

    def fetch(at, *names):
        head, n = lax.rem(at, jnp.int32(heads)), at // heads
        batch = n // chunks
        rows = pl.ds((first_g[0] + lax.rem(n, jnp.int32(chunks))) * CHUNK, CHUNK)
        places = {"q": (q_g, 0, 1), "k": (k_g, 2, 2), "z": (z_g, 4, 0)}

        @pl.when(at < total)
        def _():
            for name in names:
                source, place, which = places[name]
                arrived = filled[which].at[warpgroup]
                for half in _HALVES:
                    plgpu.copy_gmem_to_smem(
                        source.at[batch, rows, pl.ds(head * DIM + 64 * half, 64)],
                        rows_all.at[warpgroup, place + half],
                        arrived,
                    )
                if name == "z":
                    plgpu.copy_gmem_to_smem(dt_bias_g.at[head], dt_bias_all.at[warpgroup], arrived)
                    plgpu.copy_gmem_to_smem(b_g.at[batch, head, rows], b_all.at[warpgroup], arrived)

    fetch(begin, "z", "q", "k")
    i, j = iota(TILE, 0), iota(TILE, 1)
    one = lambda condition: jnp.where(condition, jnp.float16(1), jnp.float16(0))  # noqa: E731
    upto, within_tile = one(j <= i), one(lax.bitwise_xor(i, j) < 16)
    upto_32, before_32 = upto - one(j < 32), one(j < 32) - upto
    masks[_FROM_TILE] = upto * within_tile
    masks[_TO_TILE_END] = within_tile - upto * within_tile
    masks[_ROW_32] = jnp.where(i >= 32, upto_32, before_32)
    masks[_FROM_ENTRY] = upto
    masks[_TO_END] = jnp.float16(1) - upto
    masks[_WHOLE] = one(j >= 0)
    plgpu.commit_smem()

    def step(turn, _):
        at = begin + turn * stride
        head, n = lax.rem(at, jnp.int32(heads)), at // heads
        real = real_g[n]
        rate = LOG2E * rate_g[head]
        uses = iter(range(100))

        def zero():
            """Zero, but another expression each time. Otherwise the compiler builds masks and
            addresses once and holds them over the loop, in registers that it does not have.
            """
            return lax.shift_right_logical(at + next(uses), 30)

        def grid():
            return iota(TILE, 0), iota(TILE, 1) + zero()

        def here():
            slot = warpgroup + zero()
            rows = rows_all.at[slot]
            q_s, k_s, y_s = (rows.at[pl.ds(2 * x, 2)] for x in range(3))
            return rows, q_s, k_s, y_s, gate_all.at[slot], spare_all.at[slot], left_all.at[slot]

        def value(ref):
            return plgpu.load(ref, layout=WGMMA).astype(_f32)

        def narrowed(x, dtype):
            """Rounded here and now, not where it is used: it then takes half the registers."""
            return lax.optimization_barrier(x.astype(dtype))

        rows_s, q_s, k_s, y_s, gate_s, *_ = here()

        def arrive(which, *refs):
            """What stands behind the real rows may be anything: it becomes zero."""
            plgpu.barrier_wait(filled[which].at[warpgroup])

            @pl.when(real < CHUNK)
            def _():
                i, _ = grid()
                for ref in refs:
                    for half in _HALVES:
                        x = plgpu.load(ref.at[half], layout=WGMMA)
                        ref[half] = jnp.where(i < real, x, jnp.zeros_like(x))

        arrive(0, y_s)
        row = plgpu.broadcasted_iota(jnp.int32, (CHUNK,), 0, layout=ROWS)
        bound = by_row(jnp.where(row < real, _f32(lower_bound * LOG2E), _f32(0.0)), TILE)
        for half in _HALVES:
            bias = plgpu.load(dt_bias_all.at[warpgroup, pl.ds(64 * half, 64)], layout=COLUMNS)
            # sigmoid((z + bias) * rate), with one multiplication and addition inside
            inner = value(y_s.at[half]) * -rate + by_column(bias * -rate, TILE)
            root = lax.rsqrt(1.0 + jnp.exp2(inner))
            gate_s[half] = (root * root * bound).astype(_f16)
        arrive(1, q_s)
        arrive(2, k_s)
        plgpu.commit_smem()

        def decays(half, *which):
            """Sums of log2 decays over rows, for each of the masks."""
            return matmul(*[(TILE, None, [(masks.at[x], gate_s.at[half])]) for x in which])

        def inverse_norm(ref):
            squares = [jnp.sum(x * x, axis=1) for x in (value(ref.at[half]) for half in _HALVES)]
            return lax.rsqrt(squares[0] + squares[1] + 1e-6)

        def beta(layout):
            row = plgpu.broadcasted_iota(jnp.int32, (CHUNK,), 0, layout=layout)
            logit = plgpu.load(b_all.at[warpgroup], layout=layout)
            return jnp.where(row < real, sigmoid(logit), 0.0)

        norm_k = inverse_norm(k_s)
        norm_q = inverse_norm(q_s) * scale
        beta_k, norm_q_row = by_row(beta(ROWS) * norm_k, TILE), by_row(norm_q, TILE)

        # A and Z within tiles, between the two tiles of 32 rows, and across row 32. No decay is
        # taken from a border behind its row, so that no later token changes a bit. Keys first, then
        # queries: together their sums do not fit in registers.
        def against(left, *rights):
            """Sums of left_i . right_j over channels, for each of the right sides."""
            return matmul(
                *[
                    (TILE, None, [(left[x], right.at[x].transpose((1, 0))) for x in _HALVES])
                    for right in rights
                ]
            )

        rows_s, q_s, k_s, y_s, gate_s, spare_s, left_s = here()
        left_k, left_q = [], [left_s, None]

        def keep(half, q):
            """Left sides of queries wait for their turn, one half of them in shared memory."""
            if half == 0:
                left_s[...] = q.astype(_bf16)
            else:
                left_q[1] = narrowed(q, _bf16)

        for half in _HALVES:
            d, to_end = decays(half, _FROM_TILE, _TO_TILE_END)
            k, decay = value(k_s.at[half]), jnp.exp2(d)
            left_k.append(narrowed(k * decay, _bf16))
            keep(half, value(q_s.at[half]) * decay)
            k = k * by_row(norm_k, TILE)
            y_s[half] = (k * jnp.exp2(-d)).astype(_bf16)
            spare_s[half] = (k * jnp.exp2(to_end)).astype(_bf16)
        plgpu.commit_smem()

        def merged(left, scale, dtype, *, diagonal):
            same, neighbour = (x * scale for x in against(left, y_s, spare_s))
            i, j = grid()
            tiles = lax.bitwise_xor(i, j)
            same = jnp.where((tiles < 16) & ((j <= i) if diagonal else (j < i)), same, 0.0)
            next_tile = (lax.shift_right_logical(tiles, 4) == 1) & (j < i)
            return narrowed(jnp.where(next_tile, neighbour, same), dtype)

        lower = merged(left_k, beta_k, _f16, diagonal=False)
        scores = merged(left_q, norm_q_row, _bf16, diagonal=True)

        rows_s, q_s, k_s, y_s, gate_s, spare_s, left_s = here()
        plgpu.commit_smem()
        left_k = []
        for half in _HALVES:
            (d,) = decays(half, _ROW_32)
            k, decay = value(k_s.at[half]), jnp.exp2(d)
            decayed = k * decay
            left_k.append(narrowed(decayed, _bf16))
            keep(half, value(q_s.at[half]) * decay)
            y_s[half] = (decayed * by_row(norm_k, TILE)).astype(_bf16)
        plgpu.commit_smem()
        i, j = grid()
        across = (i >= 32) & (j < 32)
        (keys,) = against(left_k, y_s)
        lower = jnp.where(across, narrowed(keys * beta_k, _f16), lower)
        (crossing,) = against(left_q, y_s)
        spare_s[0] = jnp.where(across, (crossing * norm_q_row).astype(_bf16), scores)

        # Qp, Kp, Ks, each over what it is made of
        rows_s, q_s, k_s, y_s, gate_s, spare_s, left_s = here()
        plgpu.commit_smem()
        for half in _HALVES:
            from_entry, to_end, whole = decays(half, _FROM_ENTRY, _TO_END, _WHOLE)
            from_entry = jnp.exp2(from_entry)
            k = value(k_s.at[half]) * by_row(norm_k, TILE)
            k_s[half] = (k * from_entry).astype(_bf16)
            q_s[half] = (value(q_s.at[half]) * (norm_q_row * from_entry)).astype(_bf16)
            y_s[half] = (k * jnp.exp2(to_end)).astype(_bf16)
            whole = jnp.exp2(first_row(whole, interpret=interpret))
            decay_g[n, head, pl.ds(64 * half, 64)] = whole
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(rows_s, rows_g.at[n, head], commit_group=False)
        plgpu.copy_smem_to_gmem(spare_s.at[0], scores_g.at[n, head])

        # The inverse. The gate is not needed any more and lends its two places, which take turns,
        # so that no warp writes what another one's product still reads.
        rows_s, q_s, k_s, y_s, gate_s, spare_s, left_s = here()
        i, j = grid()
        neighbours = lax.bitwise_xor(i, j) == 1
        inverse = jnp.where(i == j, 1.0, 0.0) - jnp.where(neighbours, lower.astype(_f32), 0.0)

        def merge(level, inverse):
            of_level = lax.shift_right_logical(lax.bitwise_xor(i, j), level) == 1
            crossing = jnp.where(of_level, lower, jnp.zeros_like(lower))
            narrow = inverse.astype(_f16)
            gate_s[0] = narrow
            plgpu.commit_smem()
            (product,) = matmul((TILE, None, [(crossing, gate_s.at[0])]))
            gate_s[1] = product.astype(_f16)
            plgpu.commit_smem()
            (product,) = matmul((TILE, None, [(narrow, gate_s.at[1])]))
            return inverse - product

        i, j = grid()
        inverse = lax.fori_loop(1, 6, merge, inverse)
        beta_column = by_column(beta(COLUMNS), TILE)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        fetch(at + stride, "z", "q")
        k_s[0] = (inverse * beta_column).astype(_bf16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(k_s.at[0], inverse_g.at[n, head])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        fetch(at + stride, "k")
        return ()

    lax.fori_loop(0, (total - begin + stride - 1) // stride, step, ())
    plgpu.wait_smem_to_gmem(0)


class _Place(NamedTuple):
    """The chunks of one pass.

    Attributes:
      real_N: int32, real rows of each chunk of all batch rows.
      first: int32 [1], the first chunk within a batch row.
      chunks: of a batch row.
    """

    real_N: Array
    first: Array
    chunks: int


def _solve(q, k, z, b_BHT, rate_H, dt_bias_HK, lower_bound, at: _Place, interpret):
    batch, _, heads, _ = q.shape
    n = batch * at.chunks
    blocks = 2 if interpret else BLOCKS
    flat = [x.reshape(*x.shape[:2], heads * DIM) for x in (q, k, z)]
    shape = jax.ShapeDtypeStruct
    return _Solved(
        *plgpu.kernel(
            functools.partial(
                _solve_kernel,
                blocks=blocks,
                chunks=at.chunks,
                heads=heads,
                total=n * heads,
                scale=DIM**-0.5,
                lower_bound=lower_bound,
                interpret=interpret,
            ),
            out_type=[
                shape((n, heads, 6, *TILE), _bf16),
                shape((n, heads, *TILE), _bf16),
                shape((n, heads, *TILE), _bf16),
                shape((n, heads, DIM), _f32),
            ],
            scratch_types=[
                smem((SOLVERS, 6, *TILE), _bf16),
                smem((SOLVERS, 2, *TILE), _f16),
                plgpu.SMEM((SOLVERS, CHUNK), _f32),
                plgpu.SMEM((SOLVERS, DIM), _f32),
                smem((SOLVERS, 2, *TILE), _bf16),
                smem((SOLVERS, *TILE), _bf16),
                smem((6, *TILE), _f16),
                [plgpu.Barrier(num_arrivals=x, num_barriers=SOLVERS) for x in (4, 2, 2)],
            ],
            grid=(blocks,),
            grid_names=("block",),
            num_threads=SOLVERS,
            thread_name="warpgroup",
            compiler_params=plgpu.CompilerParams(
                lowering_semantics=LANE,
                approx_math=True,
                unsafe_no_auto_barriers=True,
                reduction_scratch_bytes=0,  # no sum leaves its warp
            ),
            interpret=mode(interpret),
        )(*flat, b_BHT, rate_H, dt_bias_HK, at.real_N, at.first)
    )


def _scan_kernel(
    rows_g, inverse_g, scores_g, decay_g, v_g, entry_g, real_g, begin_g, count_g, first_g,
    o_g, exit_g, rows_s, inverse_s, scores_s, v_s, o_s, decay_s, filled, free,
    *, chunks, outputs, values, interpret,
):  # fmt: skip
    """Chunks begin .. begin + count - 1 of a sequence, or of a stretch of one."""
    head, sequence = lax.axis_index("head"), lax.axis_index("sequence")
    warpgroup = lax.axis_index("warpgroup")
    begin, count = begin_g[sequence], count_g[sequence]
    matmul = functools.partial(products, interpret=interpret)

    def place(n):
        """Batch row and token rows of chunk n."""
        batch = n // chunks
        return batch, pl.ds((first_g[0] + lax.rem(n, jnp.int32(chunks))) * CHUNK, CHUNK)

    @pl.when(warpgroup == 2)
    def _():
        plgpu.set_max_registers(40, action="decrease")

        def copy(turn, _):
            slot, n = lax.rem(turn, jnp.int32(STAGES)), begin + turn
            pl.when(turn >= STAGES)(lambda: plgpu.barrier_wait(free.at[slot]))
            arrived = filled.at[slot]
            for source, to in (
                (rows_g, rows_s), (inverse_g, inverse_s), (scores_g, scores_s), (decay_g, decay_s)
            ):  # fmt: skip
                plgpu.copy_gmem_to_smem(source.at[n, head], to.at[slot], arrived)
            if values:
                batch, rows = place(n)
                lanes = pl.ds(head * DIM, DIM)
                plgpu.copy_gmem_to_smem(v_g.at[batch, rows, lanes], v_s.at[slot], arrived)
            return ()

        def drain(turn, _):
            plgpu.barrier_wait(free.at[lax.rem(turn, jnp.int32(STAGES))])
            return ()

        lax.fori_loop(0, count, copy, ())
        lax.fori_loop(lax.max(count - STAGES, 0), count, drain, ())

    @pl.when(warpgroup < 2)
    def _():
        plgpu.set_max_registers(232, action="increase")
        channels = pl.ds(warpgroup * 64, 64)  # of V
        halves = [pl.ds(64 * x, 64) for x in _HALVES]  # of K
        state = tuple(
            plgpu.load(entry_g.at[sequence, head, channels, x], layout=WGMMA, optimized=False)
            for x in halves
        )

        def step(turn, state):
            slot, n = lax.rem(turn, jnp.int32(STAGES)), begin + turn
            plgpu.barrier_wait(filled.at[slot])
            real = real_g[n]
            v_w = v_s.at[slot, :, channels]

            if values:

                @pl.when(real < CHUNK)
                def _():
                    x = plgpu.load(v_w, layout=WGMMA)
                    v_w[...] = jnp.where(iota(TILE, 0) < real, x, jnp.zeros_like(x))
                    plgpu.commit_smem()

            transposed = lambda ref: ref.transpose((1, 0))  # noqa: E731
            q, k, ending = ([rows_s.at[slot, 2 * x + y] for y in _HALVES] for x in range(3))
            q, k = ([transposed(x) for x in xs] for xs in (q, k))
            inverse, scores = transposed(inverse_s.at[slot]), transposed(scores_s.at[slot])
            v = transposed(v_w)
            narrow = [x.astype(_bf16) for x in state]

            def chain(erase, write, out):
                """The state meets keys and queries at once; values do not wait for it."""
                for x, y in zip(narrow, k, strict=True):
                    plgpu.wgmma(erase, x, y)
                if values:
                    plgpu.wgmma(write, v, inverse)
                if outputs:
                    for x, y in zip(narrow, q, strict=True):
                        plgpu.wgmma(out, x, y)
                behind = (1 if values else 0) + (2 if outputs else 0)
                erased = -plgpu.wgmma_accumulator_load(erase, wait_n=behind)
                plgpu.wgmma(write, erased.astype(_bf16), inverse)
                u = write[...].astype(_bf16)
                if outputs:
                    plgpu.wgmma(out, u, scores)
                return out[...], u

            if interpret:
                (erased,) = matmul((TILE, None, list(zip(narrow, k, strict=True))))
                written = [(v, inverse)] if values else []
                (u,) = matmul((TILE, None, [*written, ((-erased).astype(_bf16), inverse)]))
                u = u.astype(_bf16)
                (out,) = matmul((TILE, None, [*zip(narrow, q, strict=True), (u, scores)]))
            else:
                out, u = pl.run_scoped(chain, *[plgpu.ACC(TILE, _f32)] * 3)
            decay = [plgpu.load(decay_s.at[slot, x], layout=COLUMNS) for x in halves]
            state = matmul(
                *[
                    (TILE, x * by_column(d, TILE), [(u, y)])
                    for x, d, y in zip(state, decay, ending, strict=True)
                ]
            )
            plgpu.barrier_arrive(free.at[slot])
            if outputs:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                o_w = o_s.at[warpgroup]
                transposed(o_w)[...] = plgpu.layout_cast(out.astype(_bf16), WGMMA)
                plgpu.commit_smem()
                batch, rows = place(n)
                lanes = pl.ds(head * DIM + warpgroup * 64, 64)
                plgpu.copy_smem_to_gmem(o_w, o_g.at[batch, rows, lanes])
            return tuple(state)

        state = lax.fori_loop(0, count, step, state)
        for x, half in zip(state, halves, strict=True):
            exit_g[sequence, head, channels, half] = x
        plgpu.wait_smem_to_gmem(0)


def _scan(
    solved, v_BTP, entry_SHVK, begin_S, count_S, at: _Place, interpret, *, o=None, values=True
):
    """States after the chunks of each sequence; outputs go to the reference ``o`` [B, T, P]."""
    sequences, heads = entry_SHVK.shape[:2]
    outputs = o is not None
    if o is None:
        o = jax.new_ref(jnp.zeros((1, CHUNK, DIM), _bf16))
    return plgpu.kernel(
        functools.partial(
            _scan_kernel,
            chunks=at.chunks,
            outputs=outputs,
            values=values,
            interpret=interpret,
        ),
        out_type=jax.ShapeDtypeStruct(entry_SHVK.shape, _f32),
        scratch_types=[
            smem((STAGES, 6, *TILE), _bf16),
            smem((STAGES, *TILE), _bf16),
            smem((STAGES, *TILE), _bf16),
            smem((STAGES, CHUNK, DIM), _bf16),
            smem((2, *TILE), _bf16),
            plgpu.SMEM((STAGES, DIM), _f32),
            plgpu.Barrier(num_arrivals=5 if values else 4, num_barriers=STAGES),
            plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
        ],
        grid=(heads, sequences),
        grid_names=("head", "sequence"),
        num_threads=3,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=LANE, approx_math=True),
        interpret=mode(interpret),
    )(*solved, v_BTP, entry_SHVK, at.real_N, begin_S, count_S, at.first, o)


def _stretches(solved, v_BTP, state_SHVK, begin_S, count_S, at: _Place, stretches, interpret):
    """(entry states, first chunks, numbers of chunks) of ``stretches`` parts of each sequence."""
    sequences, heads = state_SHVK.shape[:2]
    length_S1 = -(-count_S // stretches)[:, None]
    before_SG = jnp.arange(stretches, dtype=jnp.int32) * length_S1
    begin_SG = begin_S[:, None] + before_SG
    count_SG = jnp.clip(count_S[:, None] - before_SG, 0, length_S1)
    early = (begin_SG[:, :-1].reshape(-1), count_SG[:, :-1].reshape(-1))

    def last_states(start_VK, *, values):
        start = jnp.broadcast_to(start_VK, (early[0].size, heads, DIM, DIM))
        states = _scan(solved, v_BTP, start, *early, at, interpret, values=values)
        return states.reshape(sequences, stretches - 1, heads, DIM, DIM)

    write = last_states(jnp.zeros((DIM, DIM), _f32), values=True)
    move = last_states(jnp.eye(DIM, dtype=_f32), values=False)
    entries = [state_SHVK]
    for part in range(stretches - 1):
        moved = jnp.matmul(entries[-1], move[:, part], precision=lax.Precision.HIGHEST)
        entries.append(moved + write[:, part])
    entry = jnp.stack(entries, axis=1).reshape(sequences * stretches, heads, DIM, DIM)
    return entry, begin_SG.reshape(-1), count_SG.reshape(-1)


def gated_kda(
    q_BTHK: Array,
    k_BTHK: Array,
    v_BTHV: Array,
    z_BTHK: Array,
    b_BTH: Array,
    A_log_H: Array,
    dt_bias_HK: Array,
    state: Array,
    lengths_B: Array | None,
    lower_bound: float,
    packing: Packing | None = None,
    *,
    interpret: Interpret = False,
    stretches: int | None = None,
) -> tuple[Array, Array]:
    """See `k3jax.ops.kda.gated_kda`; inputs as `refusal` wants them.

    Args:
      interpret: whether to run in interpret mode, on a CPU; with parameters, how.
      stretches: into how many a sequence is cut in the second kernel; chosen by default.
    """
    inputs = [q_BTHK, k_BTHK, v_BTHV, z_BTHK, b_BTH]
    if packing is not None:
        packing = pack(packing.start_N, packing.length_N, q_BTHK.shape[1], CHUNK)
        inputs = [packing.pad(x) for x in inputs]
    batch, length, heads, _ = inputs[0].shape
    rows = -length % 8  # bulk copies move tiles of 8 rows
    q, k, v, z, b = (
        jnp.pad(x, [(0, 0), (0, rows)] + [(0, 0)] * (x.ndim - 2)) if rows else x for x in inputs
    )

    chunks = -(-length // CHUNK)
    passes = 1 if packing is not None else -(-batch * chunks * heads // PASS)
    chunks = -(-chunks // passes)  # of a pass
    if packing is None:
        count_S = jnp.full((batch,), chunks, jnp.int32)
        length_B = jnp.full((batch,), length, jnp.int32) if lengths_B is None else lengths_B
        behind_C = jnp.arange(passes * chunks, dtype=jnp.int32) * CHUNK
        real_BC = jnp.clip(length_B[:, None] - behind_C, 0, CHUNK)
    else:
        count_S = (packing.length_N + CHUNK - 1) // CHUNK
        real_BC = jnp.sum((packing.row_R >= 0).reshape(1, chunks, CHUNK), axis=2, dtype=jnp.int32)
    begin_S = jnp.cumsum(count_S, dtype=jnp.int32) - count_S
    real_BPC = real_BC.reshape(batch, passes, chunks)
    b_BHT = jnp.swapaxes(b, 1, 2).astype(_f32)
    b_BHT = jnp.pad(b_BHT, ((0, 0), (0, 0), (0, passes * chunks * CHUNK - b_BHT.shape[2])))
    v_BTP = v.reshape(*v.shape[:2], heads * DIM)
    o_ref = jax.new_ref(lax.empty(v_BTP.shape, v.dtype))

    sequences = state.shape[0]
    if stretches is None:
        stretches = min(FULL // (sequences * heads), chunks // sequences // STRETCH)
    final, gates = state, (jnp.exp(A_log_H), dt_bias_HK, lower_bound)
    for turn in range(passes):
        at = _Place(real_BPC[:, turn].reshape(-1), jnp.full((1,), turn * chunks, jnp.int32), chunks)
        solved = _solve(q, k, z, b_BHT, *gates, at, interpret)
        if stretches > 1:
            parts = _stretches(solved, v_BTP, final, begin_S, count_S, at, stretches, interpret)
            final = _scan(solved, v_BTP, *parts, at, interpret, o=o_ref)
            final = final.reshape(sequences, stretches, *state.shape[1:])[:, -1]
        else:
            final = _scan(solved, v_BTP, final, begin_S, count_S, at, interpret, o=o_ref)
    o_BTHV = o_ref[...].reshape(v.shape)[:, :length]
    if packing is not None:
        o_BTHV, real_S = packing.unpad(o_BTHV), packing.length_N
    else:
        real_S = length_B
    # A sequence without a real row keeps its state bit for bit.
    return o_BTHV, jnp.where((real_S > 0)[:, None, None, None], final, state)
