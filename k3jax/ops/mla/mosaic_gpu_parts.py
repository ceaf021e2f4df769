"""Pieces of the latent attention kernel below Pallas: row gathers, and sums and maxima over rows.

Each has a plain form for interpret mode, which knows no `plgpu.inline_mgpu`.
"""

# `inline_mgpu` takes the context away from what it wraps; its types do not say so.
# pyright: reportCallIssue=false, reportArgumentType=false
from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from k3jax.ops.mosaic_gpu import COLUMNS, WGMMA, swizzled

BLOCK = 64  # keys of a block; rows of one warpgroup product
CHUNK = 64  # columns of a chunk of rows; one swizzled row of 128 bytes
THREADS = 128
TAKEN = BLOCK * CHUNK * 2 // 16 // THREADS  # pieces of 16 bytes a thread copies of a chunk
# A number of each thread's own for each of its rows: row 16 i + thread // 8.
PRIVATE = plgpu.Layout.WG_STRIDED((TAKEN * THREADS,), vec_size=1)
SCALAR = plgpu.Layout.WG_SPLAT(())
ABSENT = -1
_i32 = jnp.int32


def _mgpu():
    from jax._src.lib.mlir import ir
    from jax._src.lib.mlir.dialects import arith, llvm, nvvm
    from jax.experimental.mosaic import gpu as mgpu
    from jax.experimental.mosaic.gpu import utils

    return ir, arith, llvm, nvvm, mgpu, utils


def _thread(ir, arith, utils):
    """The thread's number within its warpgroup, int32."""
    from jax._src.lib.mlir.dialects import gpu

    i32 = ir.IntegerType.get_signless(32)
    x = arith.index_castui(i32, gpu.thread_id(gpu.Dimension.x))
    return arith.andi(x, utils.c(THREADS - 1, i32))


def rows(block, kind, where_g, bases_g, bias_w, unit, batch, limit, *, page, interpret):
    """Flat rows of a block of keys, `ABSENT` where there is none; what is added to their scores.

    Args:
      block: the block's number.
      where_g: "indices": int32 [U, k], k a multiple of `BLOCK`; not read for "positions".
      bases_g: int32 [B, M], flat row where each page begins.
      bias_w: float32 [BLOCK] in shared memory, set to 0 or -inf.
      limit: rows from here on are absent.

    Returns:
      `PRIVATE` int32; [BLOCK] in interpret mode.
    """
    pages = bases_g.shape[1]
    if interpret:
        if kind == "indices":
            at = where_g[unit, pl.ds(block * BLOCK, BLOCK)]
        else:
            at = block * BLOCK + jnp.arange(BLOCK, dtype=_i32)
        seen = (at >= 0) & (at < limit)
        bias_w[...] = jnp.where(seen, 0.0, -jnp.inf).astype(jnp.float32)
        safe = jnp.where(seen, at, 0)
        bases = bases_g[batch]
        return jnp.where(seen, bases[safe // page] + safe % page, ABSENT)
    ir, arith, _, _, mgpu, utils = _mgpu()

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType(), plgpu.RefType(), *[SCALAR] * 4),
        return_type=plgpu.ShapeDtypeStruct((TAKEN * THREADS,), _i32, layout=PRIVATE),
    )
    def find(_, where, bases, bias, *scalars):
        from jax._src.lib.mlir.dialects import memref, scf

        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        c = lambda x: utils.c(x, i32)  # noqa: E731
        index = lambda x: arith.index_castui(ir.IndexType.get(), x)  # noqa: E731
        block, unit, batch, limit = (x.registers.item() for x in scalars)
        thread = _thread(ir, arith, utils)
        first = arith.shrui(thread, c(3))
        out = []
        for i in range(TAKEN):
            row = arith.addi(first, c(BLOCK // TAKEN * i))
            at = arith.addi(arith.muli(block, c(BLOCK)), row)
            if kind == "indices":
                last = c(where.type.shape[1] - 1)
                at = memref.load(where, [index(unit), index(arith.minui(at, last))])
            # As unsigned numbers negative ones are past the end.
            seen = arith.cmpi(arith.CmpIPredicate.ult, at, limit)
            safe = arith.select(seen, at, c(0))
            number = arith.divui(safe, c(page)) if pages > 1 else c(0)
            flat = memref.load(bases, [index(batch), index(number)])
            inside = arith.subi(safe, arith.muli(number, c(page)))
            out.append(arith.select(seen, arith.addi(flat, inside), c(ABSENT)))
            low = arith.select(seen, utils.c(0.0, f32), utils.c(float("-inf"), f32))
            one = arith.cmpi(arith.CmpIPredicate.eq, arith.andi(thread, c(7)), c(0))
            branch = scf.IfOp(one)
            with ir.InsertionPoint(branch.then_block):
                memref.store(low, bias, [index(row)])
                scf.yield_([])
        vector = ir.VectorType.get((1,), i32)
        from jax._src.lib.mlir.dialects import vector as vector_dialect

        registers = np.array([vector_dialect.broadcast(vector, x) for x in out], dtype=object)
        return mgpu.FragmentedArray(
            _registers=registers, _layout=PRIVATE.to_mgpu(), _is_signed=True
        )

    return find(where_g, bases_g, bias_w, block, unit, batch, limit)


def copy(stack_g, found, chunk, to_w, *, interpret):
    """Starts the copy of one chunk of columns of rows that `rows` found; absent rows are zeros."""
    if interpret:
        columns = pl.ds(chunk * CHUNK, CHUNK)

        def one(i, _):
            row = stack_g[jnp.maximum(found[i], 0), columns]
            to_w[i] = jnp.where(found[i] >= 0, row, jnp.zeros_like(row))
            return ()

        lax.fori_loop(0, BLOCK, one, ())
        return
    ir, arith, llvm, nvvm, _, utils = _mgpu()
    width = stack_g.shape[1]

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), PRIVATE, SCALAR, plgpu.RefType(swizzled(jnp.bfloat16))),
    )
    def start(_, stack, found, chunk, to):
        i32, i64, i8 = (ir.IntegerType.get_signless(x) for x in (32, 64, 8))
        c = lambda x: utils.c(x, i32)  # noqa: E731
        thread = _thread(ir, arith, utils)
        piece = arith.andi(thread, c(7))
        row = arith.shrui(thread, c(3))
        source = llvm.addrspacecast(llvm.PointerType.get(1), utils.memref_ptr(stack))
        source = utils.getelementptr(
            source,
            [arith.addi(arith.shli(chunk.registers.item(), c(7)), arith.shli(piece, c(4)))],
            i8,
        )
        # The piece of row r stands at piece xor (r % 8) of its 128 bytes.
        swapped = arith.xori(piece, arith.andi(row, c(7)))
        offset = arith.addi(arith.shli(row, c(7)), arith.shli(swapped, c(4)))
        target = utils.getelementptr(utils.memref_ptr(to), [offset], i8)
        from jax._src.lib.mlir.dialects import vector as vector_dialect

        for i, register in enumerate(found.registers.flat):
            flat = vector_dialect.extract(
                register, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([0])
            )
            seen = arith.cmpi(arith.CmpIPredicate.sge, flat, c(0))
            size = arith.select(seen, c(16), c(0))
            safe = arith.extui(i64, arith.maxsi(flat, c(0)))
            at = utils.getelementptr(source, [arith.muli(safe, utils.c(width * 2, i64))], i8)
            into = utils.getelementptr(target, [c(BLOCK // TAKEN * i * CHUNK * 2)], i8)
            nvvm.cp_async_shared_global(into, at, 16, nvvm.LoadCacheModifierKind.CG, cp_size=size)
        nvvm.cp_async_commit_group()

    start(stack_g, found, chunk, to_w)


def copied(behind: int, *, interpret):
    """Waits until at most ``behind`` chunks of this thread are on their way; products see it."""
    if interpret:
        return

    @plgpu.inline_mgpu()
    def wait(_):
        _, _, _, nvvm, _, _ = _mgpu()
        nvvm.cp_async_wait_group(behind)
        nvvm.fence_proxy(nvvm.ProxyKind.async_shared, space=nvvm.SharedSpace.shared_cta)

    wait()


def above(x_MN, limit: float, *, interpret):
    """1 where any element of a warpgroup's matrix is above ``limit``, else 0."""
    if interpret:
        return jnp.any(x_MN > limit).astype(_i32)
    ir, arith, _, _, mgpu, utils = _mgpu()

    @plgpu.inline_mgpu(
        arg_types=(WGMMA,), return_type=plgpu.ShapeDtypeStruct((), _i32, layout=SCALAR)
    )
    def vote(_, x):
        from jax._src.lib.mlir.dialects import vector as vector_dialect

        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        values = [
            vector_dialect.extract(
                r, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([i])
            )
            for r in x.registers.flat
            for i in range(2)
        ]
        while len(values) > 1:
            pairs = list(zip(values[::2], values[1::2], strict=False))
            rest = values[len(pairs) * 2 :]
            values = [arith.maxnumf(a, b) for a, b in pairs] + rest
        high = arith.cmpf(arith.CmpFPredicate.OGT, values[0], utils.c(limit, f32))
        some = utils.inline_ptx(
            "{ .reg .pred p, q; setp.ne.b32 p, $2, 0; "
            f"bar.red.or.pred q, $1, {THREADS}, p; selp.b32 $0, 1, 0, q; }}",
            utils.warpgroup_barrier_idx(sync=False),
            arith.extui(i32, high),
            result_types=i32,
            has_side_effects=True,
        )
        return mgpu.FragmentedArray.splat(some, (), is_signed=True)

    return vote(x_MN)


def largest(x_MN, scratch_w, *, interpret):
    """The largest of each column, in `COLUMNS`."""
    if interpret:
        return jnp.max(x_MN, axis=0)
    return _reduce("max", x_MN, WGMMA, scratch_w)


def _reduce(op, x_MN, layout, scratch_w):
    @plgpu.inline_mgpu(
        arg_types=(layout, plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct((x_MN.shape[1],), jnp.float32, layout=COLUMNS),
    )
    def reduce(_, x, scratch):
        return x.reduce(op, 0, scratch)

    return reduce(x_MN, scratch_w)


def own_size(columns: int) -> int:
    """Size of a warpgroup's sums: each thread keeps its own in shared memory, over its own rows,
    as registers are all taken."""
    return columns // 4 * THREADS


def _own(ref_w, columns, update, arg_types=(), args=()):
    """Each pair of a thread's sums becomes update(pair number, pair, ...)."""
    ir, arith, llvm, _, _, utils = _mgpu()

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *arg_types))
    def change(_, ref, *args):
        thread = _thread(ir, arith, utils)
        pair = ir.VectorType.get((2,), ir.F32Type.get())
        base = utils.getelementptr(utils.memref_ptr(ref), [thread], pair)
        for j in range(columns // 8):
            at = utils.getelementptr(base, [j * THREADS], pair)
            llvm.store(update(j, functools.partial(llvm.load, pair, at), *args), at)

    change(ref_w, *args)


def clear_own(ref_w, columns, *, interpret):
    """Sets a warpgroup's sums to 0."""
    if interpret:
        ref_w[pl.ds(0, columns)] = jnp.zeros((columns,), jnp.float32)
        return
    ir, _, _, _, _, utils = _mgpu()

    def zero(j, load):
        from jax._src.lib.mlir.dialects import vector

        f32 = ir.F32Type.get()
        return vector.broadcast(ir.VectorType.get((2,), f32), utils.c(0.0, f32))

    _own(ref_w, columns, zero)


def scale_own(ref_w, factor_N, *, interpret):
    """Multiplies a warpgroup's sums by a factor a column."""
    columns = factor_N.shape[0]
    if interpret:
        ref_w[pl.ds(0, columns)] = ref_w[pl.ds(0, columns)] * factor_N
        return
    _, arith, _, _, _, _ = _mgpu()

    def scale(j, load, factor):
        return arith.mulf(load(), factor.registers.flat[j])

    _own(ref_w, columns, scale, (COLUMNS,), (factor_N,))


def add_own(ref_w, x_MN, *, interpret):
    """Adds each thread's elements of a matrix to its sums."""
    columns = x_MN.shape[1]
    if interpret:
        ref_w[pl.ds(0, columns)] = ref_w[pl.ds(0, columns)] + jnp.sum(x_MN, axis=0)
        return
    _, arith, _, _, _, _ = _mgpu()

    def add(j, load, x):
        low, high = x.registers[0, j, 0, 0, :, 0, 0, 0, 0]
        return arith.addf(load(), arith.addf(low, high))

    _own(ref_w, columns, add, (WGMMA,), (x_MN,))


def total(ref_w, columns, scratch_w, *, interpret):
    """The sums over all rows, in `COLUMNS`."""
    if interpret:
        return ref_w[pl.ds(0, columns)]
    ir, arith, llvm, _, mgpu, utils = _mgpu()

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct((columns,), jnp.float32, layout=COLUMNS),
    )
    def reduce(_, ref, scratch):
        from jax._src.lib.mlir.dialects import vector as vector_dialect

        pair = ir.VectorType.get((2,), ir.F32Type.get())
        zero = vector_dialect.broadcast(pair, utils.c(0.0, ir.F32Type.get()))
        registers = np.full(mgpu.WGMMA_LAYOUT.registers_shape((BLOCK, columns)), zero, object)
        thread = _thread(ir, arith, utils)
        base = utils.getelementptr(utils.memref_ptr(ref), [thread], pair)
        for j in range(columns // 8):
            at = utils.getelementptr(base, [j * THREADS], pair)
            registers[0, j, 0, 0, 0, 0, 0, 0, 0] = llvm.load(pair, at)
        rows = mgpu.FragmentedArray(
            _registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None
        )
        return rows.reduce("add", 0, scratch)

    return reduce(ref_w, scratch_w)


def store_transposed(x_MN, to_g, *, interpret):
    """Writes a matrix [64, N] to global memory [N, 64]: 8 lanes write 32 bytes side by side."""
    if interpret:
        to_g[...] = x_MN.T
        return
    ir, arith, llvm, _, _, utils = _mgpu()

    @plgpu.inline_mgpu(arg_types=(WGMMA, plgpu.RefType()))
    def store(_, x, to):
        from jax._src.lib.mlir.dialects import vector as vector_dialect

        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        c = lambda v: utils.c(v, i32)  # noqa: E731
        (stride, unit), _ = to.type.get_strides_and_offset()
        assert unit == 1
        thread = _thread(ir, arith, utils)
        lane = arith.andi(thread, c(31))
        row = arith.addi(arith.shli(arith.shrui(thread, c(5)), c(4)), arith.shrui(lane, c(2)))
        column = arith.shli(arith.andi(lane, c(3)), c(1))
        base = utils.getelementptr(
            utils.memref_ptr(to), [arith.addi(row, arith.muli(column, c(stride)))], f32
        )
        for (_, j, _, _, i, *_), register in np.ndenumerate(x.registers):
            for e in range(2):
                value = vector_dialect.extract(
                    register, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([e])
                )
                at = utils.getelementptr(base, [c((8 * j + e) * stride + 8 * i)], f32)
                llvm.store(value, at)

    store(x_MN, to_g)


def store_columns(x_N, to_g, *, interpret):
    """Writes `COLUMNS` to global memory, any number of bytes: a plain store wants whole lines."""
    if interpret:
        to_g[...] = x_N
        return

    @plgpu.inline_mgpu(arg_types=(COLUMNS, plgpu.RefType()))
    def store(_, x, to):
        x.store_untiled(to, optimized=False)

    store(x_N, to_g)
