"""One token of a KDA mixer as one Pallas kernel for Hopper GPUs (Mosaic GPU).

A block has one sequence and head: it asks for the state (64 KiB), computes what meets it while that
arrives, convolutions, SiLU, norms and gates with one channel a thread, and sends each half of the
state back while it works on the other. State and tails are references that the kernel writes in
place, and the layer of a stack is a number that addresses depend on, so a stack is neither sliced
nor copied. Three blocks share a multiprocessor (67 KiB of shared memory, 143 registers a thread).

All arithmetic is float32, with the roundings to the dtype of the projections where `short_conv`,
`gated_kda` and `gated_norm` have them. There is no matrix product.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from k3jax.ops.mosaic_gpu import (
    COLUMNS,
    LANE,
    LOG2E,
    ROWS,
    WGMMA,
    Interpret,
    by_column,
    by_row,
    mode,
    sigmoid,
    smem,
)

DIM = 128  # K and V
HALF = 64  # of V
PART = 32  # of K, one swizzled row of float32
_f32 = jnp.float32


def refusal(q_BP, z_BHK, b_BH, gate_BHV, lower_bound) -> str | None:
    """Why the kernel cannot take these inputs; None if it can."""
    if z_BHK.shape[-1] != DIM or gate_BHV.shape[-1] != DIM:
        return f"K = {z_BHK.shape[-1]}, V = {gate_BHV.shape[-1]}, not {DIM}"
    for name, x in (("q", q_BP), ("z", z_BHK), ("b", b_BH), ("gate", gate_BHV)):
        if x.dtype not in (jnp.bfloat16, jnp.float32):
            return f"{name} is {x.dtype}, not bfloat16 or float32"
    if lower_bound is None:
        return "the gate has no lower bound"
    return None


def _kernel(
    q_g, k_g, v_g, z_g, b_g, gate_g, filter_q_g, filter_k_g, filter_v_g, A_log_g, dt_bias_g,
    norm_g, valid_g, slot_g, state_g, tails_g, o_g, state_s, vectors_s, arrived,
    *, width, lower_bound, eps,
):  # fmt: skip
    head, batch = lax.axis_index("head"), lax.axis_index("batch")
    slot = slot_g[0]
    channel = plgpu.Layout.WG_STRIDED((DIM,), vec_size=1)
    lanes = pl.ds(head * DIM, DIM)
    valid = valid_g[batch] != 0
    halves, parts = range(DIM // HALF), range(DIM // PART)
    shape = (HALF, PART)

    def load(ref):
        return plgpu.load(ref, layout=channel, optimized=False)

    @pl.when(jnp.logical_not(valid))
    def _():
        o_g[batch, lanes] = plgpu.layout_cast(jnp.zeros((DIM,), o_g.dtype), channel)

    @pl.when(valid)
    def _():
        # First what does not wait for the slot; and no store before the last load, which it might
        # alias as far as the compiler knows.
        new = [load(x.at[batch, lanes]) for x in (q_g, k_g, v_g)]
        filters = [
            [load(x.at[lanes, w]) for w in range(width)]
            for x in (filter_q_g, filter_k_g, filter_v_g)
        ]
        z, gate = load(z_g.at[batch, lanes]).astype(_f32), load(gate_g.at[batch, lanes])
        bias, norm = load(dt_bias_g.at[lanes]), load(norm_g)
        for x in halves:
            plgpu.copy_gmem_to_smem(
                state_g.at[slot, batch, head, pl.ds(HALF * x, HALF)], state_s.at[x], arrived.at[x]
            )
        taps = [
            [*(load(tails_g.at[slot, x, batch, w, lanes]) for w in range(width - 1)), new[x]]
            for x in range(3)
        ]
        rate = jnp.exp2(LOG2E * A_log_g[head])
        beta = sigmoid(b_g[batch, head].astype(_f32))
        for x in range(3):
            y = sum(tap.astype(_f32) * w for tap, w in zip(taps[x], filters[x], strict=True))
            vectors_s[x] = (y * sigmoid(y)).astype(new[x].dtype).astype(_f32)
        vectors_s[3] = jnp.exp2((lower_bound * LOG2E) * sigmoid((z + bias) * rate))
        plgpu.commit_smem()

        def columns(x, part):
            """32 channels of a vector of K, as equal rows."""
            vector = plgpu.load(vectors_s.at[x, pl.ds(PART * part, PART)], layout=COLUMNS)
            return by_column(vector, shape)

        def total(terms):
            """Sums over K, [64]."""
            return functools.reduce(jnp.add, (jnp.sum(x, axis=1) for x in terms))

        def squares(x):
            return total(c * c for c in (columns(x, part) for part in parts))

        norm_q, norm_k = (lax.rsqrt(squares(x) + 1e-6) for x in (0, 1))
        for x in halves:
            rows = pl.ds(HALF * x, HALF)
            plgpu.barrier_wait(arrived.at[x])
            state = [
                plgpu.load(state_s.at[x, :, pl.ds(PART * part, PART)], layout=WGMMA)
                * columns(3, part)
                for part in parts
            ]
            held = total(s * columns(1, part) for part, s in enumerate(state)) * norm_k
            v = plgpu.load(vectors_s.at[2, rows], layout=ROWS)
            u = by_row(beta * (v - held) * norm_k, shape)
            out = []
            for part, s in enumerate(state):
                updated = s + u * columns(1, part)
                state_s[x, :, pl.ds(PART * part, PART)] = updated
                out.append(updated * columns(0, part))
            o = total(out) * (norm_q * DIM**-0.5)
            vectors_s[4, rows] = o.astype(o_g.dtype).astype(_f32)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(state_s.at[x], state_g.at[slot, batch, head, rows])

        vectors_s[5, pl.ds(0, HALF)] = lax.rsqrt(squares(4) * (1.0 / DIM) + eps)
        plgpu.commit_smem()
        o = plgpu.load(vectors_s.at[4], layout=channel) * vectors_s[5, 0] * norm
        o_g[batch, lanes] = (o * sigmoid(gate.astype(_f32))).astype(o_g.dtype)
        for x in range(3):
            for w in range(width - 1):
                tails_g[slot, x, batch, w, lanes] = taps[x][w + 1]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def kda_decode(
    inputs, weights, state, tails, valid_B, slot, lower_bound, eps, *, interpret: Interpret = False
):
    """See `k3jax.ops.kda.kda_decode`; arguments as in the table of implementations.

    Args:
      interpret: whether to run in interpret mode, on a CPU; with parameters, how.
    """
    qkv_3BP, z_BHK, b_BH, gate_BHV = inputs
    conv_3PW, A_log_H, dt_bias_HK, norm_V = weights
    batch, heads, _ = z_BHK.shape
    width = conv_3PW[0].shape[-1]
    stack = slot is not None
    state_ref = jax.new_ref(state if stack else state[None])
    tails_ref = jax.new_ref(tails if stack else tails[None])
    valid = jnp.ones((batch,), jnp.int32) if valid_B is None else valid_B.astype(jnp.int32)
    layer = jnp.zeros((1,), jnp.int32) if slot is None else jnp.reshape(slot, (1,)).astype("int32")
    o_BP = plgpu.kernel(
        functools.partial(_kernel, width=width, lower_bound=lower_bound, eps=eps),
        out_type=jax.ShapeDtypeStruct((batch, heads * DIM), qkv_3BP[0].dtype),
        scratch_types=[
            smem((2, HALF, DIM), _f32),
            plgpu.SMEM((6, DIM), _f32),
            plgpu.Barrier(num_arrivals=1, num_barriers=2),
        ],
        grid=(heads, batch),
        grid_names=("head", "batch"),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=LANE, approx_math=True, unsafe_no_auto_barriers=True
        ),
        interpret=mode(interpret),
    )(
        *qkv_3BP,
        z_BHK.reshape(batch, heads * DIM),
        b_BH,
        gate_BHV.reshape(batch, heads * DIM),
        *conv_3PW,
        A_log_H,
        dt_bias_HK.reshape(-1),
        norm_V,
        valid,
        layer,
        state_ref,
        tails_ref,
    )
    state, tails = state_ref[...], tails_ref[...]
    o_BHV = o_BP.reshape(batch, heads, DIM)
    return (o_BHV, state, tails) if stack else (o_BHV, state[0], tails[0])
