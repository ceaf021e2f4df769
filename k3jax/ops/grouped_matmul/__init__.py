"""The routed experts of a mixture: every token through its k experts, weighted and summed."""

from __future__ import annotations

import logging

import jax
import jax.numpy as jnp
from jax.core import Tracer

from k3jax.errors import InputError
from k3jax.ops import choice, target
from k3jax.ops.choice import Kernel
from k3jax.ops.grouped_matmul import mosaic_gpu, mosaic_tpu, xla
from k3jax.quantization.mxfp4 import GROUP, MXFP4

# name -> f(z_NL, ids_Nk, weights_Nk, w13, w2, *, first, num_experts, out_dtype, situ_beta,
# situ_linear_beta, activations) -> r_NL; expert e is row ``first + e`` of the weights [rows, ..],
# from 0 where ``first`` is None.
IMPLEMENTATIONS = {
    "tiles": xla.tiles,
    "dense": xla.dense,
    "mosaic_gpu": mosaic_gpu.experts,
    "mosaic_tpu": mosaic_tpu.experts,
}

# What "auto" tries before "tiles", in this order; refusals take
# (z_NL, ids_Nk, w13, w2, activations).
KERNELS = {
    "mosaic_gpu": Kernel(target.is_hopper, mosaic_gpu.refusal),
    "mosaic_tpu": Kernel(target.is_tpu, mosaic_tpu.refusal),
}

ACTIVATIONS = (None, "mxfp8")
_log = logging.getLogger(__name__)


def experts(
    z_NL: jax.Array,
    ids_Nk: jax.Array,
    weights_Nk: jax.Array,
    w13: MXFP4 | jax.Array,
    w2: MXFP4 | jax.Array,
    *,
    situ_beta: float,
    situ_linear_beta: float | None,
    activations: str | None = None,
    implementation: str = "auto",
    layer: jax.Array | None = None,
    out_dtype=None,
) -> jax.Array:
    """``r_n = sum_j weights[n, j] y(n, ids[n, j])``, ``y(n, e) = w2_e SiTU(w1_e z_n, w3_e z_n)``.

    Args:
      z_NL: latents, float32 or bfloat16.
      ids_Nk: int32, the experts of each token. An id outside 0..E-1 contributes nothing and costs
        nothing: for padded tokens, or experts that live elsewhere.
      weights_Nk: float32, from the router, with the routed scaling factor already in them.
      w13: [E, 2F, L], the F gate rows (w1) before the F up rows (w3); MXFP4 or plain.
      w2: [E, L, F]; MXFP4 or plain.
      layer: int32, which layer of stacks [layers, E, ...] the weights are; None if they are no
        stacks. Taking the layer out first would copy all its experts.
      out_dtype: of the result; that of z if None.
      situ_beta, situ_linear_beta: see :func:`k3jax.ops.situ.situ`.
      activations: None, or "mxfp8": what the two products read, z and the activation, is rounded
        to MXFP8 first (`k3jax.quantization.mxfp8`), the activation straight from float32.
      implementation:
        "tiles": tokens sorted by expert, one expert unpacked at a time; memory for one expert, time
          only for experts that are used. Reverse-mode gradients for z, weights and plain w13, w2.
        "dense": every expert for every token; for training small models on an accelerator.
        A name in `KERNELS`: a kernel on packed weights.
        "auto": the kernel of the device if it takes these arrays, else tiles.

    Returns:
      r_NL. Products accumulate in float32; w1 z, w3 z, the activation and y are
      rounded to the dtype of z; the weighted sum is float32 and is rounded once. A NaN in one row
      of z stays in that row, and experts a token did not choose cannot reach it.

    Raises:
      InputError: shapes or dtypes that do not fit, an unknown implementation or format of
        activations, or a kernel that does not run here or cannot take these arrays.

    Source: Kimi K3 technical report (Stable LatentMoE); Moonshot's published modelling code.
    """
    _check(z_NL, ids_Nk, weights_Nk, w13, w2, layer)
    z_NL, ids_Nk, weights_Nk = map(jnp.asarray, (z_NL, ids_Nk, weights_Nk))
    num_experts = w13.shape[-3]
    if layer is not None:
        w13, w2 = (jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), w) for w in (w13, w2))
    if activations not in ACTIVATIONS:
        raise InputError(f"experts: activations {activations!r} are none of {ACTIVATIONS}")
    name, reason = choice.select(
        *("experts", implementation, IMPLEMENTATIONS, KERNELS, target.device_kind()),
        (z_NL, ids_Nk, w13, w2, activations),
    )
    name = "tiles" if name == "xla" else name
    _log.debug("experts %s with %s -> %s (%s)", z_NL.shape, w13.shape, name, reason)
    first = None if layer is None else layer * num_experts
    options = {
        "num_experts": num_experts,
        "out_dtype": jnp.dtype(out_dtype or z_NL.dtype),
        "situ_beta": situ_beta,
        "situ_linear_beta": situ_linear_beta,
        "activations": activations,
    }

    def form(name):
        def run(*arrays):
            *arrays, first = arrays
            return IMPLEMENTATIONS[name](*arrays, first=first, **options)

        return run

    run = choice.differentiable(form(name), form("tiles")) if name in KERNELS else form(name)
    return run(z_NL, ids_Nk, weights_Nk, w13, w2, first)


def activation_error(
    z_NL: jax.Array,
    ids_Nk: jax.Array,
    weights_Nk: jax.Array,
    w13: MXFP4 | jax.Array,
    w2: MXFP4 | jax.Array,
    *,
    activations: str = "mxfp8",
    **options,
) -> jax.Array:
    """How far rounded activations move the routed output: W4A8 against W4A16 on packed weights.

    Args are those of `experts`. Returns float32, ``|r8 - r16| / |r16|`` over all tokens (L2), of
    float32 results, so that the rounding of the output is in neither.
    """
    options["out_dtype"] = jnp.float32
    arrays = (z_NL, ids_Nk, weights_Nk, w13, w2)
    exact_NL = experts(*arrays, **options)
    rounded_NL = experts(*arrays, activations=activations, **options)
    return jnp.linalg.norm(rounded_NL - exact_NL) / jnp.linalg.norm(exact_NL)


def _check(z_NL, ids_Nk, weights_Nk, w13, w2, layer) -> None:
    stacked = layer is not None
    if z_NL.ndim != 2 or w13.ndim < 3 or w2.ndim < 3 or w13.shape[-3] < 1:
        raise InputError(
            f"experts: z {z_NL.shape}, w13 {w13.shape} and w2 {w2.shape} are not "
            "[N, L], [E, 2F, L] and [E, L, F]"
        )
    if z_NL.dtype not in (jnp.float32, jnp.bfloat16):
        raise InputError(f"experts: z is {z_NL.dtype}, not float32 or bfloat16")
    for name, w in (("w13", w13), ("w2", w2)):
        if isinstance(w, MXFP4) and w.scales.shape != (*w.shape[:-1], w.shape[-1] // GROUP):
            raise InputError(f"experts: {name} has codes {w.codes.shape}, scales {w.scales.shape}")
    if stacked:
        _check_layer(layer, w13.shape[0])
    N, L = z_NL.shape
    lead, F = w13.shape[:-2], w2.shape[-1]
    if (
        len(lead) != (2 if stacked else 1)
        or w13.shape != (*lead, 2 * F, L)
        or w2.shape != (*lead, L, F)
    ):
        raise InputError(
            f"experts: z {z_NL.shape}, w13 {w13.shape} and w2 {w2.shape} are not "
            f"[N, L], [E, 2F, L] and [E, L, F]{', with a leading layer axis' if stacked else ''}"
        )
    if ids_Nk.shape != weights_Nk.shape or ids_Nk.ndim != 2 or ids_Nk.shape[0] != N:
        raise InputError(
            f"experts: ids {ids_Nk.shape} and weights {weights_Nk.shape} are not both [{N}, k]"
        )
    if ids_Nk.dtype != jnp.int32 or weights_Nk.dtype != jnp.float32:
        raise InputError(
            f"experts: ids {ids_Nk.dtype} and weights {weights_Nk.dtype} are not int32 and float32"
        )


def _check_layer(layer, layers: int) -> None:
    """A number that is traced is the caller's."""
    if jnp.ndim(layer) or not jnp.issubdtype(jnp.result_type(layer), jnp.integer):
        raise InputError(f"experts: layer {layer} is not one integer")
    if not isinstance(layer, Tracer) and not 0 <= int(layer) < layers:
        raise InputError(f"experts: layer {layer} is outside 0..{layers - 1}")
