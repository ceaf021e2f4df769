"""Queries that the common rounds left: a block each, which scans all keys until it is done.

The floor rises with each scan, since among more candidates than there is room for the k-th best of
those that were kept is a better one. What the common rounds leave is rare, and a kernel that finds
nothing to do costs two microseconds; asking the host would cost a hundred.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from k3jax.ops.dsa import mosaic_gpu_collect as collecting
from k3jax.ops.dsa import mosaic_gpu_pick as picking
from k3jax.ops.mosaic_gpu import LANE, Interpret
from k3jax.ops.mosaic_gpu_lanes import Lane
from k3jax.ops.rows import Rows, Scaled

WARPGROUPS = 4  # two that score, one that fetches, one more to pick: a power of two


def finish(
    q_BTHK: Array,
    rows: Rows | Scaled,
    w_BTH: Array,
    positions_BT: Array,
    *,
    state,
    topk: int,
    interpret: Interpret = False,
) -> tuple[Array, Array, Array, Array]:
    """The state of `pick` once no query is left. Arguments as for it and `collect`."""
    if interpret:
        return _finish_interpreted(q_BTHK, rows, w_BTH, positions_BT, state, topk, interpret)
    batch, length = positions_BT.shape
    options = collecting.options_of(rows, 1, 1, picking.MOST, specialised=False)
    # Room for tiles is what the candidates leave.
    options = options._replace(stages=2)
    refs = [jax.new_ref(x) for x in state]
    inputs = collecting.inputs_of(q_BTHK, rows, w_BTH, positions_BT, *refs[:2])
    scan_types = collecting.scratch_of(rows, options)
    segments = collecting.WARPGROUPS
    pick_types = picking.scratch_of(segments, state[-1].shape[-1])
    read = [x for x in inputs if x is not None]
    types = [x for x in scan_types if x is not None]

    def body(*refs):
        refs = list(refs)
        take = lambda n: [refs.pop(0) for _ in range(n)]  # noqa: E731
        scanned = collecting.unpacked(inputs, take(len(read)))
        rank, at = take(2)
        picked = picking.Picked(scanned.limit, scanned.floor, scanned.tie, rank, at)
        found = collecting.Segments(*take(3))
        scan_scratch = collecting.unpacked(scan_types, take(len(types)))
        pick_scratch = picking.Scratch(*refs)
        where = (lax.axis_index("batch"), lax.axis_index("query"))
        threads = 128 * WARPGROUPS

        def again(_):
            # A query is a group, so that its number is the group's.
            collecting.scan(
                jnp.int32(0), where[1], where[0], scanned, found, scan_scratch, options, interpret
            )
            _meet()
            picking.best_of(found, picked, pick_scratch, *where, topk, threads)
            _meet()
            return scanned.floor[where]

        lax.while_loop(lambda floor: floor == floor, again, scanned.floor[where])

    plgpu.kernel(
        body,
        out_type=collecting.segments_of(batch, length, options),
        scratch_types=[*types, *pick_types],
        grid=(length, batch),
        grid_names=("query", "batch"),
        num_threads=WARPGROUPS,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=LANE, approx_math=True, unsafe_no_auto_barriers=True
        ),
    )(*read, *refs[2:])
    return tuple(ref[...] for ref in refs)


def _meet():
    """All threads of a block; what they wrote to any memory is seen by all."""

    @plgpu.inline_mgpu()
    def body(_):
        Lane().gpu.barrier()

    body()  # pyright: ignore[reportCallIssue]  # it passes the first one itself


def _finish_interpreted(q_BTHK, rows, w_BTH, positions_BT, state, topk, interpret):
    while not bool(jnp.isnan(state[0]).all()):
        found = collecting.collect(
            *(q_BTHK, rows, w_BTH, positions_BT, *state[:2]),
            queries=1,
            splits=1,
            capacity=picking.MOST,
            interpret=interpret,
        )
        state = picking.pick(
            found, positions_BT=positions_BT, state=state, topk=topk, interpret=interpret
        )
    return state
