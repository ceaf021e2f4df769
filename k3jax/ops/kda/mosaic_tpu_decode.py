"""One token of a KDA mixer as one Pallas kernel for TPUs (Mosaic).

Short convolution, SiLU, L2 norms, gate, delta rule and gated head norm in one pass over the state,
which is nearly all there is to move: 64 KiB in and out for each sequence and head at K = V = 128.
The grid is (rows of the batch, groups of heads). State and tails are aliased to the results, and
the layer of a stack is a scalar that block indices read, so a stack is neither sliced nor copied.

Rows of the batch lie on sublanes and channels on lanes; a state is [V, K]. What meets the state
along V, values and outputs, is transposed for all states of a step at once.

There is no dot: products with the state are multiplications and sums over lanes in float32, which a
matrix unit would serve with one row of 128. Roundings to the dtype of the projections are where
`short_conv`, `gated_kda` and `gated_norm` have them.

VMEM, at most 16 states a step and each block twice for the pipeline: states in and out 4 MiB; at 8
rows and 2 heads in bfloat16 tails 192 KiB, filters 96 KiB, the rest below 64 KiB. 4.5 MiB as the
compiler counts it, at any batch; the limit is 16 MiB.

The compiler's schedule has 214 cycles a state on a v5p (v5e 201, v6e 161, TPU7x 154), where moving
it takes about 166 at 1.75 GHz and half the chip's 2.77 TB/s.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from k3jax.ops.kda.mosaic_tpu_chunked import LANES, gates, log_decay, unit

ROWS = 8  # of a block, where the batch has more
STATES = 16  # of a step


def refusal(q_BP, z_BHK, b_BH, gate_BHV, lower_bound) -> str | None:
    """Why the kernel cannot take these inputs; None if it can."""
    del lower_bound
    for name, x in (("K", z_BHK), ("V", gate_BHV)):
        if x.shape[-1] % LANES:
            return f"{name} is {x.shape[-1]}, no multiple of {LANES} lanes"
    for name, x in (("q", q_BP), ("z", z_BHK), ("b", b_BH), ("gate", gate_BHV)):
        if x.dtype not in (jnp.float32, jnp.bfloat16):
            return f"{name} is {x.dtype}, not float32 or bfloat16"
    return None


def _convolved(x_ref, filter_ref, tails_ref, new_tails_ref, which, valid_R1):
    """float32 [R, channels] after convolution, SiLU and rounding; moves the tail on."""
    width = filter_ref.shape[0]
    taps = [tails_ref[0, which, :, i] for i in range(width - 1)] + [x_ref[...]]
    for i in range(width - 1):
        new_tails_ref[0, which, :, i] = jnp.where(valid_R1, taps[i + 1], taps[i])
    y = sum(x.astype(jnp.float32) * filter_ref[i : i + 1] for i, x in enumerate(taps))
    return (y * jax.nn.sigmoid(y)).astype(x_ref.dtype).astype(jnp.float32)


def _kernel(
    slot_ref, valid_ref, q_ref, k_ref, v_ref, z_ref, b_ref, gate_ref, wq_ref, wk_ref, wv_ref,
    gates_ref, norm_ref, state_ref, tails_ref, o_ref, new_state_ref, new_tails_ref,
    *, batch, lower_bound, eps,
):  # fmt: skip
    del slot_ref  # the block indices have used it
    rows, heads, v_dim, k_dim = state_ref.shape[1:]
    first, group = pl.program_id(0) * rows, pl.program_id(1)
    valid = [valid_ref[jnp.minimum(first + r, batch - 1)] for r in range(rows)]
    row_R1 = lax.broadcasted_iota(jnp.int32, (rows, 1), 0)
    valid_R1 = sum(jnp.where(row_R1 == r, v, 0) for r, v in enumerate(valid)) > 0

    q_RP, k_RP, v_RP = (
        _convolved(x, w, tails_ref, new_tails_ref, i, valid_R1)
        for i, (x, w) in enumerate(((q_ref, wq_ref), (k_ref, wk_ref), (v_ref, wv_ref)))
    )
    decay_RP = jnp.exp(
        log_decay(z_ref[...].astype(jnp.float32), gates_ref[0:1], gates_ref[1:2], lower_bound)
    )
    b_RH = jax.nn.sigmoid(b_ref[...].astype(jnp.float32))
    lane_RH = lax.broadcasted_iota(jnp.int32, b_RH.shape, 1)

    for h in range(heads):
        keys, values = (slice(h * d, (h + 1) * d) for d in (k_dim, v_dim))
        q_RK = unit(q_RP[:, keys]) * k_dim**-0.5
        k_RK = unit(k_RP[:, keys])
        beta_R1 = jnp.sum(jnp.where(lane_RH == group * heads + h, b_RH, 0.0), axis=1, keepdims=True)
        v_VR, columns = v_RP[:, values].T, []
        for r in range(rows):
            at = slice(r, r + 1)
            old_VK = state_ref[0, r, h]
            state_VK = old_VK * decay_RP[at, keys]
            held_V1 = jnp.sum(state_VK * k_RK[at], axis=1, keepdims=True)
            u_V1 = (v_VR[:, at] - held_V1) * beta_R1[at]
            state_VK = state_VK + u_V1 * k_RK[at]
            columns.append(jnp.sum(state_VK * q_RK[at], axis=1, keepdims=True))
            new_state_ref[0, r, h] = jnp.where(valid[r] > 0, state_VK, old_VK)
        o_RV = jnp.concatenate(columns, axis=1).T
        o_RV = o_RV.astype(o_ref.dtype).astype(jnp.float32)
        scale_R1 = lax.rsqrt(jnp.mean(o_RV * o_RV, axis=1, keepdims=True) + eps)
        gate_RV = jax.nn.sigmoid(gate_ref[:, values].astype(jnp.float32))
        o_RV = o_RV * scale_R1 * norm_ref[...] * gate_RV
        o_ref[:, values] = jnp.where(valid_R1, o_RV, 0.0).astype(o_ref.dtype)


def kda_decode(
    inputs,
    weights,
    state: Array,
    tails: Array,
    valid_B: Array | None,
    slot: Array | None,
    lower_bound: float | None,
    eps: float,
    *,
    interpret: bool | pltpu.InterpretParams = False,
) -> tuple[Array, Array, Array]:
    """The function of the table in `decode.py`. ``interpret`` runs it without a TPU, for tests."""
    qkv_3BP, z_BHK, b_BH, gate_BHV = inputs
    conv_3PW, A_log_H, dt_bias_HK, norm_V = weights
    batch, heads, k_dim = z_BHK.shape
    v_dim, width = gate_BHV.shape[-1], conv_3PW[0].shape[-1]
    rows = min(batch, ROWS)
    group = next(g for g in range(max(1, STATES // rows), 0, -1) if heads % g == 0)
    stacked = slot is not None
    if not stacked:
        state, tails, slot = state[None], tails[None], jnp.int32(0)
    valid_B = jnp.ones((batch,), jnp.int32) if valid_B is None else valid_B.astype(jnp.int32)

    def projections(d):
        return pl.BlockSpec((rows, group * d), lambda i, j, slot, valid: (i, j))

    def of_channels(count, d):
        return pl.BlockSpec((count, group * d), lambda i, j, slot, valid: (0, j))

    state_spec = pl.BlockSpec(
        (1, rows, group, v_dim, k_dim), lambda i, j, slot, valid: (slot[0], i, j, 0, 0)
    )
    tails_spec = pl.BlockSpec(
        (1, 3, rows, width - 1, group * k_dim), lambda i, j, slot, valid: (slot[0], 0, i, 0, j)
    )
    arguments = (
        jnp.asarray(slot, jnp.int32).reshape(1), valid_B,
        *qkv_3BP, z_BHK.reshape(batch, -1), b_BH, gate_BHV.reshape(batch, -1),
        *(w_PW.T for w_PW in conv_3PW), gates(A_log_H, dt_bias_HK), norm_V[None], state, tails,
    )  # fmt: skip
    o_BP, state, tails = pl.pallas_call(
        partial(_kernel, batch=batch, lower_bound=lower_bound, eps=eps),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(pl.cdiv(batch, rows), heads // group),
            in_specs=[
                projections(k_dim),
                projections(k_dim),
                projections(v_dim),
                projections(k_dim),
                pl.BlockSpec((rows, heads), lambda i, j, slot, valid: (i, 0)),
                projections(v_dim),
                *(of_channels(width, d) for d in (k_dim, k_dim, v_dim)),
                of_channels(2, k_dim),
                pl.BlockSpec((1, v_dim), lambda i, j, slot, valid: (0, 0)),
                state_spec,
                tails_spec,
            ],
            out_specs=[projections(v_dim), state_spec, tails_spec],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((batch, heads * v_dim), qkv_3BP[0].dtype),
            jax.ShapeDtypeStruct(state.shape, state.dtype),
            jax.ShapeDtypeStruct(tails.shape, tails.dtype),
        ],
        input_output_aliases={len(arguments) - 2: 1, len(arguments) - 1: 2},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        interpret=interpret,
        name="kda_decode",
    )(*arguments)
    if not stacked:
        state, tails = state[0], tails[0]
    return o_BP.reshape(gate_BHV.shape), state, tails
