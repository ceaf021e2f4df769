"""KDA over a sequence whose parts lie on the devices of a mesh axis: prefill of one long prompt.

Device d of D holds rows d T .. (d + 1) T - 1 of every sequence. It folds its rows into one affine
map S -> S M + B, the maps are composed over the axis, and each device then runs its rows from the
state that the devices before it leave behind. Rows never move: a device sends ceil(log2 D) maps of
[B, H, V + K, K] float32 and, for the convolution, the last W - 1 rows once.

The chunks of a device are solved twice, for its map and for its outputs: keeping what the first
pass found would take five float32 arrays of the size of k.

Both functions run inside a `jax.shard_map` with ``check_vma=False``. Other arrays (heads, channels)
may be split over other axes, which need no communication here. Forward only: the sum over devices
at the end is not meant to be differentiated.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from k3jax.errors import InputError
from k3jax.ops.kda import xla
from k3jax.ops.kda.core import describe, expect, zero_unless
from k3jax.ops.kda.gated import gated_kda, normalised
from k3jax.ops.short_conv import short_conv


def _local(lengths_B, length, axis):
    """Real rows of each sequence on this device."""
    if lengths_B is None:
        return None
    return jnp.clip(lengths_B - lax.axis_index(axis) * length, 0, length)


def _masked(x_BTX, local_B):
    """Zeros in padding."""
    if local_B is None:
        return x_BTX
    rows_T = jnp.arange(x_BTX.shape[1], dtype=jnp.int32)
    return zero_unless(rows_T < local_B[:, None], x_BTX)


def _of_last_row(x_BX, lengths_B, length, axis):
    """On every device, ``x_BX`` of the one that holds the last real row of each sequence."""
    owner_B = jnp.full(x_BX.shape[:1], lax.axis_size(axis) - 1, jnp.int32)
    if lengths_B is not None:
        owner_B = jnp.clip((lengths_B - 1) // length, 0, owner_B)
    mine_B = owner_B == lax.axis_index(axis)
    return lax.psum(jnp.where(mine_B.reshape(-1, *[1] * (x_BX.ndim - 1)), x_BX, 0), axis)


def _then(earlier_UK, later_UK):
    """`xla.compose` for maps that are stacked as `xla.span_map` returns them."""
    b_VK, m_KK = jnp.split(later_UK, [later_UK.shape[-2] - later_UK.shape[-1]], axis=-2)
    b_UK = jnp.concatenate([b_VK, jnp.zeros_like(m_KK)], axis=-2)
    return jnp.matmul(earlier_UK, m_KK, precision=lax.Precision.HIGHEST) + b_UK


def _map_before(own_UK, axis):
    """The composed map of all devices before this one; the own one on device 0.

    In the round with shift s a device receives the map of the s devices up to the one s before it,
    and puts it in front of the map of the s - 1 devices before itself.
    """
    index, size = lax.axis_index(axis), lax.axis_size(axis)
    upto_UK, before_UK, shift = own_UK, own_UK, 1
    while shift < size:
        steps = [(device, device + shift) for device in range(size - shift)]
        arrived_UK = lax.ppermute(upto_UK, axis, steps)
        longer_UK = arrived_UK if shift == 1 else _then(arrived_UK, before_UK)
        before_UK = jnp.where(index >= shift, longer_UK, before_UK)
        shift *= 2
        if shift < size:
            longer_UK = _then(arrived_UK, upto_UK)
            upto_UK = jnp.where(index >= shift // 2, longer_UK, upto_UK)
    return before_UK


def sequence_parallel_kda(
    q_BTHK: Array,
    k_BTHK: Array,
    v_BTHV: Array,
    z_BTHK: Array,
    b_BTH: Array,
    A_log_H: Array,
    dt_bias_HK: Array,
    state_BHVK: Array | None = None,
    *,
    axis: str,
    lower_bound: float | None,
    lengths_B: Array | None = None,
    implementation: str = "auto",
) -> tuple[Array, Array]:
    """`gated_kda` of sequences of D T rows, T of them on each device of a mesh axis.

    Args:
      q_BTHK, k_BTHK, v_BTHV, z_BTHK, b_BTH: this device's rows; see `gated_kda`.
      A_log_H, dt_bias_HK, state_BHVK: see `gated_kda`; the same on every device of the axis.
      axis: name of the mesh axis, of any size D.
      lower_bound: of the log decay; see `decay`.
      lengths_B: int32 number of real rows of each whole sequence, 0..D T, the same on every device;
        the rows behind may hold anything. All rows are real if absent.
      implementation: of the rows' own run, see `gated_kda`; maps are always the portable form.

    Returns:
      (o_BTHV of this device's rows, state_BHVK after the last real row, on every device).

    Raises:
      InputError: as `gated_kda`.
    """
    # Shapes that do not fit are refused by gated_kda below; only what is read before needs a check.
    if k_BTHK.ndim != 4:
        raise InputError(f"sequence_parallel_kda: k is {describe(k_BTHK)}, expected [B, T, H, K]")
    batch, length, heads, k_dim = k_BTHK.shape
    state_shape = (batch, heads, v_BTHV.shape[-1], k_dim)
    if state_BHVK is None:
        state_BHVK = jnp.zeros(state_shape, jnp.float32)
    expect("sequence_parallel_kda: state", state_BHVK, state_shape, jnp.float32)
    if lengths_B is not None:
        expect("sequence_parallel_kda: lengths", lengths_B, (batch,), jnp.int32)
    local_B = _local(lengths_B, length, axis)

    entry_BHVK = state_BHVK
    if lax.axis_size(axis) > 1:
        inputs = normalised(
            (q_BTHK, k_BTHK, v_BTHV, z_BTHK, b_BTH), A_log_H, dt_bias_HK, lower_bound
        )
        own = [_masked(x, local_B) for x in inputs[1:]]
        map_BHUK = _map_before(xla.span_map(*own), axis)
        write_BHVK, move_BHKK = jnp.split(map_BHUK, [v_BTHV.shape[-1]], axis=-2)
        moved_BHVK = jnp.matmul(state_BHVK, move_BHKK, precision=lax.Precision.HIGHEST)
        entry_BHVK = jnp.where(lax.axis_index(axis) == 0, state_BHVK, moved_BHVK + write_BHVK)
    o_BTHV, after_BHVK = gated_kda(
        *(q_BTHK, k_BTHK, v_BTHV, z_BTHK, b_BTH, A_log_H, dt_bias_HK, entry_BHVK),
        lower_bound=lower_bound,
        lengths_B=local_B,
        implementation=implementation,
    )
    return o_BTHV, _of_last_row(after_BHVK, lengths_B, length, axis)


def sequence_parallel_conv(
    qkv_3BTP: tuple[Array, Array, Array],
    conv_3PW: tuple[Array, Array, Array],
    tails_3BWP: Array | None = None,
    *,
    axis: str,
    lengths_B: Array | None = None,
) -> tuple[tuple[Array, ...], Array]:
    """`short_conv` of q, k and v over sequences of D T rows, T on each device of a mesh axis.

    The W - 1 rows before a device's first one come from its neighbour, in one permute for all.

    Args:
      qkv_3BTP: this device's rows of q, k and v, one shape and dtype.
      conv_3PW: float32 filters of q, k and v.
      tails_3BWP: inputs before the first row of the sequences, in the dtype of qkv, the same on
        every device; zeros if absent.
      axis, lengths_B: see `sequence_parallel_kda`.

    Returns:
      (outputs of this device's rows, three of [B, T, P]; the tails [3, B, W-1, P] behind the last
      real row, on every device: copies, except that -0 may become 0).

    Raises:
      InputError: as `short_conv`, or T < W - 1, where one neighbour does not have rows enough.
    """
    x_BTP, width = qkv_3BTP[0], conv_3PW[0].shape[-1]
    for name, x in zip("qkv", qkv_3BTP, strict=True):
        expect(f"sequence_parallel_conv: {name}", x, x_BTP.shape, x_BTP.dtype)
    batch, length, channels = x_BTP.shape
    size, index = lax.axis_size(axis), lax.axis_index(axis)
    if size > 1 and length < width - 1:
        raise InputError(
            f"sequence_parallel_conv: {length} rows a device, expected at least {width - 1}"
        )
    tails_shape = (3, batch, width - 1, channels)
    if tails_3BWP is None:
        tails_3BWP = jnp.zeros(tails_shape, x_BTP.dtype)
    expect("sequence_parallel_conv: tails", tails_3BWP, tails_shape, x_BTP.dtype)
    if lengths_B is not None:
        expect("sequence_parallel_conv: lengths", lengths_B, (batch,), jnp.int32)
    local_B = _local(lengths_B, length, axis)

    own_3BWP = jnp.stack([_masked(x, local_B)[:, length - (width - 1) :] for x in qkv_3BTP])
    if size > 1:
        arrived_3BWP = lax.ppermute(own_3BWP, axis, [(d, d + 1) for d in range(size - 1)])
        tails_3BWP = jnp.where(index == 0, tails_3BWP, arrived_3BWP)
    inputs = zip(qkv_3BTP, conv_3PW, tails_3BWP, strict=True)
    y_3BTP, new_3BWP = zip(*(short_conv(*x, local_B) for x in inputs), strict=True)
    new_B3WP = _of_last_row(jnp.stack(new_3BWP, axis=1), lengths_B, length, axis)
    return y_3BTP, jnp.moveaxis(new_B3WP, 1, 0)
