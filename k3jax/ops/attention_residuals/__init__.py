"""Block Attention Residuals: the depth mix that replaces the residual stream.

Every sublayer reads a softmax mix of earlier results of the same token: the rows of a bank (the
embedding, then the sum of each finished block) and the running sum of the block being built.

    key_n   = v_n * rsqrt(mean(v_n^2) + eps)
    score_n = sum_d key_nd * norm_d * query_d      (float32, no scale, no bias)
    mix     = sum_n softmax(score)_n * v_n         (values are the raw rows; one cast)

Sources: the Attention Residuals paper, the Kimi K3 report, and Moonshot's published modelling code
for the precision (float32 scores and mix) and for the order of reading and appending.

`read` is what a sublayer does: the mix and the sublayer's RMSNorm in one pass over the sources,
with a kernel where the device has one. `mix` is its first half. `score_bank` and `merge_partial`
or `merge_read` are the two-phase form: the bank does not change inside a block, so its part of the
softmax is computed once for all queries of the block and the running sum is merged in by online
softmax. `mix_all` is the full, unblocked variant.

Only `read` has kernels. Two phases save no bytes where it would count. At K3's width and a decode
batch of 64, a bank of 7.3 MB stays in the L2 cache of a GPU, and a direct read brings at most 9
rows, 126 KiB, to the multiprocessor of its token: 1.1 us at 64 bytes a clock; a merge brings a
float32 value and the running sum, 42 KiB: 0.4 us. Over the 24 reads of a block that is 17 us with
a full bank and 7 us with K3's average of 5.5 sources, against 44 MB of values to be written first:
10 us at 4.3 TB/s. At 4,096 tokens those values are 2.8 GB: written and read with the running sums
7.5 GB a block, against 7.7 GB for direct reads of 5.5 sources.
"""

from __future__ import annotations

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from k3jax.errors import InputError
from k3jax.ops import choice, target
from k3jax.ops.attention_residuals import mosaic_gpu, mosaic_tpu, xla
from k3jax.ops.attention_residuals.xla import (
    BankPart,
    merge_partial,
    merge_read,
    mix,
    mix_all,
    score_bank,
)
from k3jax.ops.choice import Kernel

__all__ = ["BankPart", "merge_partial", "merge_read", "mix", "mix_all", "read", "score_bank"]

# name -> f(bank_NBTD, partial_BTD, norm_D, query_D, out_norm_D, count, *, eps, out_eps,
# weight_after_cast) -> [B, T, D]; ``count`` is an int32 scalar, 0 to N. Rows from ``count`` on may
# hold NaN.
IMPLEMENTATIONS = {
    "xla": xla.read,
    "mosaic_gpu": mosaic_gpu.read,
    "mosaic_tpu": mosaic_tpu.read,
}

# What "auto" tries before "xla", in this order; refusals take (bank_NBTD, partial_BTD).
KERNELS = {
    "mosaic_gpu": Kernel(target.is_hopper, mosaic_gpu.refusal),
    "mosaic_tpu": Kernel(target.is_tpu, mosaic_tpu.refusal),
}

_log = logging.getLogger(__name__)


def read(
    bank_NBTD: jax.Array,
    partial_BTD: jax.Array,
    norm_D: jax.Array,
    query_D: jax.Array,
    out_norm_D: jax.Array,
    count: jax.Array | int,
    *,
    eps: float,
    out_eps: float,
    weight_after_cast: bool,
    implementation: str = "auto",
) -> jax.Array:
    """RMSNorm of the softmax mix of the first ``count`` bank rows and the running sum.

    Args:
      bank_NBTD: [N, B, T, D], float32 or bfloat16; rows from ``count`` on may hold anything.
      partial_BTD: [B, T, D], the running sum of the current block, in the dtype of the bank.
      norm_D, query_D: [D], the norm weight and the fixed query of this read.
      out_norm_D: [D], the weight of the sublayer's norm.
      count: valid bank rows, 0 to N; with 0 the running sum itself is normed.
      eps: inside the root of the key norm.
      out_eps, weight_after_cast: of the sublayer's norm; see `k3jax.ops.rms_norm`.
      implementation: "xla", the portable form; a name in `KERNELS`; "auto", the kernel of the
        device if it takes these arrays, else the portable form. Reverse-mode gradients of all are
        those of the portable form, for all arrays.

    Returns:
      [B, T, D] in the dtype of ``partial_BTD``. The mix is formed in float32 and rounded to that
      dtype before the norm.

    Raises:
      InputError: shapes or dtypes that do not fit, an unknown implementation, or a kernel that
        does not run here or cannot take these arrays.

    Source: Kimi K3 technical report (Attention Residuals); Moonshot's published modelling code.
    """
    _check(bank_NBTD, partial_BTD, count, norm_D, query_D, out_norm_D)
    if partial_BTD.size == 0:
        return partial_BTD
    name, reason = choice.select(
        *("attention_residuals", implementation, IMPLEMENTATIONS, KERNELS, target.device_kind()),
        (bank_NBTD, partial_BTD),
    )
    _log.debug("attention_residuals %s -> %s (%s)", bank_NBTD.shape, name, reason)
    options = {"eps": eps, "out_eps": out_eps, "weight_after_cast": weight_after_cast}
    inputs = bank_NBTD, partial_BTD, norm_D, query_D, out_norm_D, jnp.asarray(count, jnp.int32)
    run, portable = (functools.partial(f, **options) for f in (IMPLEMENTATIONS[name], xla.read))
    return (choice.differentiable(run, portable) if name in KERNELS else run)(*inputs)


def _check(bank_NBTD, partial_BTD, count, *vectors) -> None:
    if bank_NBTD.ndim != 4 or bank_NBTD.shape[1:] != partial_BTD.shape or not len(bank_NBTD):
        raise InputError(
            f"attention_residuals: bank {bank_NBTD.shape} and running sum {partial_BTD.shape} are "
            "not [N, B, T, D] and [B, T, D]"
        )
    if bank_NBTD.dtype != partial_BTD.dtype:
        raise InputError(
            f"attention_residuals: bank {bank_NBTD.dtype} and running sum {partial_BTD.dtype} have "
            "two dtypes"
        )
    if partial_BTD.dtype not in (jnp.float32, jnp.bfloat16):
        raise InputError(
            f"attention_residuals: rows are {partial_BTD.dtype}, not float32 or bfloat16"
        )
    _check_count(count, len(bank_NBTD))
    D = partial_BTD.shape[-1]
    if any(vector.shape != (D,) for vector in vectors):
        shapes = ", ".join(str(vector.shape) for vector in vectors)
        raise InputError(f"attention_residuals: norm, query and out_norm {shapes} are not [{D}]")


def _check_count(count, rows: int) -> None:
    """A number that is traced is the caller's."""
    if isinstance(count, Tracer):
        whole = count.ndim == 0 and jnp.issubdtype(count.dtype, jnp.integer)
    else:
        value = np.asarray(count)
        whole = value.ndim == 0 and np.issubdtype(value.dtype, np.integer) and 0 <= value <= rows
    if not whole:
        raise InputError(f"attention_residuals: count {count} is not one integer in 0..{rows}")
