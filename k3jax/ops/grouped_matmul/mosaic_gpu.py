"""The experts on packed MXFP4 as Pallas kernels for Hopper GPUs (Mosaic GPU).

Two calls of one kernel: w1 and w3 with SiTU behind them, then w2. Operands are swapped, so that the
rows of an expert are columns of a product and need no filling up to 64: out^T = W @ x^T, W unpacked
into registers (`mosaic_gpu_unpack`) and x in shared memory.

* Blocks stay and take work in turn: a tile of up to ``size`` rows of one expert (`rows.cut`), and
  256 rows of its weight, two parts of 128. In the first call those are rows of w1 and of w3.
* A team has two warpgroups that compute, 64 rows of both parts each, and a third one that copies
  codes, scales and rows of x into rings ahead of them, also across work. Weights are read where
  they lie, in the stack of all layers and experts, once for each tile.
* Outputs stay sorted by expert; `rows.combine` adds up what belongs to a token.

Many rows go through in segments, so that x, the activations and outputs need little memory.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from k3jax.ops.grouped_matmul import mosaic_gpu_unpack as parts
from k3jax.ops.grouped_matmul import rows as rows_of
from k3jax.ops.mosaic_gpu import LOG2E, PARAMETERS, Interpret, mode, sigmoid, smem
from k3jax.ops.mosaic_gpu import products as products_of
from k3jax.ops.situ import situ
from k3jax.quantization import mxfp8
from k3jax.quantization.mxfp4 import GROUP, MXFP4

SPAN, TILE = parts.SPAN, parts.TILE
STAGE = 2 * SPAN  # columns of a slot of the ring
BLOCKS = 132  # of an H200 or H100
SIZES = (8, 16, 24, 32, 48, 64, 80, 96)  # rows of a tile
SEGMENT = 16384  # rows at a time
RING = 2  # slots of a team
SMALL, FEW = 24, 32  # rows of a tile, and tiles; see `Shape`
_f32, _bf16, _i32, _u8 = jnp.float32, jnp.bfloat16, jnp.int32, jnp.uint8


def refusal(z_NL, ids_Nk, w13, w2, activations) -> str | None:
    """Why the kernels cannot take these inputs; None if they can."""
    del ids_Nk, activations
    if not isinstance(w13, MXFP4) or not isinstance(w2, MXFP4):
        return "weights are not packed"
    if z_NL.dtype != _bf16:
        return f"z is {z_NL.dtype}, not bfloat16"
    for name, width in (("latent", w13.shape[-1]), ("expert", w2.shape[-1])):
        if width % (2 * STAGE):
            return f"{name} width {width} is no multiple of {2 * STAGE}"
    return None


def tile_size(rows: int, num_experts: int) -> int:
    """Rows of a tile that hold nearly all experts' rows, if they fall evenly on experts."""
    mean = rows / num_experts
    wanted = mean + 2.2 * mean**0.5
    return next((size for size in SIZES if size >= wanted), SIZES[-1])


class Shape(NamedTuple):
    """How a block is made up.

    Attributes:
      size: rows of a tile.
      teams: of two warpgroups that compute and one that copies, each at work of its own. Two teams
        hide each other's latencies where tiles are small, and unpacking is what takes time; one
        divides few tiles better over the chip.
    """

    size: int
    teams: int

    @classmethod
    def of(cls, size: int, tiles: int) -> Shape:
        return cls(size, 2 if size <= SMALL and tiles > FEW else 1)

    @property
    def widths(self) -> tuple[int, ...]:
        """Columns of the products, ascending; a tile takes the first that holds its rows."""
        return (self.size - 32, self.size - 16, self.size) if self.size >= 64 else (self.size,)

    @property
    def registers(self) -> tuple[int, int]:
        """Of a thread that computes, and of one that copies."""
        return (232, 40) if self.teams == 1 else (104, 32)


def _tanh(x):
    """To 3e-7; near 0 by its series, since 1 - 2 / (1 + e^2x) has lost the digits there."""
    square = x * x
    near = x * (1.0 + square * (-1 / 3 + square * (2 / 15 - square * (17 / 315))))
    root = lax.rsqrt(1.0 + jnp.exp2((2 * LOG2E) * x))
    return jnp.where(square < 0.0625, near, 1.0 - 2.0 * (root * root))


class _Situ(NamedTuple):
    """`k3jax.ops.situ` in float32."""

    beta: float
    linear: float | None

    def __call__(self, gate, up):
        gate = self.beta * _tanh(gate * (1 / self.beta)) * sigmoid(gate)
        return gate * (up if self.linear is None else self.linear * _tanh(up * (1 / self.linear)))


def _kernel(
    x_g, codes_g, scales_g, expert_g, start_g, count_g, used_g, first_g, out_g,
    codes_s, scales_s, x_s, out_s, first_there, first_free, second_there, second_free,
    scales_there, scales_free, *, shape, apart, activate, interpret,
):  # fmt: skip
    warpgroup = lax.axis_index("warpgroup")
    consumers = 2 * shape.teams
    team = jnp.where(warpgroup < consumers, lax.div(warpgroup, _i32(2)), warpgroup - consumers)
    block = lax.axis_index("block") * shape.teams + team
    blocks = lax.axis_size("block") * shape.teams
    outputs, width = codes_g.shape[1], codes_g.shape[2] * 2
    stages = width // STAGE  # an even number, so that slots alternate across work too
    step_rows = SPAN if activate else 2 * SPAN
    across = outputs // (2 * SPAN)  # pieces of work of a tile
    mine = lax.max(_i32(0), (used_g[0] * across - block + blocks - 1) // blocks)
    slot = lambda s: team * RING + (s & 1)  # noqa: E731

    def place(i):
        """(tile, first row of the weight) of this team's i-th piece of work."""
        tile = lax.div(block + i * blocks, _i32(across))
        return tile, (block + i * blocks - tile * across) * step_rows

    @pl.when(warpgroup >= consumers)
    def _():
        plgpu.set_max_registers(shape.registers[1], action="decrease")

        def item(i, _):
            tile, row = place(i)
            expert, start = first_g[0] + expert_g[tile], start_g[tile]

            def codes(s, part, there):
                rows = pl.ds(row + part * apart, SPAN)
                plgpu.copy_gmem_to_smem(
                    codes_g.at[expert, rows, pl.ds(s * SPAN, SPAN)],
                    codes_s.at[slot(s), part],
                    there.at[slot(s)],
                )

            def stage(s, _):
                again = (i > 0) | (s >= RING)
                pl.when(again)(lambda: plgpu.barrier_wait(second_free.at[slot(s)]))
                plgpu.copy_gmem_to_smem(
                    x_g.at[pl.ds(start, shape.size), pl.ds(s * STAGE, STAGE)],
                    x_s.at[slot(s)],
                    first_there.at[slot(s)],
                )
                pl.when(again)(lambda: plgpu.barrier_wait(first_free.at[slot(s)]))
                codes(s, 0, first_there)
                codes(s, 1, second_there)

                @pl.when(s == 0)
                def _():
                    pl.when(i > 0)(lambda: plgpu.barrier_wait(scales_free.at[team]))
                    for part in range(2):
                        # Whole lines: 128 rows of a weight lie side by side.
                        lines = width // GROUP
                        first = lax.div(row + part * apart, _i32(SPAN)) * lines
                        plgpu.copy_gmem_to_smem(
                            scales_g.at[expert, pl.ds(first, lines)],
                            scales_s.at[team, part],
                            scales_there.at[team],
                        )

                return ()

            return lax.fori_loop(0, stages, stage, ())

        lax.fori_loop(0, mine, item, ())

        @pl.when(mine > 0)
        def _():
            plgpu.barrier_wait(scales_free.at[team])
            for s in range(RING):
                plgpu.barrier_wait(first_free.at[slot(s)])
                plgpu.barrier_wait(second_free.at[slot(s)])

    @pl.when(warpgroup < consumers)
    def _():
        plgpu.set_max_registers(shape.registers[0], action="increase")
        half = warpgroup & 1
        out_w = out_s.at[warpgroup]

        def products(n, carry, add):
            """Work with n columns: ``carry = add(carry, part, a, b)`` for its products in
            turn. When ``add`` returns, at most its own product is unfinished."""

            def stage(s, carry):
                factors = parts.factors(
                    scales_s.at[team], s, half, groups=width // GROUP, interpret=interpret
                )
                pl.when(s == stages - 1)(lambda: plgpu.barrier_arrive(scales_free.at[team]))
                for part, there in enumerate((first_there, second_there)):
                    plgpu.barrier_wait(there.at[slot(s)])
                    for span in range(2):
                        words = parts.words(
                            codes_s.at[slot(s), part], span, half, interpret=interpret
                        )
                        for chunk in range(2):
                            a = parts.unpack(words, factors, part, span, chunk, interpret=interpret)
                            columns = pl.ds(span * SPAN + chunk * TILE, TILE)
                            x = x_s.at[slot(s), pl.ds(0, n), columns].transpose((1, 0))
                            carry = add(carry, part, a, x)
                            if span == chunk == 0:  # what came before this product is done
                                done(s, part)
                return carry

            def done(s, part):
                if part == 1:
                    plgpu.barrier_arrive(first_free.at[slot(s)])
                else:
                    pl.when(s > 0)(lambda: plgpu.barrier_arrive(second_free.at[slot(s - 1)]))

            return lax.fori_loop(0, stages, stage, carry)

        def sums(n):
            sizes = (TILE, n)
            if interpret:

                def plain(sums, part, a, b):
                    (more,) = products_of((sizes, sums[part], [(a, b)]), interpret=True)
                    return tuple(more if p == part else x for p, x in enumerate(sums))

                return products(n, (jnp.zeros(sizes, _f32),) * 2, plain)

            def scoped(*accumulators):
                def issue(_, part, a, b):
                    plgpu.wgmma(accumulators[part], a, b)
                    plgpu.wgmma_wait(1)
                    return ()

                products(n, (), issue)
                plgpu.wgmma_wait(0)
                return [accumulator[...] for accumulator in accumulators]

            return pl.run_scoped(scoped, *[plgpu.ACC(sizes, _f32)] * 2)

        def item(i, _):
            tile, row = place(i)
            count = count_g[tile]
            plgpu.barrier_wait(scales_there.at[team])
            below = _i32(-1)
            for n in shape.widths:
                pl.when((count > below) & (count <= n))(
                    functools.partial(work, n, row, start_g[tile], count)
                )
                below = _i32(n)
            return ()

        def work(n, row, start, count):
            both = sums(n)
            plgpu.barrier_arrive(second_free.at[slot(stages - 1)])

            def write(value, column):
                to = out_w.at[pl.ds(0, n)]
                to.transpose((1, 0))[...] = value.astype(_bf16)
                parts.store_rows(
                    *(to, out_g, start, count, column + TILE * half), interpret=interpret
                )

            if activate:
                write(activate(*(x.astype(_bf16).astype(_f32) for x in both)), row)
            else:
                for part in range(2):
                    write(both[part], row + part * SPAN)

        lax.fori_loop(0, mine, item, ())


def _grouped(
    x_RK, weight: MXFP4, tiles: rows_of.Tiles, first, *, size: int, activate, interpret: Interpret
):
    """Rows times the weights of their experts, bfloat16 [R, O], `parts.spread`; x is too.

    Args:
      first: int32 [1], where in the weights expert 0 is.
      activate: (gate, up) -> activation, where the weight has gate rows before up rows and O is
        half of its rows; None for a plain product.
    """
    rows, (outputs, groups) = x_RK.shape[0], weight.scales.shape[-2:]
    shape = Shape.of(size, len(tiles.expert_T))
    ring = shape.teams * RING
    one, two = (functools.partial(plgpu.Barrier, num_arrivals=n) for n in (1, 2))
    return plgpu.kernel(
        functools.partial(
            _kernel,
            shape=shape,
            apart=outputs // 2 if activate else SPAN,
            activate=activate,
            interpret=interpret,
        ),
        out_type=jax.ShapeDtypeStruct((rows, outputs // (2 if activate else 1)), _bf16),
        scratch_types=[
            smem((ring, 2, SPAN, SPAN), _u8),
            plgpu.SMEM((shape.teams, 2, groups, SPAN), _u8),
            smem((ring, size, STAGE), _bf16),
            smem((2 * shape.teams, size, TILE), _bf16),
            two(num_barriers=ring),  # first codes and x
            two(num_barriers=ring),
            one(num_barriers=ring),  # second codes
            two(num_barriers=ring),  # they, and x
            two(num_barriers=shape.teams),
            two(num_barriers=shape.teams),
        ],
        grid=(BLOCKS,),
        grid_names=("block",),
        num_threads=3 * shape.teams,
        thread_name="warpgroup",
        compiler_params=PARAMETERS,
        interpret=mode(interpret),
    )(x_RK, weight.codes, weight.scales.reshape(-1, outputs * groups // SPAN, SPAN), *tiles, first)


# Jitted, so that a kernel that a program calls again is lowered once.
_jitted = jax.jit(_grouped, static_argnames=("size", "activate", "interpret"))


def experts(
    z_NL, ids_Nk, weights_Nk, w13: MXFP4, w2: MXFP4, *, first, num_experts: int, out_dtype,
    situ_beta: float, situ_linear_beta: float | None, activations: str | None,
    interpret: Interpret = False,
):  # fmt: skip
    """See `k3jax.ops.grouped_matmul.IMPLEMENTATIONS`; inputs as `refusal` wants them.

    Temporaries are bfloat16 rows of x, of activations and of outputs, at most `SEGMENT` each, and
    the float32 sum.
    """
    if ids_Nk.size == 0:
        return jnp.zeros(z_NL.shape, out_dtype)
    sorted_ = rows_of.sort(ids_Nk, num_experts)
    total = len(sorted_.token_R)
    # MXFP8 holds w1 z and w3 z of a segment too.
    segments = -(-total // (SEGMENT if activations is None else SEGMENT // 2))
    rows = -(-total // (segments * rows_of.ALIGNMENT)) * rows_of.ALIGNMENT
    token_R = jnp.pad(sorted_.token_R, (0, segments * rows - total))
    place_Nk, weights_Nk = rows_of.ascending(sorted_.place_Nk, weights_Nk)
    first_1 = jnp.reshape(jnp.int32(0) if first is None else first, 1)
    size = tile_size(ids_Nk.size, num_experts)
    grouped = functools.partial(
        _grouped if interpret else _jitted, first=first_1, size=size, interpret=interpret
    )
    x_NL = parts.spread(z_NL if activations is None else mxfp8.round_trip(z_NL))

    def hidden(x_RL, tiles):
        if activations is None:
            activate = _Situ(situ_beta, situ_linear_beta)
            return grouped(x_RL, w13, tiles, activate=activate)
        # A group of 32 lies across both warpgroups, so it is rounded behind the kernel.
        both_RF = parts.gather(grouped(x_RL, w13, tiles, activate=None)).astype(_f32)
        gate_RF, up_RF = jnp.split(both_RF, 2, axis=1)
        h_RF = situ(gate_RF, up_RF, situ_beta, situ_linear_beta)
        return parts.spread(mxfp8.round_trip(h_RF).astype(_bf16))

    def segment(n, sum_NL):
        begin = n * rows
        tiles = rows_of.cut(sorted_.begin_E, sorted_.end_E, begin, rows, size)
        x_RL = x_NL[lax.dynamic_slice_in_dim(token_R, begin, rows)]
        y_RL = grouped(hidden(x_RL, tiles), w2, tiles, activate=None)
        return rows_of.combine(sum_NL, y_RL, place_Nk, weights_Nk, begin)

    sum_NL = jnp.zeros(z_NL.shape, _f32)
    looped = functools.partial(lax.fori_loop, 0, segments, segment)
    sum_NL = segment(0, sum_NL) if segments == 1 else looped(sum_NL)
    return parts.gather(sum_NL).astype(out_dtype)
