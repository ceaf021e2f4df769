"""Gated KDA over many tokens as one Pallas kernel for TPUs (Mosaic).

Norms, gate, chunked delta rule and masks in one pass over HBM. The grid is (batch row, group of
heads, chunk of rows); the last axis runs in order and the state of the group stays in VMEM, in the
output block that all its chunks share. Arrays are blocks of [B, T, H K] views, which cost nothing
where q, k, v and z come out of projections: a block is [chunk, heads K], lanes in whole heads.

The mathematics is that of `xla.py` (A, Z, the inverse by block doubling, exponents that are sums
over rows), with one difference. The decays within a block of `base` rows are products

    exp(P_i - P_m) exp(P_m - P_j),      P_m at the middle row of the block,

whose exponents are at most base/2 |lower_bound| nats: 40 at K3's bound of -5 with 16 rows, which
leaves float32 and its halves in bfloat16 in range. All other exponents are <= 0. Without a bound, or
with one beyond -10, base is 1 and that product is exp(0): block doubling alone, right for any gate.

All sums of g come from one product with a matrix of 0, 1 and -1, a row block each for: the middle
of the base block, one border a level of doubling, the entry and the end of the chunk.

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
SMALLEST = 16  # rows of a tile of bfloat16
HEADS = 4  # a step: as many independent chains of products to overlap
CENTRED = 80.0  # nats: largest base |lower_bound| / 2 of a centred product; exp(80) = 5.5e34


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
    """Rows whose decays are products around their middle; 1 for none."""
    if lower_bound is None or SMALLEST / 2 * -lower_bound > CENTRED:
        return 1
    return min(SMALLEST, chunk)


def _widths(base: int, chunk: int) -> list[int]:
    """Widths of the blocks that merge: base, 2 base, .., chunk / 2."""
    return [base << level for level in range((chunk // base).bit_length() - 1)]


def _sums(base: int, chunk: int) -> np.ndarray:
    """float32 [(L + 3) C, C]: what to add up of g, in row blocks (see the head of this file)."""
    row, column = np.arange(chunk)[:, None], np.arange(chunk)
    middle = row // base * base + base // 2
    after = (column > middle) & (column <= row)
    before = (column > row) & (column <= middle)
    blocks = [np.where(after, 1, 0) - np.where(before, 1, 0)]
    for width in _widths(base, chunk):
        is_right = row // width % 2 == 1
        blocks.append(
            (row // width == column // width) & np.where(is_right, column <= row, column > row)
        )
    return np.concatenate([*blocks, column <= row, column > row]).astype(np.float32)


def _dot(a, b, contract):
    """One of the dots listed at the head of this file, over leading axes that are equal."""
    batch = tuple(range(a.ndim - 2))
    at = tuple((x.ndim - 2 + axis,) for x, axis in zip((a, b), contract, strict=True))
    return lax.dot_general(
        a, b, (at, (batch, batch)), precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )  # fmt: skip


_NN, _NT, _TN = (1, 0), (1, 1), (0, 0)


def _l2norm(x):
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def _decay(z, rate, bias, lower_bound):
    """`decay` of core.py on [rows, channels] with exp(A_log) and dt_bias as [1, channels]."""
    shifted = z + bias
    if lower_bound is None:
        # softplus without log1p, which loses nothing here: a decay of -1e-8 is none.
        return -rate * (jnp.maximum(shifted, 0) + jnp.log(1 + jnp.exp(-jnp.abs(shifted))))
    return lower_bound * jax.nn.sigmoid(rate * shifted)


def _pairs(row_CC, column_CC, width):
    """Row in a right, column in the left block of one merger of blocks of ``width`` rows."""
    shift = width.bit_length() - 1
    block_CC = row_CC >> shift
    return (block_CC & 1 == 1) & (column_CC >> shift == block_CC - 1)


def _products(q_GCK, k_GCK, factors, base):
    """A (j < i) and Z (j <= i); ``factors`` are exp of the first L + 1 row blocks of the sums."""
    chunk = k_GCK.shape[1]
    row_CC = lax.broadcasted_iota(jnp.int32, (chunk, chunk), 0)
    column_CC = lax.broadcasted_iota(jnp.int32, (chunk, chunk), 1)
    (rise_GCK, fall_GCK), *borders = factors
    shift = base.bit_length() - 1
    masks = [row_CC >> shift == column_CC >> shift]
    masks += [_pairs(row_CC, column_CC, width) for width in _widths(base, chunk)]
    keys_GCC = scores_GCC = jnp.zeros((k_GCK.shape[0], chunk, chunk), jnp.float32)
    for (left, right), mask_CC in zip(
        [(fall_GCK, rise_GCK), *((x, x) for x in borders)], masks, strict=True
    ):
        both = jnp.concatenate([k_GCK * right, q_GCK * right], axis=1)
        product = _dot(both, k_GCK * left, _NT)
        keys_GCC = jnp.where(mask_CC, product[:, :chunk], keys_GCC)
        scores_GCC = jnp.where(mask_CC, product[:, chunk:], scores_GCC)
    keys_GCC = jnp.where(column_CC < row_CC, keys_GCC, 0.0)
    return keys_GCC, jnp.where(column_CC <= row_CC, scores_GCC, 0.0)


def _unit_inverse(lower_GCC):
    """Inverse of I + lower (zero on and above the diagonal) by block doubling; see `xla.py`."""
    chunk = lower_GCC.shape[-1]
    row_CC = lax.broadcasted_iota(jnp.int32, (chunk, chunk), 0)
    column_CC = lax.broadcasted_iota(jnp.int32, (chunk, chunk), 1)
    crossing = [jnp.where(_pairs(row_CC, column_CC, w), lower_GCC, 0.0) for w in _widths(1, chunk)]
    inverse_GCC = jnp.where(row_CC == column_CC, 1.0, 0.0) - crossing[0]
    for crossing_GCC in crossing[1:]:
        update_GCC = _dot(inverse_GCC, _dot(crossing_GCC, inverse_GCC, _NN), _NN)
        inverse_GCC = inverse_GCC - update_GCC
    return inverse_GCC


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
        base = base_rows(lower_bound, chunk)
        real_C1 = lax.broadcasted_iota(jnp.int32, (chunk, 1), 0) < length - n * chunk

        def rows(ref):
            return jnp.where(real_C1, ref[0].astype(jnp.float32), 0.0)

        def by_head(x, width):  # [rows, heads width] -> [heads, rows, width]
            return jnp.stack([x[:, h * width : (h + 1) * width] for h in range(heads)])

        q_GCK = _l2norm(by_head(rows(q_ref), k_dim)) * k_dim**-0.5
        k_GCK = _l2norm(by_head(rows(k_ref), k_dim))
        v_GCV = by_head(rows(v_ref), v_dim)
        b_CH = jnp.where(real_C1, jax.nn.sigmoid(rows(b_ref)), 0.0)
        lane_CH = lax.broadcasted_iota(jnp.int32, b_CH.shape, 1)
        columns = [
            jnp.sum(jnp.where(lane_CH == group * heads + h, b_CH, 0.0), axis=1, keepdims=True)
            for h in range(heads)
        ]
        beta_GC1 = jnp.stack(columns)

        g_CP = _decay(rows(z_ref), gates_ref[0:1], gates_ref[1:2], lower_bound)
        logs_XP = _dot(sums_ref[...], jnp.where(real_C1, g_CP, 0.0), _NN)
        logs = [logs_XP[i : i + chunk] for i in range(0, logs_XP.shape[0], chunk)]
        fall_GCK = by_head(jnp.exp(-logs[0]), k_dim)
        rise_GCK, *borders, entry_GCK, end_GCK = (by_head(jnp.exp(x), k_dim) for x in logs)

        keys_GCC, scores_GCC = _products(q_GCK, k_GCK, [(rise_GCK, fall_GCK), *borders], base)
        inverse_GCC = _unit_inverse(beta_GC1 * keys_GCC)
        state_GVK = new_state_ref[0]
        both = jnp.concatenate([k_GCK * entry_GCK, q_GCK * entry_GCK], axis=1)
        held = _dot(both, state_GVK, _NT)
        u_GCV = _dot(inverse_GCC, beta_GC1 * (v_GCV - held[:, :chunk]), _NN)
        o_GCV = held[:, chunk:] + _dot(scores_GCC, u_GCV, _NN)
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
    sums = jnp.asarray(_sums(base_rows(lower_bound, chunk), chunk))

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
