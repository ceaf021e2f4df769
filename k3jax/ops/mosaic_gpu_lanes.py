"""What Mosaic GPU kernels do thread by thread, which arrays in registers cannot say: MLIR, inside
`plgpu.inline_mgpu`.
"""

from __future__ import annotations

import functools

from jax.experimental.pallas import mosaic_gpu as plgpu

WARPGROUP = 128  # threads
REF, SCALAR = plgpu.RefType(), plgpu.Layout.WG_SPLAT(())


class Lane:
    """Scalars of one thread. Imported late: MLIR is there only where GPU kernels are lowered."""

    def __init__(self):
        from jax.experimental.mosaic.gpu import utils
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import arith, gpu, llvm, math, memref, scf, vector

        self.utils, self.ir, self.arith = utils, ir, arith
        self.memref, self.vector, self.scf, self.gpu = memref, vector, scf, gpu
        self.fma, self.llvm = math.fma, llvm
        self.i32, self.f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        self.thread = arith.remui(utils.thread_idx(), self.int(WARPGROUP))

    def int(self, value: int):
        return self.utils.c(value, self.i32)

    def shape(self, ref):
        return self.ir.MemRefType(ref.type).shape

    def float(self, value: float):
        return self.utils.c(value, self.f32)

    def scalar(self, array):
        """The value of an array of layout WG_SPLAT."""
        return array.registers.reshape(-1)[0]

    def at(self, indices):
        index = self.ir.IndexType.get()
        numbers = [self.int(i) if isinstance(i, int) else i for i in indices]
        return [self.arith.index_cast(index, i) for i in numbers]

    def load(self, ref, *indices):
        return self.memref.load(ref, self.at(indices))

    def store(self, value, ref, *indices):
        self.memref.store(value, ref, self.at(indices))

    def add(self, *values):
        values = [self.int(v) if isinstance(v, int) else v for v in values]
        return functools.reduce(self.arith.addi, values)

    def times(self, a, b):
        return self.arith.muli(a, self.int(b) if isinstance(b, int) else b)

    def over(self, a, b: int):
        """(quotient, remainder) of a number that is not negative."""
        return self.arith.divui(a, self.int(b)), self.arith.remui(a, self.int(b))

    def less(self, a, b):
        b = self.int(b) if isinstance(b, int) else b
        return self.arith.cmpi(self.arith.CmpIPredicate.slt, a, b)

    def equal(self, a, b):
        return self.arith.cmpi(self.arith.CmpIPredicate.eq, a, b)

    def not_less(self, a, b):
        return self.arith.cmpi(self.arith.CmpIPredicate.sge, a, b)

    def true(self):
        return self.equal(self.int(0), self.int(0))

    def elements(self, register):
        """The scalars of a register that holds a vector."""
        return [
            self.vector.extract(register, dynamic_position=[], static_position=[i])
            for i in range(self.ir.VectorType(register.type).shape[0])
        ]

    def bit(self, value, n: int):
        """Whether bit n is set."""
        masked = self.arith.andi(value, self.int(1 << n))
        return self.arith.cmpi(self.arith.CmpIPredicate.ne, masked, self.int(0))

    def asm(self, text: str, result, *arguments):
        """One PTX statement; registers are 32 bits wide."""
        registers = ["=r"] * (result is not None) + ["r"] * len(arguments)
        constraints = ",".join([*registers, "~{memory}"])
        return self.llvm.inline_asm(
            result, list(arguments), text, constraints, has_side_effects=True
        )

    def grow(self, ref, index, by):
        """Adds to a number in shared memory and gives what it was; no two threads get the same.

        (`memref.atomic_rmw` would fence the memory of the whole system each time.)
        """
        base = self.llvm.ptrtoint(self.i32, self.utils.memref_ptr(ref))
        address = self.add(base, self.times(index, 4))
        return self.asm("atom.relaxed.cta.shared.add.u32 $0, [$1], $2;", self.i32, address, by)
