"""Gated KDA over many tokens as one Pallas kernel for TPUs (Mosaic).

Norms, gate, chunked delta rule and masks in one pass over HBM. The grid is (batch row, group of
heads, chunk of rows); the last axis runs in order and the state of the group stays in VMEM, in the
output block that all its chunks share. Arrays are blocks of [B, T, H K] views, which cost nothing
where q, k, v and z come out of projections: a block is [chunk, heads K], lanes in whole heads.

The mathematics is that of `xla.py` (A, Z, the inverse by block doubling, exponents that are sums
over rows), with one difference. The decays within a block of `base` rows are products

    (exp(P_i) 2^s) (exp(-P_j) 2^-s),      P_i the sum of g over the block behind its first row,

where -P_j is at most (base - 1) |lower_bound|: 75 nats at K3's bound of -5 with 16 rows, and the
power of two, exact, keeps both factors and their bfloat16 parts away from the ends of float32. All
other exponents are <= 0. Wider bounds take smaller blocks, none at all takes base = 1, where that
product is exp(0) and block doubling is all there is. An anchor at the first row, and not in the
middle, is what makes outputs independent of later tokens to the last bit.

All sums of g come from one product with a matrix of 0 and 1, a row block each for: the first
row of the base block, one border a level of doubling, the entry and the end of the chunk.

Every dot is float32 with precision HIGHEST (six bfloat16 passes), C = chunk, L = levels (2 or 6):

    sums @ g                   [(L + 3) C, C] x [C, G K]   exponents: absolute errors count
    [k; q] @ k^T               [2 C, K] x [K, C]           L + 1 times a head
    inverse                    [C, C] x [C, C]             2 (log2(C) - 1) times a head
    [k; q] @ S^T               [2 C, K] x [K, V]           once a head
    inverse @ rest, Z @ u      [C, C] x [C, V]             once a head
    u^T @ k                    [V, C] x [C, K]             once a head

VMEM at K = V = 128, C = 64, G = 4 heads a step, bfloat16 inputs, each block twice for the pipeline:
q, k, v, z 512 KiB, o 128 KiB, b at most 64 KiB, states in and out 1 MiB, sums 320 KiB, gates 16 KiB;
with the float32 values of a step (2.5 MiB) under 5 MiB, whatever T is. The limit is 16 MiB.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

CHUNK = 64
LANES = 128
ROWS = 8  # of a tile of float32
SMALLEST = 16  # rows of a tile of bfloat16
HEADS = 6  # of a step at most: independent chains of products that overlap
LARGEST = 80.0  # nats of a positive exponent; float32 ends at 88


def refusal(q_BTHK, v_BTHV, z_BTHK, b_BTH) -> str | None:
    """Why the kernel cannot take arrays of these shapes and dtypes; None if it can.

    Every lower bound of the gate is fine, None included.
    """
    for name, x in (("K", q_BTHK), ("V", v_BTHV)):
        if x.shape[-1] % LANES:
            return f"{name} is {x.shape[-1]}, no multiple of {LANES} lanes"
    for name, x in (("q", q_BTHK), ("v", v_BTHV), ("z", z_BTHK), ("b", b_BTH)):
        if x.dtype not in (jnp.float32, jnp.bfloat16):
            return f"{name} is {x.dtype}, not float32 or bfloat16"
    return None


def base_rows(lower_bound: float | None, chunk: int) -> int:
    """Rows whose decays are products around their first one; 1 for none."""
    rows = 1
    while lower_bound is not None and rows < 16 and (2 * rows - 1) * -lower_bound <= LARGEST:
        rows *= 2
    return min(rows, chunk)


def _scale(lower_bound: float | None, base: int) -> float:
    """The power of two in the middle of what `exp` gives in a block of ``base`` rows."""
    return 2.0 ** round((base - 1) * -(lower_bound or 0.0) / 2 / np.log(2))


def _widths(base: int, chunk: int) -> list[int]:
    """Widths of the blocks that merge: base, 2 base, .., chunk / 2."""
    return [base << level for level in range((chunk // base).bit_length() - 1)]


def _sums(base: int, chunk: int) -> np.ndarray:
    """float32 [(L + 3) C, C]: what to add up of g, in row blocks (see the head of this file)."""
    row, column = np.arange(chunk)[:, None], np.arange(chunk)
    blocks = [(column > row // base * base) & (column <= row)]
    for width in _widths(base, chunk):
        is_right = row // width % 2 == 1
        blocks.append(
            (row // width == column // width) & np.where(is_right, column <= row, column > row)
        )
    return np.concatenate([*blocks, column <= row, column > row]).astype(np.float32)


def _dot(a, b, contract, precision=lax.Precision.HIGHEST):
    """One of the dots listed at the head of this file, over leading axes that are equal."""
    batch = tuple(range(a.ndim - 2))
    at = tuple((x.ndim - 2 + axis,) for x, axis in zip((a, b), contract, strict=True))
    return lax.dot_general(
        a, b, (at, (batch, batch)), precision=precision,
        preferred_element_type=jnp.float32,
    )  # fmt: skip


_NN, _NT, _TN = (1, 0), (1, 1), (0, 0)


def _summed(sums_XC, g_CP):
    """sums @ g to the last bit of float32: g in three bfloat16 parts, which 0 and 1 multiply exactly."""
    parts, rest = [], g_CP
    for _ in range(3):
        parts.append(rest.astype(jnp.bfloat16))
        rest = rest - parts[-1].astype(jnp.float32)
    return lax.dot_general(
        jnp.concatenate([sums_XC] * 3, axis=1), jnp.concatenate(parts, axis=0),
        (((1,), (0,)), ((), ())), precision=lax.Precision.DEFAULT, preferred_element_type=jnp.float32,
    )


def unit(x):
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def log_decay(z, rate, bias, lower_bound):
    """`decay` of core.py on [rows, channels] with exp(A_log) and dt_bias as [1, channels]."""
    shifted = z + bias
    if lower_bound is None:
        return -rate * (jnp.maximum(shifted, 0) + jnp.log1p(jnp.exp(-jnp.abs(shifted))))
    return lower_bound * jax.nn.sigmoid(rate * shifted)


def _iota(rows, columns):
    shape = (rows, columns)
    return (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))


def _pairs(row, column, width):
    """Row in a right, column in the left block of one merger of blocks of ``width`` rows."""
    shift = width.bit_length() - 1
    block = row >> shift
    return (block & 1 == 1) & (column >> shift == block - 1)


def _right_blocks(x, width):
    """The rows of every second block of ``width`` rows; their number is halved."""
    return jnp.concatenate(
        [x[:, at : at + width] for at in range(width, x.shape[1], 2 * width)], axis=1
    )


def _products(q_GCK, k_GCK, factors, base, precision):
    """A (j < i) and Z (j <= i); ``factors`` are exp of the first L + 1 row blocks of the sums."""
    chunk = k_GCK.shape[1]
    row_CC, column_CC = _iota(chunk, chunk)
    (rise_GCK, fall_GCK), *borders = factors
    shift = base.bit_length() - 1
    both = jnp.concatenate([k_GCK * rise_GCK, q_GCK * rise_GCK], axis=1)
    product = _dot(both, k_GCK * fall_GCK, _NT, precision)
    same_CC = row_CC >> shift == column_CC >> shift
    keys_GCC = jnp.where(same_CC & (column_CC < row_CC), product[:, :chunk], 0.0)
    scores_GCC = jnp.where(same_CC & (column_CC <= row_CC), product[:, chunk:], 0.0)
    for border_GCK, width in zip(borders, _widths(base, chunk), strict=True):
        left_GCK = k_GCK * border_GCK
        both = [left_GCK, q_GCK * border_GCK]
        if width >= ROWS:  # the rows of left blocks come out as zeros
            both = [_right_blocks(x, width) for x in both]
        product = _dot(jnp.concatenate(both, axis=1), left_GCK, _NT, precision)
        half = product.shape[1] // 2
        both = [product[:, :half], product[:, half:]]
        if width >= ROWS:
            both = [_repeat_blocks(x, width) for x in both]
        mask_CC = _pairs(row_CC, column_CC, width)
        keys_GCC = jnp.where(mask_CC, both[0], keys_GCC)
        scores_GCC = jnp.where(mask_CC, both[1], scores_GCC)
    return keys_GCC, scores_GCC


def _repeat_blocks(x, width):
    """Each block of ``width`` rows twice."""
    blocks = [x[:, at : at + width] for at in range(0, x.shape[1], width)]
    return jnp.concatenate([block for block in blocks for _ in range(2)], axis=1)


def _unit_inverse(lower_GCC):
    """Inverse of I + lower (zero on and above the diagonal) by block doubling; see `xla.py`.

    The inverses of the diagonal blocks stand side by side, [block, C], and `spread` makes a
    block-diagonal matrix of them, so that one short product serves all blocks: 144 rows through the
    matrix unit for a chunk of 64 instead of 640.
    """
    heads, chunk, _ = lower_GCC.shape
    row_CC, column_CC = _iota(chunk, chunk)

    def side_by_side(x_GCC, width):
        blocks = [x_GCC[:, at : at + width] for at in range(0, chunk, width)]
        column = lax.broadcasted_iota(jnp.int32, (width, chunk), 1) >> (width.bit_length() - 1)
        return sum(jnp.where(column == i, block, 0.0) for i, block in enumerate(blocks))

    def spread(x_GWC, mask_CC):
        copies = chunk // x_GWC.shape[1]
        return jnp.where(mask_CC, jnp.concatenate([x_GWC] * copies, axis=1), 0.0)

    shift = ROWS.bit_length() - 1
    same_CC = row_CC >> shift == column_CC >> shift
    lower_GWC = side_by_side(lower_GCC, ROWS)
    row_WC, column_WC = _iota(ROWS, chunk)
    own_WC = column_WC & (ROWS - 1)
    inverse_GWC = jnp.where(row_WC == own_WC, 1.0, 0.0) - jnp.where(
        _pairs(row_WC, own_WC, 1), lower_GWC, 0.0
    )
    for width in _widths(2, ROWS):
        crossing_GWC = jnp.where(_pairs(row_WC, own_WC, width), lower_GWC, 0.0)
        step_GWC = _dot(crossing_GWC, spread(inverse_GWC, same_CC), _NN)
        inverse_GWC -= _dot(inverse_GWC, spread(step_GWC, same_CC), _NN)
    for width in _widths(ROWS, chunk):
        shift = width.bit_length() - 1
        same_CC = row_CC >> shift == column_CC >> shift
        pairs_CC = _pairs(row_CC, column_CC, width)
        crossing = jnp.where(pairs_CC, lower_GCC, 0.0)
        crossing_GWC = sum(
            crossing[:, at : at + width] for at in range(width, chunk, 2 * width)
        )
        step_GWC = _dot(crossing_GWC, spread(inverse_GWC, same_CC), _NN)
        step_GWC = _dot(inverse_GWC, spread(step_GWC, pairs_CC), _NN)
        left = (lax.broadcasted_iota(jnp.int32, (width, chunk), 1) >> shift) & 1 == 0
        inverse_GWC = jnp.concatenate(
            [jnp.where(left, inverse_GWC, 0.0), jnp.where(left, -step_GWC, inverse_GWC)], axis=1
        )
    return inverse_GWC


def _kernel(
    lengths_ref, q_ref, k_ref, v_ref, z_ref, b_ref, gates_ref, sums_ref, state_ref,
    o_ref, new_state_ref, *, lower_bound,
):  # fmt: skip
    row, group, n = (pl.program_id(axis) for axis in range(3))
    heads, v_dim, k_dim = state_ref.shape[1:]
    chunk = q_ref.shape[1]
    length = lengths_ref[row]

    @pl.when(n == 0)
    def _():
        new_state_ref[...] = state_ref[...]

    @pl.when(n * chunk >= length)
    def _():
        o_ref[...] = jnp.zeros_like(o_ref)

    @pl.when(n * chunk < length)
    def _():
        reads = lax.Precision.HIGHEST if q_ref.dtype == jnp.float32 else lax.Precision.HIGH
        base = base_rows(lower_bound, chunk)
        real_C1 = lax.broadcasted_iota(jnp.int32, (chunk, 1), 0) < length - n * chunk

        def rows(ref):
            return jnp.where(real_C1, ref[0].astype(jnp.float32), 0.0)

        def by_head(x, width):  # [rows, heads width] -> [heads, rows, width]
            return jnp.stack([x[:, h * width : (h + 1) * width] for h in range(heads)])

        q_GCK = unit(by_head(rows(q_ref), k_dim)) * k_dim**-0.5
        k_GCK = unit(by_head(rows(k_ref), k_dim))
        v_GCV = by_head(rows(v_ref), v_dim)
        b_CH = jnp.where(real_C1, jax.nn.sigmoid(rows(b_ref)), 0.0)
        lane_CH = lax.broadcasted_iota(jnp.int32, b_CH.shape, 1)
        columns = [
            jnp.sum(jnp.where(lane_CH == group * heads + h, b_CH, 0.0), axis=1, keepdims=True)
            for h in range(heads)
        ]
        beta_GC1 = jnp.stack(columns)

        g_CP = log_decay(rows(z_ref), gates_ref[0:1], gates_ref[1:2], lower_bound)
        logs_XP = _summed(sums_ref[...], jnp.where(real_C1, g_CP, 0.0))
        logs = [logs_XP[i : i + chunk] for i in range(0, logs_XP.shape[0], chunk)]
        scale = _scale(lower_bound, base)
        fall_GCK = by_head(jnp.exp(-logs[0]) / scale, k_dim)
        rise_GCK, *borders, entry_GCK, end_GCK = (by_head(jnp.exp(x), k_dim) for x in logs)
        factors = [(rise_GCK * scale, fall_GCK), *borders]

        keys_GCC, scores_GCC = _products(q_GCK, k_GCK, factors, base, reads)
        inverse_GCC = _unit_inverse(beta_GC1 * keys_GCC)
        state_GVK = new_state_ref[0]
        both = jnp.concatenate([k_GCK * entry_GCK, q_GCK * entry_GCK], axis=1)
        held = _dot(both, state_GVK, _NT, reads)
        u_GCV = _dot(inverse_GCC, beta_GC1 * (v_GCV - held[:, :chunk]), _NN)
        o_GCV = held[:, chunk:] + _dot(scores_GCC, u_GCV, _NN, reads)
        written_GVK = _dot(u_GCV, k_GCK * end_GCK, _TN)
        new_state_ref[0] = state_GVK * entry_GCK[:, chunk - 1 :] + written_GVK
        for h in range(heads):
            o_ref[0, :, h * v_dim : (h + 1) * v_dim] = jnp.where(real_C1, o_GCV[h], 0.0).astype(
                o_ref.dtype
            )


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
    *,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """The function of the table in `gated.py`. ``interpret`` runs it in plain JAX, for tests."""
    batch, length, heads, k_dim = k_BTHK.shape
    v_dim = v_BTHV.shape[-1]
    chunk = min(CHUNK, max(SMALLEST, pl.next_power_of_2(length)))
    group = next(g for g in range(HEADS, 0, -1) if heads % g == 0)
    if lengths_B is None:
        lengths_B = jnp.full((batch,), length, jnp.int32)
    lengths_B = jnp.clip(lengths_B, 0, length)
    rate_HK = jnp.broadcast_to(jnp.exp(A_log_H)[:, None], dt_bias_HK.shape)
    gates_2P = jnp.stack([rate_HK, dt_bias_HK]).reshape(2, -1)
    sums = jnp.asarray(_sums(base_rows(lower_bound, chunk), chunk), jnp.bfloat16)

    def wide(x):
        return x.reshape(batch, length, -1)

    def chunks(b, n, lengths_ref):  # chunks of padding are not fetched: the last one again
        return jnp.minimum(n, jnp.maximum(pl.cdiv(lengths_ref[b], chunk) - 1, 0))

    def rows(width):
        return pl.BlockSpec((1, chunk, group * width), lambda b, h, n, s: (b, chunks(b, n, s), h))

    state = pl.BlockSpec((1, group, v_dim, k_dim), lambda b, h, n, s: (b, h, 0, 0))
    o_BTP, state_BHVK = pl.pallas_call(
        partial(_kernel, lower_bound=lower_bound),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, heads // group, pl.cdiv(length, chunk)),
            in_specs=[
                rows(k_dim),
                rows(k_dim),
                rows(v_dim),
                rows(k_dim),
                pl.BlockSpec((1, chunk, heads), lambda b, h, n, s: (b, chunks(b, n, s), 0)),
                pl.BlockSpec((2, group * k_dim), lambda b, h, n, s: (0, h)),
                pl.BlockSpec(sums.shape, lambda b, h, n, s: (0, 0)),
                state,
            ],
            out_specs=[
                pl.BlockSpec((1, chunk, group * v_dim), lambda b, h, n, s: (b, n, h)),
                state,
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((batch, length, heads * v_dim), v_BTHV.dtype),
            jax.ShapeDtypeStruct(state_BHVK.shape, jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
        interpret=interpret,
        name="gated_kda",
    )(
        lengths_B, wide(q_BTHK), wide(k_BTHK), wide(v_BTHV), wide(z_BTHK), b_BTH, gates_2P, sums,
        state_BHVK,
    )  # fmt: skip
    return o_BTP.reshape(v_BTHV.shape), state_BHVK
