"""Tokens to the devices that hold their experts, and the experts' outputs back.

Called inside a fully manual `shard_map` (``check_vma=False``). Three forms give the same numbers:

* "gather": every device sees every token. Least latency; right for a few tokens a device.
* "dense": one block of N rows for every device, zeros where a token has no expert there.
* "ragged": only the rows that are needed travel. Right for many tokens a device.

No form drops an assignment, and none waits for the host: all shapes are static worst cases.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from sharding import collectives
from sharding.collectives import Axes

FORMS = ("gather", "dense", "ragged")

Compute = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def dispatch(
    form: str,
    axes: Axes,
    z_NL: jax.Array,
    ids_Nk: jax.Array,
    weights_Nk: jax.Array,
    num_experts: int,
    compute: Compute,
) -> jax.Array:
    """Routed experts of the tokens this device owns, computed where the experts live.

    Args:
      form: one of ``FORMS``.
      axes: the mesh axes experts are split over, P devices in all. Shard p holds the experts
        ``p * E_local .. (p + 1) * E_local - 1`` with ``E_local = num_experts / P``. With no axes,
        or no tokens (N = 0), nothing is communicated.
      z_NL: latents of the N tokens this device owns, any float dtype. N is the same on all devices.
      ids_Nk: int32, experts of each token in 0..num_experts-1. Others, -1 for padded tokens,
        contribute nothing.
      weights_Nk: float32, the weight of each.
      num_experts: experts (physical ones, copies counted) of the whole layer.
      compute: ``compute(z_ML, ids_Mk, weights_Mk) -> float32 [M, L]``, the weighted sum over this
        device's experts. Ids are local, 0..E_local-1; others, written as -1, must contribute
        nothing, and should cost nothing. What ``z`` holds in rows without a local id is undefined.

    Returns:
      r_NL, float32. Partial sums of the devices are float32 too.

    Memory of a device, with b bytes an entry of z: M = P N rows arrive in every form, so
    ``P N (L (b + 4) + 8 k)`` bytes for them, their ids and weights, and their results. "dense"
    sends and gets back as much again. "ragged" sends and gets back ``N min(P, k)`` rows. With
    N = 4096, L = 3584, P = 64 and bfloat16 the M rows are 1.9 GB and their results 3.8 GB, so long
    prefills want chunks. Only memory is paid for rows without a local id.

    Bytes sent by a device: "gather" and "dense" ``(P - 1) N (L (b + 4) + 8 k)``, "ragged" the same
    for only those pairs of token and device where the token has an expert.

    Raises:
      ValueError: an unknown form, or experts that do not divide over the devices.
    """
    shards = collectives.size(axes)
    if form not in FORMS:
        raise ValueError(f"expert dispatch {form!r} is not one of {list(FORMS)}")
    if num_experts % shards:
        raise ValueError(
            f"{num_experts} experts do not divide over {shards} devices of axes {axes}"
        )
    if not axes or z_NL.shape[0] == 0:
        return compute(z_NL, _local(ids_Nk, 0, num_experts), weights_Nk).astype(jnp.float32)
    # A row of routing: k ids, then k weights. Ids are exact in float32 and travel with the weights.
    routing_NR = jnp.concatenate(
        [_local(ids_Nk, 0, num_experts).astype(jnp.float32), weights_Nk], axis=1
    )
    run = {"gather": _gather, "dense": _dense, "ragged": _ragged}[form]
    return run(axes, z_NL, routing_NR, num_experts // shards, compute)


def _local(ids, shard, local_experts: int) -> jax.Array:
    """Ids on shard ``shard``, -1 for experts that live elsewhere."""
    local = ids - shard * local_experts
    return jnp.where((local >= 0) & (local < local_experts), local, -1)


def _ids(routing_MR: jax.Array) -> jax.Array:
    return routing_MR[:, : routing_MR.shape[1] // 2].astype(jnp.int32)


def _compute_local(axes, z_ML, ids_Mk, routing_MR, local_experts, compute) -> jax.Array:
    weights_Mk = routing_MR[:, ids_Mk.shape[1] :]
    ids_Mk = _local(ids_Mk, collectives.index(axes), local_experts)
    return compute(z_ML, ids_Mk, jnp.where(ids_Mk < 0, 0.0, weights_Mk)).astype(jnp.float32)


def _gather(axes, z_NL, routing_NR, local_experts, compute) -> jax.Array:
    z_ML = collectives.all_gather(z_NL, axes, 0)
    routing_MR = collectives.all_gather(routing_NR, axes, 0)
    r_ML = _compute_local(axes, z_ML, _ids(routing_MR), routing_MR, local_experts, compute)
    return collectives.reduce_scatter(r_ML, axes, 0)


def _hit(axes, routing_NR, local_experts) -> jax.Array:
    """[P, N]: whether a token has an expert on a shard."""
    shard_Nk = _ids(routing_NR) // local_experts  # -1 stays -1
    shards_P11 = jnp.arange(collectives.size(axes), dtype=jnp.int32)[:, None, None]
    return (shard_Nk == shards_P11).any(axis=2)


def _dense(axes, z_NL, routing_NR, local_experts, compute) -> jax.Array:
    N, L = z_NL.shape
    hit_PN = _hit(axes, routing_NR, local_experts)
    z_PNL = jnp.where(hit_PN[:, :, None], z_NL, jnp.zeros((), z_NL.dtype))
    z_ML = collectives.all_to_all(z_PNL.reshape(-1, L), axes, 0, 0)
    # Every device needs every row of routing, to know which are its own.
    routing_MR = collectives.all_gather(routing_NR, axes, 0)
    r_ML = _compute_local(axes, z_ML, _ids(routing_MR), routing_MR, local_experts, compute)
    r_PNL = collectives.all_to_all(r_ML, axes, 0, 0).reshape(-1, N, L)
    return _sum_in_order(
        [jnp.where(h[:, None], r, 0.0) for h, r in zip(hit_PN, r_PNL, strict=True)]
    )


class _Sends(NamedTuple):
    """The rows a device sends: sorted by shard, then by token; R = N min(P, k) at most."""

    token_R: jax.Array  # the token of a row; 0 past the last row that is sent
    begin_P: jax.Array  # first row of a shard
    size_P: jax.Array  # rows of a shard
    row_NJ: jax.Array  # the rows of a token, by shard; J = min(P, k)
    sent_NJ: jax.Array  # whether there is such a row


def _sends(hit_PN: jax.Array, k: int) -> _Sends:
    P, N = hit_PN.shape
    J = min(P, k)
    size_P = hit_PN.sum(1, dtype=jnp.int32)
    row_PN = jnp.cumsum(hit_PN.reshape(-1), dtype=jnp.int32).reshape(P, N) - 1
    token_PN = jnp.broadcast_to(jnp.arange(N, dtype=jnp.int32), (P, N))
    token_R = jnp.zeros((N * J,), jnp.int32)
    token_R = token_R.at[jnp.where(hit_PN, row_PN, N * J)].set(token_PN, mode="drop")
    shard_JN = jnp.argsort(~hit_PN, axis=0, stable=True)[:J]
    return _Sends(
        token_R,
        jnp.cumsum(size_P, dtype=jnp.int32) - size_P,
        size_P,
        jnp.take_along_axis(row_PN, shard_JN, axis=0).T,
        jnp.take_along_axis(hit_PN, shard_JN, axis=0).T,
    )


def _buffer(shape, dtype) -> jax.Array:
    """What rows hold before, and unless, something arrives. A test fills it with NaN."""
    return jnp.zeros(shape, dtype)


def _ragged(axes, z_NL, routing_NR, local_experts, compute) -> jax.Array:
    N, L = z_NL.shape
    sends = _sends(_hit(axes, routing_NR, local_experts), routing_NR.shape[1] // 2)
    P = sends.size_P.shape[0]
    # Rows of source s begin at row s N, so a sender knows where its rows go without asking.
    slot_P = jnp.arange(P, dtype=jnp.int32) * N
    my_slot_P = jnp.full((P,), collectives.index(axes) * N, jnp.int32)
    back_P2 = jnp.stack([sends.size_P, sends.begin_P], axis=1)
    received_P, back_P = collectives.all_to_all(back_P2, axes, 0, 0).T

    def send(x_NX):
        buffer_MX = _buffer((P * N, x_NX.shape[1]), x_NX.dtype)
        return collectives.ragged_all_to_all(
            x_NX[sends.token_R], buffer_MX, sends.begin_P, sends.size_P, my_slot_P, received_P, axes
        )

    z_ML, routing_MR = send(z_NL), send(routing_NR)
    real_M = (jnp.arange(N, dtype=jnp.int32) < received_P[:, None]).reshape(P * N, 1)
    ids_Mk = _ids(jnp.where(real_M, routing_MR, -1.0))
    r_ML = _compute_local(axes, z_ML, ids_Mk, routing_MR, local_experts, compute)
    r_RL = collectives.ragged_all_to_all(
        r_ML,
        _buffer((sends.token_R.shape[0], L), jnp.float32),
        slot_P,
        received_P,
        back_P,
        sends.size_P,
        axes,
    )
    return _sum_in_order(
        [
            jnp.where(sent_N[:, None], r_RL[row_N], 0.0)
            for row_N, sent_N in zip(sends.row_NJ.T, sends.sent_NJ.T, strict=True)
        ]
    )


def _sum_in_order(parts: list[jax.Array]) -> jax.Array:
    """The sum in ascending order of the shards, the same whatever other tokens do."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
