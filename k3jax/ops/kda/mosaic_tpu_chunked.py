"""Gated KDA over many tokens as one Pallas kernel for TPUs (Mosaic).

Norms, gate, chunked delta rule and masks in one pass over HBM. The grid is (batch row, group of
heads, chunk of rows); the last axis runs in order and the state of the group stays in VMEM, in the
output block that all its chunks share. Arrays are blocks of [B, T, H K] views, which cost nothing
where q, k, v and z come out of projections: a block is [chunk, G K], lanes in whole heads.

The mathematics is that of `xla.py` (A, Z, the inverse by block doubling, exponents that are sums
over rows), with one difference. The decays within a block of `base` rows are products

    (exp(P_i) 2^s) (exp(-P_j) 2^-s),      P_i the sum of g over the block behind its first row,

where -P_j is at most (base - 1) |lower_bound|: 75 nats at K3's bound of -5 with 16 rows, and the
power of two, exact, keeps both factors and their bfloat16 parts away from the ends of float32. All
other exponents are <= 0. Wider bounds take smaller blocks, none at all takes base = 1, where that
product is exp(0) and block doubling is all there is. An anchor at the first row, and not in the
middle, is what makes outputs independent of later tokens to the last bit.

The rows of packed sequences move to whole chunks first (`packing.py`); the state block follows the
sequence of the chunk. A batch row is the case of one sequence, whose rows need not move.

Dots, with C = 64 rows a chunk and L levels of doubling (2 at K3's bound). HIGHEST is six bfloat16
passes, as good as float32. With bfloat16 inputs the dots marked * take HIGH, three passes: outputs
then lose 1.4e-5 of their size, 1/250 of their rounding, and states nothing (2.7e-6 either way;
`test_passes_of_the_matrix_unit`). The others with three passes cost the state 2e-4.

    sums @ g           [(L + 3) C, 3 C] x [3 C, G K]   bfloat16 operands, exact: see `_summed`
    [k; q] @ k^T   *   [2 C, K] x [K, C], then         A and Z: once in base blocks, once a level
                       [C, K] x [K, C]                 (rows of right blocks alone)
    inverse            [8..C/2, C] x [C, C]            HIGHEST, 2 (log2(C) - 1) times
    [k; q] @ S^T   *   [2 C, K] x [K, V]               what the state holds
    inverse @ rest     [C, C] x [C, V]                 HIGHEST
    Z @ u          *   [C, C] x [C, V]
    u^T @ k            [V, C] x [C, K]                 HIGHEST: what is written

VMEM at K = V = 128, G = 6 heads, bfloat16 inputs, each block twice for the pipeline: q, k, v and
z 768 KiB, o 192 KiB, b 32 KiB, states in and out 1,536 KiB, sums 160 KiB, gates 12 KiB: 2.6 MiB as
the compiler counts it, 3.5 MiB with float32 inputs, whatever T is. The limit is 16 MiB.

The compiler's schedule has 1,277 cycles a chunk and head on a v5p (v5e 1,252, v6e 1,217, TPU7x
1,108), three quarters of the matrix units' time; six heads at once because one chain of dots
leaves them idle (2 heads: 2,095 on a v5p with HIGHEST throughout, where 4 take 1,722 and 8 1,549).
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from k3jax.ops.kda.packing import Packing, pack

LANES, ROWS = 128, 8  # of a float32 tile
CHUNK = 64
SMALLEST = 16  # rows of a chunk: a tile of bfloat16
BASE = 16  # most rows whose decays are products
LARGEST = 80.0  # nats of a positive exponent; float32 ends at 88
HEADS = 6  # of a step, at most
_NN, _NT, _TN = (1, 0), (1, 1), (0, 0)  # contracted axes of two matrices


def refusal(q_BTHK, v_BTHV, z_BTHK, b_BTH, lower_bound, packing) -> str | None:
    """Why the kernel cannot take these inputs; None if it can.

    It takes every lower bound of the gate, None included, and packed sequences.
    """
    del lower_bound, packing
    for name, x in (("K", q_BTHK), ("V", v_BTHV)):
        if x.shape[-1] % LANES:
            return f"{name} is {x.shape[-1]}, no multiple of {LANES} lanes"
    for name, x in (("q", q_BTHK), ("v", v_BTHV), ("z", z_BTHK), ("b", b_BTH)):
        if x.dtype not in (jnp.float32, jnp.bfloat16):
            return f"{name} is {x.dtype}, not float32 or bfloat16"
    return None


def _base(lower_bound: float | None, chunk: int) -> int:
    """Rows whose decays are products around their first one; 1 for none."""
    rows = 1
    while lower_bound is not None and rows < BASE and (2 * rows - 1) * -lower_bound <= LARGEST:
        rows *= 2
    return min(rows, chunk)


def _scale(lower_bound: float | None, base: int) -> float:
    """2^s: the power of two in the middle of what `exp` gives in a block of ``base`` rows."""
    return 2.0 ** round((base - 1) * -(lower_bound or 0.0) / 2 / np.log(2))


def _widths(first: int, chunk: int) -> list[int]:
    """Widths of the blocks that merge: first, 2 first, .., chunk / 2."""
    return [first << level for level in range((chunk // first).bit_length() - 1)]


def _sums(base: int, chunk: int) -> np.ndarray:
    """0/1 [(L + 3) C, C], which rows of g to add up: from the first row of the base block, to the
    border of each merger, from the entry of the chunk, to its end."""
    row, column = np.arange(chunk)[:, None], np.arange(chunk)
    blocks = [(column > row // base * base) & (column <= row)]
    for width in _widths(base, chunk):
        to_border = np.where(row // width % 2 == 1, column <= row, column > row)
        blocks.append((row // width == column // width) & to_border)
    return np.concatenate([*blocks, column <= row, column > row])


def _dot(a, b, contract, precision=lax.Precision.HIGHEST):
    """A dot of the list above, for each head."""
    axes = ((1 + contract[0],), (1 + contract[1],))
    return lax.dot_general(
        a, b, (axes, ((0,), (0,))), precision=precision, preferred_element_type=jnp.float32
    )


def _summed(sums_XC, g_CP):
    """sums @ g in float32: g in three bfloat16 parts that add up to it, each times 0 or 1."""
    parts, rest_CP = [], g_CP
    for _ in range(3):
        parts.append(rest_CP.astype(jnp.bfloat16))
        rest_CP -= parts[-1].astype(jnp.float32)
    return jnp.dot(
        jnp.concatenate([sums_XC] * 3, axis=1),
        jnp.concatenate(parts, axis=0),
        precision=lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )


def unit(x):
    """`l2norm` of core.py on float32."""
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def log_decay(z, rate, bias, lower_bound):
    """`decay` of core.py on float32 [rows, channels], exp(A_log) and dt_bias as [1, channels]."""
    shifted = z + bias
    if lower_bound is None:
        return -rate * (jnp.maximum(shifted, 0.0) + jnp.log1p(jnp.exp(-jnp.abs(shifted))))
    return lower_bound * jax.nn.sigmoid(rate * shifted)


def gates(A_log_H, dt_bias_HK):
    """[2, H K]: exp(A_log) and dt_bias of every channel."""
    rate_HK = jnp.broadcast_to(jnp.exp(A_log_H)[:, None], dt_bias_HK.shape)
    return jnp.stack([rate_HK, dt_bias_HK]).reshape(2, -1)


def _iota(rows, columns):
    return (lax.broadcasted_iota(jnp.int32, (rows, columns), axis) for axis in (0, 1))


def _block(index, width):
    """Number of the block of ``width`` rows, a power of two."""
    return index >> (width.bit_length() - 1)


def _pairs(row, column, width):
    """Row in a right, column in the left block of one merger of blocks of ``width`` rows."""
    block = _block(row, width)
    return (block & 1 == 1) & (_block(column, width) == block - 1)


def _cut(x_GCX, width, start=0, step=1):
    """Blocks of ``width`` rows: every ``step``-th from ``start`` on."""
    ends = range(start * width, x_GCX.shape[1], step * width)
    return [x_GCX[:, at : at + width] for at in ends]


def _rows(blocks):
    return jnp.concatenate(blocks, axis=1)


def _products(q_GCK, k_GCK, rise_GCK, fall_GCK, borders, base, precision):
    """A (j < i) and Z (j <= i).

    Args:
      rise_GCK, fall_GCK: the two factors of decays in a block of ``base`` rows.
      borders: for each merger the decay between a row and the border.
    """
    chunk = k_GCK.shape[1]
    row_CC, column_CC = _iota(chunk, chunk)
    both = _rows([k_GCK * rise_GCK, q_GCK * rise_GCK])
    keys_GCC, scores_GCC = _cut(_dot(both, k_GCK * fall_GCK, _NT, precision), chunk)
    same_CC = _block(row_CC, base) == _block(column_CC, base)
    keys_GCC = jnp.where(same_CC & (column_CC < row_CC), keys_GCC, 0.0)
    scores_GCC = jnp.where(same_CC & (column_CC <= row_CC), scores_GCC, 0.0)
    for border_GCK, width in zip(borders, _widths(base, chunk), strict=True):
        left_GCK = k_GCK * border_GCK
        right = [left_GCK, q_GCK * border_GCK]
        if width >= ROWS:  # right blocks alone, where they are whole tiles
            right = [_rows(_cut(x, width, 1, 2)) for x in right]
        product = _dot(_rows(right), left_GCK, _NT, precision)
        halves = _cut(product, product.shape[1] // 2)
        if width >= ROWS:  # the rows of left blocks are masked, whatever stands there
            halves = [_rows([b for b in _cut(x, width) for _ in range(2)]) for x in halves]
        pairs_CC = _pairs(row_CC, column_CC, width)
        keys_GCC = jnp.where(pairs_CC, halves[0], keys_GCC)
        scores_GCC = jnp.where(pairs_CC, halves[1], scores_GCC)
    return keys_GCC, scores_GCC


def _unit_inverse(lower_GCC):
    """Inverse of I + lower (zero on and above the diagonal) by block doubling; see `xla.py`.

    The inverses of the diagonal blocks stand side by side, [W, C], and `spread` makes a matrix of
    them again, so that one short product serves all blocks: 144 rows through the matrix unit for a
    chunk of 64 instead of 640.
    """
    chunk = lower_GCC.shape[-1]
    row_CC, column_CC = _iota(chunk, chunk)

    def spread(x_GWC, mask_CC):
        return jnp.where(mask_CC, _rows([x_GWC] * (chunk // x_GWC.shape[1])), 0.0)

    # Blocks of a tile, merged under masks.
    row_WC, column_WC = _iota(ROWS, chunk)
    within_WC = column_WC & (ROWS - 1)
    lower_GWC = sum(
        jnp.where(_block(column_WC, ROWS) == i, x, 0.0) for i, x in enumerate(_cut(lower_GCC, ROWS))
    )
    crossing = [
        jnp.where(_pairs(row_WC, within_WC, width), lower_GWC, 0.0) for width in _widths(1, ROWS)
    ]
    same_CC = _block(row_CC, ROWS) == _block(column_CC, ROWS)
    inverse_GWC = jnp.where(row_WC == within_WC, 1.0, 0.0) - crossing[0]
    for crossing_GWC in crossing[1:]:
        step_GWC = _dot(crossing_GWC, spread(inverse_GWC, same_CC), _NN)
        inverse_GWC -= _dot(inverse_GWC, spread(step_GWC, same_CC), _NN)

    # Wider ones: the rows of left blocks stay, those of right blocks get -inv(R) X inv(P).
    for width in _widths(ROWS, chunk):
        pairs_CC = _pairs(row_CC, column_CC, width)
        same_CC = _block(row_CC, width) == _block(column_CC, width)
        crossing_GWC = sum(_cut(jnp.where(pairs_CC, lower_GCC, 0.0), width, 1, 2))
        step_GWC = _dot(crossing_GWC, spread(inverse_GWC, same_CC), _NN)
        step_GWC = _dot(inverse_GWC, spread(step_GWC, pairs_CC), _NN)
        _, column_WC = _iota(width, chunk)
        left_WC = _block(column_WC, width) & 1 == 0
        inverse_GWC = _rows(
            [jnp.where(left_WC, inverse_GWC, 0.0), jnp.where(left_WC, -step_GWC, inverse_GWC)]
        )
    return inverse_GWC


def _kernel(
    sequence_ref, stop_ref, _, q_ref, k_ref, v_ref, z_ref, b_ref, gates_ref, sums_ref, state_ref,
    o_ref, new_state_ref, *, lower_bound,
):  # fmt: skip
    batch_row, group, n = (pl.program_id(axis) for axis in range(3))
    heads, v_dim, k_dim = state_ref.shape[1:]
    chunk = q_ref.shape[1]
    sequence = sequence_ref[n]
    real = stop_ref[batch_row + sequence] - n * chunk  # rows from here on

    @pl.when((n == 0) | (sequence != sequence_ref[jnp.maximum(n - 1, 0)]))
    def _():
        new_state_ref[...] = state_ref[...]

    @pl.when(real <= 0)
    def _():
        o_ref[...] = jnp.zeros_like(o_ref)

    @pl.when(real > 0)
    def _():
        reads = lax.Precision.HIGHEST if q_ref.dtype == jnp.float32 else lax.Precision.HIGH
        base = _base(lower_bound, chunk)
        real_C1 = lax.broadcasted_iota(jnp.int32, (chunk, 1), 0) < real

        def masked(ref):
            return jnp.where(real_C1, ref[0].astype(jnp.float32), 0.0)

        def by_head(x_CP, width):
            return jnp.stack([x_CP[:, h * width : (h + 1) * width] for h in range(heads)])

        q_GCK = unit(by_head(masked(q_ref), k_dim)) * k_dim**-0.5
        k_GCK = unit(by_head(masked(k_ref), k_dim))
        v_GCV = by_head(masked(v_ref), v_dim)
        b_CH = jnp.where(real_C1, jax.nn.sigmoid(masked(b_ref)), 0.0)
        lane_CH = lax.broadcasted_iota(jnp.int32, b_CH.shape, 1)
        beta_GC1 = jnp.stack(
            [
                jnp.sum(jnp.where(lane_CH == group * heads + h, b_CH, 0.0), axis=1, keepdims=True)
                for h in range(heads)
            ]
        )

        g_CP = log_decay(masked(z_ref), gates_ref[0:1], gates_ref[1:2], lower_bound)
        logs_XP = _summed(sums_ref[...], jnp.where(real_C1, g_CP, 0.0))
        logs = [logs_XP[at : at + chunk] for at in range(0, logs_XP.shape[0], chunk)]
        scale = _scale(lower_bound, base)
        fall_GCK = by_head(jnp.exp(-logs[0]) / scale, k_dim)
        rise_GCK, *borders, entry_GCK, end_GCK = (by_head(jnp.exp(x), k_dim) for x in logs)

        keys_GCC, scores_GCC = _products(
            q_GCK, k_GCK, rise_GCK * scale, fall_GCK, borders, base, reads
        )
        inverse_GCC = _unit_inverse(beta_GC1 * keys_GCC)
        state_GVK = new_state_ref[0]
        both = _rows([k_GCK * entry_GCK, q_GCK * entry_GCK])
        held_GCV, o_GCV = _cut(_dot(both, state_GVK, _NT, reads), chunk)
        u_GCV = _dot(inverse_GCC, beta_GC1 * (v_GCV - held_GCV), _NN)
        o_GCV += _dot(scores_GCC, u_GCV, _NN, reads)
        written_GVK = _dot(u_GCV, k_GCK * end_GCK, _TN)
        new_state_ref[0] = state_GVK * entry_GCK[:, chunk - 1 :] + written_GVK
        o_GCV = jnp.where(real_C1, o_GCV, 0.0).astype(o_ref.dtype)
        for h in range(heads):
            o_ref[0, :, h * v_dim : (h + 1) * v_dim] = o_GCV[h]


def gated_kda(
    q_BTHK: Array,
    k_BTHK: Array,
    v_BTHV: Array,
    z_BTHK: Array,
    b_BTH: Array,
    A_log_H: Array,
    dt_bias_HK: Array,
    state_BHVK: Array,
    lengths_B: Array | None,
    lower_bound: float | None,
    packing: Packing | None = None,
    *,
    interpret: bool | pltpu.InterpretParams = False,
) -> tuple[Array, Array]:
    """The function of the table in `gated.py`. ``interpret`` runs it without a TPU, for tests."""
    batch, length, heads, k_dim = k_BTHK.shape
    v_dim = v_BTHV.shape[-1]
    chunk = min(CHUNK, max(SMALLEST, pl.next_power_of_2(length)))
    group = next(g for g in range(HEADS, 0, -1) if heads % g == 0)
    sums_XC = jnp.asarray(_sums(_base(lower_bound, chunk), chunk), jnp.bfloat16)
    inputs = [x.reshape(batch, length, -1) for x in (q_BTHK, k_BTHK, v_BTHV, z_BTHK, b_BTH)]

    # Chunk n of batch row b is one of sequence b + sequence_C[n], whose rows end at stop_S. None is
    # read behind last_B, the last one with real rows, which serves again.
    if packing is None:
        chunks = pl.cdiv(length, chunk)
        if lengths_B is None:
            lengths_B = jnp.full((batch,), length, jnp.int32)
        stop_S, sequence_C = jnp.clip(lengths_B, 0, length), jnp.zeros((chunks,), jnp.int32)
    else:
        packing = pack(packing.start_N, packing.length_N, length, chunk)
        # Not `pad`, whose zeros are one more pass over all rows: the kernel masks what is padding.
        row_R = jnp.maximum(packing.row_R, 0)
        inputs = [jnp.take(x, row_R, axis=1, mode="clip") for x in inputs]
        # Chunks left over continue the last sequence, or give it its own state if it has no row.
        sequence_C = jnp.minimum(packing.sequence_C, packing.length_N.shape[0] - 1)
        chunks, count_N = sequence_C.shape[0], pl.cdiv(packing.length_N, chunk)
        stop_S = (jnp.cumsum(count_N, dtype=jnp.int32) - count_N) * chunk + packing.length_N
    last_B = jnp.maximum(pl.cdiv(stop_S[-batch:], chunk) - 1, 0)

    def real_rows(b, h, n, sequence, stop, last):
        return b, jnp.minimum(n, last[b]), h

    def state_of(b, h, n, sequence, *_):  # looked up where it has to be: 0.6% of the schedule
        return b if packing is None else sequence[n], h, 0, 0

    def rows(width):
        return pl.BlockSpec((1, chunk, group * width), real_rows)

    state = pl.BlockSpec((1, group, v_dim, k_dim), state_of)
    o_BTP, state_BHVK = pl.pallas_call(
        partial(_kernel, lower_bound=lower_bound),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(batch, heads // group, chunks),
            in_specs=[
                rows(k_dim),
                rows(k_dim),
                rows(v_dim),
                rows(k_dim),
                # All heads on lanes: a block of some would be no multiple of 128.
                pl.BlockSpec((1, chunk, heads), lambda b, h, *s: real_rows(b, 0, *s)),
                pl.BlockSpec((2, group * k_dim), lambda b, h, n, *_: (0, h)),
                pl.BlockSpec(sums_XC.shape, lambda b, h, n, *_: (0, 0)),
                state,
            ],
            out_specs=[
                pl.BlockSpec((1, chunk, group * v_dim), lambda b, h, n, *_: (b, n, h)),
                state,
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((batch, inputs[2].shape[1], heads * v_dim), v_BTHV.dtype),
            jax.ShapeDtypeStruct(state_BHVK.shape, jnp.float32),
        ],
        # No chunk comes to a packed sequence without a row: its state is there already.
        input_output_aliases={} if packing is None else {10: 1},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
        interpret=interpret,
        name="gated_kda",
    )(
        sequence_C,
        stop_S,
        last_B,
        *inputs,
        gates(A_log_H, dt_bias_HK),
        sums_XC,
        state_BHVK,
    )
    if packing is not None:
        o_BTP = packing.unpad(o_BTP)
    return o_BTP.reshape(v_BTHV.shape), state_BHVK
