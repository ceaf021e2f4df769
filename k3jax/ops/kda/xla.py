"""Kimi Delta Attention in plain JAX: runs on every backend, differentiable.

Three forms of one recurrence. `recurrent` scans tokens. `chunked` and `associative` cut the
sequence into chunks of 64 rows, solve every chunk in parallel for an unknown entry state, and
differ only in how the entry states are found: a sequential scan over chunk maps, or
`lax.associative_scan` over their compositions.

With P_i the sum of g over rows 1..i of a chunk and g(j, i] the sum over rows j+1..i, unrolling the
recurrence from the entry state S gives (Kimi Linear paper, the chunkwise form):

    (I + diag(beta) A) U = diag(beta) (V - Kp S^T)      A_ij = sum_c k_ic k_jc exp(g(j, i]_c), j < i
    O  = Qp S^T + Z U                                 Z_ij = sum_c q_ic k_jc exp(g(j, i]_c), j <= i
    S' = S diag(exp(P_64)) + U^T Ks
    Kp_i = k_i exp(P_i),  Qp_i = q_i exp(P_i),  Ks_j = k_j exp(g(j, 64])

The decays need care. Splitting exp(g(j, i]) into exp(P_i) exp(-P_j) overflows float32 once 88 nats
have gathered (18 rows at the bound of -5), and P_i - P_j in log space cancels digits. Here A and Z
are built by block doubling, 1 -> 2 -> 4 -> ... -> 64. When two neighbours merge, row i lies in the
right one and row j in the left one, so that

    g(j, i] = (rest of the left block after j) + (right block up to and with i)

is split at their border: two sums of non-positive numbers, two exponentials in [0, 1], one matmul.
No log decay is ever subtracted and no argument of `exp` is ever positive, so every lower bound of
the gate is right, none included, and no [64, 64, K] or [16, 16, K] array exists.

The inverse of I + L, L = diag(beta) A, merges the same blocks,

    inv([[P, 0], [X, R]]) = [[inv P, 0], [-inv(R) X inv(P), inv R]],

which is substitution in another order. Its intermediates are entries of products of the
contractions I - beta k k^T, hence at most 1 for unit keys: 64 equal keys with beta = 0.999 and no
decay come out to 1e-6. Neumann or Newton products pass through powers of L, which reach 1e9 there.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from k3jax.ops.kda.packing import Packing

CHUNK = 64
# Rows are solved in groups of chunks whose [rows, heads, channels] float32 arrays stay below
# 128 MiB; a forward pass has about 15 of them alive, a backward pass about 40. Longer inputs scan
# over groups.
GROUP_ELEMENTS = 2**25

_exp = jnp.exp  # the single exponential of this file; the tests watch its arguments


def _matmul(a, b):
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def _each(matrix_CC, x_CX):
    """A constant matrix times every chunk, as products of one shape.

    A single product over all columns would round differently with the number of chunks (seen on
    CPUs when it is odd), and a packed sequence would not give the bits that it gives alone.
    """
    return _matmul(jnp.broadcast_to(matrix_CC, (*x_CX.shape[:-2], *matrix_CC.shape)), x_CX)


def _transposed(x):
    return jnp.swapaxes(x, -1, -2)


def _step(state_BHVK, inputs):
    """One token. Sums are elementwise so that no backend lowers them to a reduced-precision dot."""
    q_BHK, k_BHK, v_BHV, g_BHK, beta_BH = (x.astype(jnp.float32) for x in inputs)
    state_BHVK = _exp(g_BHK)[..., None, :] * state_BHVK
    held_BHV = jnp.sum(state_BHVK * k_BHK[..., None, :], axis=-1)
    u_BHV = beta_BH[..., None] * (v_BHV - held_BHV)
    state_BHVK = state_BHVK + u_BHV[..., None] * k_BHK[..., None, :]
    return state_BHVK, jnp.sum(state_BHVK * q_BHK[..., None, :], axis=-1)


def recurrent(q_BTHK, k_BTHK, v_BTHV, g_BTHK, beta_BTH, state_BHVK):
    """`lax.scan` over tokens: the form for decode.

    Under `jax.grad` the scan keeps one state a token; train with `chunked`.
    """
    inputs = (q_BTHK, k_BTHK, v_BTHV, g_BTHK, beta_BTH)
    if k_BTHK.shape[1] == 1:
        state_BHVK, o_BHV = _step(state_BHVK, [x[:, 0] for x in inputs])
        return o_BHV[:, None], state_BHVK
    state_BHVK, o_TBHV = lax.scan(_step, state_BHVK, [jnp.moveaxis(x, 1, 0) for x in inputs])
    return jnp.moveaxis(o_TBHV, 0, 1), state_BHVK


class _Chunk(NamedTuple):
    """One chunk solved for an unknown entry state S: U = u - w S^T. Leading axes N, B, H."""

    q_CK: Array  # Qp: queries decayed from the entry of the chunk
    scores_CC: Array  # Z
    u_CV: Array
    w_CK: Array
    k_CK: Array  # Ks: keys decayed to the end of the chunk
    decay_K: Array  # exp(P_64)


def _level_masks(size):
    """Two 0/1 masks [levels, C, C] for the mergers of blocks of width 1, 2, .., C/2.

    `sums` times g: for a row of a right block the sum over its block up to and with the row, for a
    row of a left block the sum over its block behind the row. `pairs` is (i, j) with i in the right
    and j in the left block of one merger; all levels together are the strict lower triangle.
    """
    rows = np.arange(size)
    widths = [1 << level for level in range(size.bit_length() - 1)]
    block = np.array([rows // width for width in widths], np.int32).reshape(-1, size)
    same = block[:, :, None] == block[:, None, :]
    is_right = block[:, :, None] % 2 == 1
    sums = same & np.where(is_right, rows <= rows[:, None], rows > rows[:, None])
    pairs = is_right & (block[:, None, :] == block[:, :, None] - 1)
    return sums.astype(np.float32), pairs


def _decayed_products(q_CK, k_CK, g_CK):
    """A (j < i) and Z (j <= i), level by level on whole [C, C] matrices with masks.

    That is twice the arithmetic of exact block shapes and a tenth of their compile time.
    """
    size = k_CK.shape[-2]

    def merge(totals, masks):
        keys_CC, scores_CC = totals
        sums_CC, pairs_CC = masks
        to_border_CK = _exp(_each(sums_CC, g_CK))
        k_border_CK = k_CK * to_border_CK
        left_KC = _transposed(k_border_CK)
        keys_CC = jnp.where(pairs_CC, _matmul(k_border_CK, left_KC), keys_CC)
        scores_CC = jnp.where(pairs_CC, _matmul(q_CK * to_border_CK, left_KC), scores_CC)
        return (keys_CC, scores_CC), None

    zeros_CC = jnp.zeros((*k_CK.shape[:-1], size), jnp.float32)
    (keys_CC, scores_CC), _ = lax.scan(merge, (zeros_CC, zeros_CC), _level_masks(size))
    # j = i, as a product too: XLA:CPU sums rows in an order that depends on the number of chunks.
    own_CC = _matmul(q_CK, _transposed(k_CK))
    return keys_CC, jnp.where(np.eye(size, dtype=bool), own_CC, scores_CC)


@jax.custom_jvp
def _unit_inverse(lower_CC):
    """The inverse of I + lower, with `lower` zero on and above the diagonal."""
    size = lower_CC.shape[-1]

    def merge(inverse_CC, pairs_CC):
        crossing_CC = jnp.where(pairs_CC, lower_CC, 0.0)
        return inverse_CC - _matmul(inverse_CC, _matmul(crossing_CC, inverse_CC)), None

    eye_CC = jnp.broadcast_to(jnp.eye(size, dtype=jnp.float32), lower_CC.shape)
    return lax.scan(merge, eye_CC, _level_masks(size)[1])[0]


@_unit_inverse.defjvp
def _unit_inverse_jvp(primals, tangents):
    inverse_CC = _unit_inverse(*primals)
    return inverse_CC, -_matmul(inverse_CC, _matmul(tangents[0], inverse_CC))


def _solve(q_CK, k_CK, v_CV, g_CK, beta_C) -> _Chunk:
    """Solves chunks: float32, any leading axes, C a power of two."""
    keys_CC, scores_CC = _decayed_products(q_CK, k_CK, g_CK)
    inverse_CC = _unit_inverse(beta_C[..., None] * keys_CC) * beta_C[..., None, :]
    upto_CC = np.tri(k_CK.shape[-2], dtype=np.float32)
    from_entry_CK = _exp(_each(upto_CC, g_CK))
    to_end_CK = _exp(_each(1 - upto_CC, g_CK))
    return _Chunk(
        q_CK=q_CK * from_entry_CK,
        scores_CC=scores_CC,
        u_CV=_matmul(inverse_CC, v_CV),
        w_CK=_matmul(inverse_CC, k_CK * from_entry_CK),
        k_CK=k_CK * to_end_CK,
        decay_K=from_entry_CK[..., -1, :],
    )


def _erase_and_write(chunk: _Chunk):
    """(E, B) with S' = S decay - S E + B. Padding has exactly E = B = 0 and decay = 1."""
    erase_KK = _matmul(_transposed(chunk.w_CK), chunk.k_CK)
    return erase_KK, _matmul(_transposed(chunk.u_CV), chunk.k_CK)


def _dense_maps(chunk: _Chunk):
    erase_KK, write_VK = _erase_and_write(chunk)
    eye_KK = jnp.eye(erase_KK.shape[-1], dtype=jnp.float32)
    return chunk.decay_K[..., None] * eye_KK - erase_KK, write_VK


def compose(earlier, later):
    """The map of two stretches in a row: S -> (S M1 + B1) M2 + B2.

    Associative, so `lax.associative_scan(compose, maps)` gives the map of every prefix.

    Args:
      earlier, later: (M [..., K, K], B [..., V, K]) float32 pairs as `chunk_maps` returns them.
    """
    (m1_KK, b1_VK), (m2_KK, b2_VK) = earlier, later
    return _matmul(m1_KK, m2_KK), _matmul(b1_VK, m2_KK) + b2_VK


def _states_sequential(chunk: _Chunk, state_BHVK):
    """Entry states of all chunks [N, B, H, V, K] and the last state: one matmul a chunk."""
    erase_NBHKK, write_NBHVK = _erase_and_write(chunk)

    def body(state_BHVK, x):
        decay_BHK, erase_BHKK, write_BHVK = x
        erased_BHVK = _matmul(state_BHVK, erase_BHKK)
        return decay_BHK[..., None, :] * state_BHVK - erased_BHVK + write_BHVK, state_BHVK

    state_BHVK, entry_NBHVK = lax.scan(body, state_BHVK, (chunk.decay_K, erase_NBHKK, write_NBHVK))
    return entry_NBHVK, state_BHVK


def _states_packed(chunk: _Chunk, carry, *, sequence_C):
    """The same with one state a sequence, exchanged where the next one begins.

    The carry is (states [N, H, V, K], number of the first chunk); B is 1.
    """
    state_NHVK, first = carry
    erase_C1HKK, write_C1HVK = _erase_and_write(chunk)
    number_C = first + jnp.arange(erase_C1HKK.shape[0], dtype=jnp.int32)
    sequence_C = sequence_C.at[number_C].get(mode="fill", fill_value=state_NHVK.shape[0])

    def body(state_NHVK, x):
        decay_1HK, erase_1HKK, write_1HVK, sequence = x
        state_1HVK = state_NHVK.at[sequence].get(mode="fill", fill_value=0)[None]
        erased_1HVK = _matmul(state_1HVK, erase_1HKK)
        after_1HVK = decay_1HK[..., None, :] * state_1HVK - erased_1HVK + write_1HVK
        return state_NHVK.at[sequence].set(after_1HVK[0], mode="drop"), state_1HVK

    inputs = (chunk.decay_K, erase_C1HKK, write_C1HVK, sequence_C)
    state_NHVK, entry_C1HVK = lax.scan(body, state_NHVK, inputs)
    return entry_C1HVK, (state_NHVK, first + jnp.int32(number_C.size))


def _states_associative(chunk: _Chunk, state_BHVK):
    """The same by a parallel prefix over chunk maps: log2(N) deep, K / V more arithmetic."""
    m_NBHKK, b_NBHVK = lax.associative_scan(compose, _dense_maps(chunk))
    after_NBHVK = _matmul(state_BHVK, m_NBHKK) + b_NBHVK
    return jnp.concatenate([state_BHVK[None], after_NBHVK[:-1]]), after_NBHVK[-1]


def _to_chunks(x_BTHX, size):
    """[B, T, H, X] -> float32 [N, B, H, C, X]."""
    batch, length, heads, width = x_BTHX.shape
    x_BNCHX = x_BTHX.reshape(batch, length // size, size, heads, width)
    return jnp.transpose(x_BNCHX, (1, 0, 3, 2, 4)).astype(jnp.float32)


def _solve_rows(q_BTHK, k_BTHK, v_BTHV, g_BTHK, beta_BTH, *, size):
    q, k, v, g, beta = (
        _to_chunks(x, size) for x in (q_BTHK, k_BTHK, v_BTHV, g_BTHK, beta_BTH[..., None])
    )
    return _solve(q, k, v, g, beta[..., 0])


def _group(state_BHVK, inputs, *, size, states):
    """A group of chunks: solve all, find the entry states, read all outputs."""
    chunk = _solve_rows(*inputs, size=size)
    entry_NBHVK, state_BHVK = states(chunk, state_BHVK)
    entry_NBHKV = _transposed(entry_NBHVK)
    u_NBHCV = chunk.u_CV - _matmul(chunk.w_CK, entry_NBHKV)
    o_NBHCV = _matmul(chunk.q_CK, entry_NBHKV) + _matmul(chunk.scores_CC, u_NBHCV)
    o_BNCHV = jnp.transpose(o_NBHCV, (1, 0, 3, 2, 4))
    batch, chunks, _, heads, v_dim = o_BNCHV.shape
    return state_BHVK, o_BNCHV.reshape(batch, chunks * size, heads, v_dim)


def chunk_size(length):
    """64, or the next power of two for shorter inputs."""
    return min(CHUNK, 1 << (length - 1).bit_length())


def _pad_rows(inputs, rows):
    """Appends rows of zeros: g = 0, beta = 0, k = 0 change no state and no earlier output."""
    return [
        jnp.pad(x, [(0, 0), (0, rows)] + [(0, 0)] * (x.ndim - 2)) if rows else x for x in inputs
    ]


def _in_groups(inputs, size, width):
    """[B, T, ...] as [G, B, rows, ...]: groups of whole chunks, with zeros at the end.

    ``width`` is the larger one of K and V, see `GROUP_ELEMENTS`.
    """
    batch, length, heads = inputs[0].shape[:3]
    chunks = -(-length // size)
    groups = -(-chunks // max(1, GROUP_ELEMENTS // (batch * heads * size * width)))
    rows = -(-chunks // groups) * size  # rows of one group
    inputs = _pad_rows(inputs, groups * rows - length)
    return [jnp.moveaxis(x.reshape(batch, groups, rows, *x.shape[2:]), 1, 0) for x in inputs]


def _by_groups(q_BTHK, k_BTHK, v_BTHV, g_BTHK, beta_BTH, state_BHVK, *, states, size=None):
    batch, length, heads, k_dim = k_BTHK.shape
    size = size or chunk_size(length)
    inputs = (q_BTHK, k_BTHK, v_BTHV, g_BTHK, beta_BTH)
    inputs = _in_groups(inputs, size, max(k_dim, v_BTHV.shape[-1]))
    groups = len(inputs[0])

    # The backward pass keeps the inputs and one state a group, and solves the chunks again.
    body = jax.checkpoint(partial(_group, size=size, states=states), prevent_cse=groups == 1)
    if groups == 1:
        state_BHVK, o_BTHV = body(state_BHVK, [x[0] for x in inputs])
        return o_BTHV[:, :length], state_BHVK
    state_BHVK, o_GBTHV = lax.scan(body, state_BHVK, inputs)
    o_BTHV = jnp.moveaxis(o_GBTHV, 0, 1).reshape(batch, -1, heads, v_BTHV.shape[-1])
    return o_BTHV[:, :length], state_BHVK


def chunked(q_BTHK, k_BTHK, v_BTHV, g_BTHK, beta_BTH, state_BHVK):
    """Chunks of 64 rows solved in parallel, their maps scanned in order: prefill and training."""
    inputs = (q_BTHK, k_BTHK, v_BTHV, g_BTHK, beta_BTH)
    return _by_groups(*inputs, state_BHVK, states=_states_sequential)


def packed(q_1RHK, k_1RHK, v_1RHV, g_1RHK, beta_1RH, state_NHVK, packing: Packing):
    """`chunked` on the padded rows of packed sequences (`k3jax.ops.kda.packing`).

    Rows of padding must be zeros in all inputs. A sequence without a chunk keeps its state.
    """
    inputs = (q_1RHK, k_1RHK, v_1RHV, g_1RHK, beta_1RH)
    states = partial(_states_packed, sequence_C=packing.sequence_C)
    carry = (state_NHVK, jnp.int32(0))
    o_1RHV, (state_NHVK, _) = _by_groups(*inputs, carry, states=states, size=packing.chunk)
    return o_1RHV, state_NHVK


def associative(q_BTHK, k_BTHK, v_BTHV, g_BTHK, beta_BTH, state_BHVK):
    """`chunked` with a parallel prefix over the chunk maps: for few heads and long inputs."""
    inputs = (q_BTHK, k_BTHK, v_BTHV, g_BTHK, beta_BTH)
    return _by_groups(*inputs, state_BHVK, states=_states_associative)


def chunk_maps(k_BTHK, v_BTHV, g_BTHK, beta_BTH):
    """The affine map S -> S M + B of each chunk of 64 rows (of all T rows if T < 64).

    All of T at once: K (K + V) floats a chunk and head; `span_map` has one map for all rows.

    Args:
      k_BTHK, v_BTHV: keys and values, floating.
      g_BTHK, beta_BTH: log decay and write strength, float32. A last partial chunk is padded with
        g = 0, beta = 0, k = 0; mask other rows that must not count in the same way.

    Returns:
      (M_NBHKK, B_NBHVK) float32 with N = ceil(T / 64).
    """
    size = chunk_size(k_BTHK.shape[1])
    inputs = _pad_rows((k_BTHK, k_BTHK, v_BTHV, g_BTHK, beta_BTH), -k_BTHK.shape[1] % size)
    return _dense_maps(_solve_rows(*inputs, size=size))


def span_map(k_BTHK, v_BTHV, g_BTHK, beta_BTH):
    """The affine map of all T rows as one, without the maps of all chunks in memory.

    Args: as `chunk_maps`.

    Returns:
      [B, H, V + K, K] float32, the rows of B above those of M: the state after the rows when the
      state before them is zeros above the identity, and the values of the K rows below are zeros.
    """
    batch, length, heads, k_dim = k_BTHK.shape
    size, v_dim = chunk_size(length), v_BTHV.shape[-1]
    inputs = _in_groups((k_BTHK, v_BTHV, g_BTHK, beta_BTH), size, max(k_dim, v_dim))

    def chunk_step(map_BHUK, x):
        decay_BHK, erase_BHKK, write_BHVK = x
        write_BHUK = jnp.pad(write_BHVK, ((0, 0), (0, 0), (0, k_dim), (0, 0)))
        erased_BHUK = _matmul(map_BHUK, erase_BHKK)
        return decay_BHK[..., None, :] * map_BHUK - erased_BHUK + write_BHUK, None

    def group_step(map_BHUK, inputs):
        k_BTHK, *rest = inputs
        chunk = _solve_rows(k_BTHK, k_BTHK, *rest, size=size)
        return lax.scan(chunk_step, map_BHUK, (chunk.decay_K, *_erase_and_write(chunk)))

    start_UK = jnp.concatenate([jnp.zeros((v_dim, k_dim)), jnp.eye(k_dim)])
    start_BHUK = jnp.broadcast_to(start_UK, (batch, heads, *start_UK.shape))
    return lax.scan(group_step, start_BHUK, inputs)[0]
