"""What all threads of a block do together: sums, the k-th greatest number, places, a sort.

In MLIR, thread by thread, for the kernels that pick.
"""

from __future__ import annotations

import functools

from k3jax.ops.mosaic_gpu_lanes import Lane

TOTALS = 80  # sums over a block in one kernel
LEAST = -(2**31)


class Block(Lane):
    """What all threads of a block do together.

    Attributes:
      counters_s: int32, shared counters.
      sums_s: int32 [TOTALS, 32], a row for each sum, so that no sum waits for the one before.
    """

    def __init__(self, threads: int, counters_s, sums_s):
        super().__init__()
        self.threads, self.thread = threads, self.utils.thread_idx()
        self.lane = self.arith.andi(self.thread, self.int(31))
        self.warp = self.over(self.thread, 32)[0]
        self.counters_s, self.sums_s, self.used = counters_s, sums_s, 0
        with self.utils.when(self.less(self.thread, self.shape(counters_s)[0])):
            self.store(self.int(0), counters_s, self.thread)
        self.wait()

    def wait(self):
        """All threads meet; what they wrote before is seen by all."""
        self.gpu.barrier()

    def mine(self, size: int) -> list:
        """This thread's places among ``size``, with whether they exist."""
        places = [self.add(self.thread, begin) for begin in range(0, size, self.threads)]
        return [(place, self.less(place, size)) for place in places]

    def reduced(self, kind: str, *values):
        """redux.sync.kind of each number over all threads, in all threads."""
        first = self.used
        for n, value in enumerate(values):
            warp = self.asm(f"redux.sync.{kind} $0, $1, 0xffffffff;", self.i32, value)
            with self.utils.when(self.first_of_warp()):
                self.store(warp, self.sums_s, first + n, self.warp)
        self.used += len(values)
        assert self.used <= TOTALS
        self.wait()
        results = []
        for n in range(len(values)):
            # Lanes past the last warp repeat the first one, for a sum nothing.
            there = self.less(self.lane, self.threads // 32)
            other = self.int(0) if "add" in kind else self.load(self.sums_s, first + n, 0)
            one = self.arith.select(there, self.load(self.sums_s, first + n, self.lane), other)
            results.append(self.asm(f"redux.sync.{kind} $0, $1, 0xffffffff;", self.i32, one))
        return results

    def total(self, conditions):
        """How many conditions of all threads hold."""
        numbers = [self.number(c) for c in conditions]
        return self.reduced("add.s32", functools.reduce(self.arith.addi, numbers))[0]

    def either(self, condition, then, otherwise):
        """Values of ``then()`` where a condition that all threads share holds, else others."""
        op = self.scf.IfOp(condition, [x.type for x in otherwise], has_else=True)
        with self.ir.InsertionPoint(op.then_block):
            self.scf.yield_(list(then()))
        with self.ir.InsertionPoint(op.else_block):
            self.scf.yield_(list(otherwise))
        return list(op.results)

    def first_of_warp(self):
        return self.equal(self.arith.andi(self.thread, self.int(31)), self.int(0))

    def number(self, condition):
        return self.arith.extui(self.i32, condition)

    def greatest(self, keys, there, wanted, low: int = 0):
        """The greatest number that ``wanted`` keys are not below, among those that are ``there``.

        Or one between them and the next key, once a count is right; bits below ``low`` are zero.
        Bits that all keys share are not looked for.
        """
        arith = self.arith
        turn = lambda x: arith.xori(x, self.int(LEAST))  # noqa: E731  # as an unsigned number
        pairs = list(zip(keys, there, strict=True))
        top = functools.reduce(
            arith.maxui, [arith.select(t, turn(key), self.int(0)) for key, t in pairs]
        )
        bottom = functools.reduce(
            arith.minui, [arith.select(t, turn(key), self.int(-1)) for key, t in pairs]
        )
        # The least as a greatest, of the complement.
        top, bottom = self.reduced("max.u32", top, arith.xori(bottom, self.int(-1)))
        apart = arith.xori(top, arith.xori(bottom, self.int(-1)))
        zeros = self.asm("clz.b32 $0, $1;", self.i32, apart)
        shared = self.asm("shr.u32 $0, 0xffffffff, $1;", self.i32, zeros)  # ones where they differ
        limit = turn(arith.andi(top, arith.xori(shared, self.int(-1))))
        active = self.true()
        for bit in range(31, low - 1, -1):
            step = self.int(LEAST if bit == 31 else 1 << bit)
            differs = arith.cmpi(arith.CmpIPredicate.ne, arith.andi(shared, step), self.int(0))

            def look(limit=limit, step=step):
                trial = arith.addi(limit, step)
                count = self.total([arith.andi(t, self.not_less(key, trial)) for key, t in pairs])
                return (
                    arith.select(self.not_less(count, wanted), trial, limit),
                    arith.xori(self.equal(count, wanted), self.true()),
                )

            limit, active = self.either(arith.andi(active, differs), look, (limit, active))
        return arith.andi(limit, self.int(-(1 << low)))

    def next_places(self, conditions, at: int):
        """Places 0, 1, .. for the true conditions of all threads, in any order."""
        places = []
        for condition in conditions:
            ballot = self.asm(
                "{.reg .pred p; setp.ne.u32 p, $1, 0; vote.sync.ballot.b32 $0, p, 0xffffffff;}",
                *(self.i32, self.number(condition)),
            )
            below = self.asm("mov.u32 $0, %lanemask_lt;", self.i32)
            rank = self.asm("popc.b32 $0, $1;", self.i32, self.arith.andi(ballot, below))
            votes = self.asm("popc.b32 $0, $1;", self.i32, ballot)
            # The warp's first thread asks for all; the others get what it was given.
            mine = self.arith.select(self.first_of_warp(), votes, self.int(0))
            base = self.grow(self.counters_s, self.int(at), mine)
            base = self.asm("shfl.sync.idx.b32 $0, $1, 0, 0x1f, 0xffffffff;", self.i32, base)
            places.append(self.add(base, rank))
        return places

    def sort(self, keys_s, size: int):
        """Ascending unsigned numbers in shared memory: a bitonic network.

        A thread has neighbours in registers, a warp exchanges them by shuffles, and only strides
        past a warp go through shared memory.
        """
        arith = self.arith
        each = size // self.threads
        places = [self.add(self.times(self.thread, each), n) for n in range(each)]
        self.wait()
        mine = [self.load(keys_s, place) for place in places]
        run = 2
        while run <= size:
            stride = run // 2
            while stride:
                if stride < each:
                    others = [mine[n ^ stride] for n in range(each)]
                elif stride < 32 * each:
                    others = [self.utils.shfl_bfly(x, stride // each) for x in mine]
                else:
                    self.wait()
                    for place, key in zip(places, mine, strict=True):
                        self.store(key, keys_s, place)
                    self.wait()
                    others = [
                        self.load(keys_s, arith.xori(place, self.int(stride))) for place in places
                    ]
                bits = self.int(run), self.int(stride)
                for n, (place, a, b) in enumerate(zip(places, mine, others, strict=True)):
                    falling, upper = (
                        arith.cmpi(arith.CmpIPredicate.ne, arith.andi(place, x), self.int(0))
                        for x in bits
                    )
                    most, least = arith.maxui(a, b), arith.minui(a, b)
                    mine[n] = arith.select(arith.xori(falling, upper), most, least)
                stride //= 2
            run *= 2
        self.wait()
        for place, key in zip(places, mine, strict=True):
            self.store(key, keys_s, place)
        self.wait()

    def flip(self, key):
        """Bits of a float32 <-> a number in the same order (`xla.ordered`)."""
        arith = self.arith
        mask = arith.andi(arith.shrsi(key, self.int(31)), self.int(0x7FFFFFFF))
        return arith.xori(key, mask)
