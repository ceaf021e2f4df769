"""What every implementation of a depth read must satisfy, at the sizes that it takes."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.ops import attention_residuals as op
from k3jax.ops import target
from k3jax.ops.attention_residuals import reference

EPS, OUT_EPS = 1e-5, 1e-4
NOISE = 2e-6  # of the mix in float32, of the token's largest value; measured 6e-7


@dataclasses.dataclass(frozen=True)
class Read:
    """One entry of the contract.

    Attributes:
      name: in the table of the op.
      dtype: of the rows.
      shape: N, D.
      device: device kind that it is told to run on; None for this one.
      entry: what stands in the table while it runs; None for its own.
      eager: not compiled: an interpreted kernel inside a compiled function can hang.
    """

    name: str
    dtype: Any
    shape: tuple[int, int]
    device: str | None = None
    entry: Callable | None = None
    eager: bool = False

    @contextlib.contextmanager
    def running(self):
        with contextlib.ExitStack() as stack:
            if self.entry is not None:
                entry = {self.name: self.entry}
                stack.enter_context(mock.patch.dict(op.IMPLEMENTATIONS, entry))
            if self.device is not None:
                patched = mock.patch.object(target, "device_kind", return_value=self.device)
                stack.enter_context(patched)
            yield

    def __call__(self, arrays, count, after=True):
        with self.running():
            return runner(self, after)(*arrays, jnp.int32(count))


@functools.cache
def runner(read: Read, after: bool):
    options = {"eps": EPS, "out_eps": OUT_EPS, "weight_after_cast": after}
    run = functools.partial(op.read, implementation=read.name, **options)
    return run if read.eager else jax.jit(run)


def drawn(read: Read, tokens: int, *, seed=0, query=0.1, scales: Any = 1.0):
    """Bank, running sum, norm, query and out_norm. ``query`` sets how far the scores differ."""
    N, D = read.shape
    rng = np.random.default_rng([seed, tokens])
    cast = lambda x: x.astype(read.dtype)  # noqa: E731
    scales_T1 = np.broadcast_to(scales, tokens)[:, None]
    return (
        cast(rng.normal(size=(N, 1, tokens, D)) * scales_T1),
        cast(rng.normal(size=(1, tokens, D)) * scales_T1),
        cast(1 + 0.3 * rng.normal(size=D)),
        cast(query * rng.normal(size=D)),
        cast(1 + 0.3 * rng.normal(size=D)),
    )


def without(arrays, count):
    """With NaN in the rows that are not there."""
    bank = arrays[0].copy()
    bank[count:] = np.nan
    return (bank, *arrays[1:])


def bounds(arrays, count, dtype, after):
    """(lowest, highest) result [B, T, D] in float64: the definition, rounded where the op rounds,
    from the ends of what float32 may make of the mix and of the norm's scale."""
    bank, partial, norm, query, out_norm = (np.asarray(x, np.float64) for x in arrays)
    rounded = lambda x: x.astype(np.float32).astype(dtype).astype(np.float64)  # noqa: E731
    ends = lambda *values: (np.minimum.reduce(values), np.maximum.reduce(values))  # noqa: E731
    sources_NTD = np.concatenate([bank[:count, 0], partial])
    tokens = range(sources_NTD.shape[1])
    mixed = np.stack([reference.mix_token(sources_NTD[:, t], norm, query, EPS) for t in tokens])
    keys = sources_NTD / np.sqrt(np.mean(sources_NTD**2, -1, keepdims=True) + EPS)
    score_T1 = np.abs(keys @ (norm * query)).max(0)[:, None]
    noise_T1 = NOISE + 2.0**-22 * score_T1  # scores are float32 too
    noise_T1 = noise_T1 * np.abs(sources_NTD).max((0, 2))[:, None]
    mixed = [rounded(mixed + sign * noise_T1) for sign in (-1, 1)]
    squares = [np.mean(x**2, -1, keepdims=True) for x in ends(*map(np.abs, mixed))]
    scales = [
        (1 + sign * NOISE) / np.sqrt(x + OUT_EPS) for x, sign in zip(squares, (1, -1), strict=True)
    ]
    y = ends(*[x * scale for x in mixed for scale in scales])
    y = ends(*[(rounded(x) if after else x) * out_norm for x in y])
    return [rounded(x)[None] for x in y]


def check(read: Read, arrays, count, after=True, kept: Any = slice(None), single=0.8):
    """The result is within bounds, for the ``kept`` tokens; in bfloat16 the bounds leave one result
    only to a share of values that is above ``single``."""
    got = read(without(arrays, count), count, after)
    assert got.dtype == read.dtype
    got = np.asarray(got, np.float64)[:, kept]
    low, high = (x[:, kept] for x in bounds(arrays, count, read.dtype, after))
    assert ((low <= got) & (got <= high)).all()
    if read.dtype == jnp.bfloat16:
        assert (low == high).mean() > single


class ReadContract:
    def test_counts(self, implementation):
        """Rows past the count hold NaN, and are not read."""
        arrays = drawn(implementation, 5)
        for count in range(implementation.shape[0] + 1):
            check(implementation, arrays, count, after=count % 2 == 0)

    def test_one_token(self, implementation):
        check(implementation, drawn(implementation, 1, seed=1), implementation.shape[0], False)

    def test_one_source_has_it_all(self, implementation):
        """Scores hundreds apart: exponentials that overflow without their maximum."""
        scales = [1e-3, 300.0, 1e-3, 1.0, 300.0]
        arrays = drawn(implementation, 5, seed=3, query=20.0, scales=scales)
        # Float32 scores of hundreds leave room: 0.34 of 7,168 values have one result only.
        check(implementation, arrays, implementation.shape[0], single=0.3)

    def test_equal_scores_give_the_mean(self, implementation):
        arrays = drawn(implementation, 5, seed=4, query=0.0)
        # A mean of four bfloat16 is often halfway between two: 0.75 have one result only.
        check(implementation, arrays, implementation.shape[0], single=0.7)

    def test_a_token_does_not_reach_another(self, implementation):
        arrays = drawn(implementation, 5, seed=5)
        arrays[0][0, 0, 2] = np.nan
        check(implementation, arrays, implementation.shape[0], kept=[0, 1, 3, 4])


class GradientContract:
    def test_gradients(self, implementation):
        """Those of the portable form, and zero for rows that are not there."""
        arrays = drawn(implementation, 5, seed=6)
        count = implementation.shape[0] - 1
        weight = np.float32(drawn(implementation, 5, seed=7)[1])

        def slopes(read):
            run = runner(read, True)
            loss = lambda *x: jnp.sum(run(*x, jnp.int32(count)).astype(jnp.float32) * weight)  # noqa: E731
            with read.running():
                return jax.jit(jax.grad(loss, argnums=tuple(range(5))))(*without(arrays, count))

        got = slopes(implementation)
        want = slopes(Read("xla", implementation.dtype, implementation.shape))
        assert not np.asarray(got[0][count:], np.float32).any()
        for one, other in zip(got, want, strict=True):
            one, other = np.float32(one), np.float32(other)
            assert np.linalg.norm(other) > 0
            # In bfloat16 the compiler may fuse another kernel's sums in another way.
            limit = 1e-6 if implementation.dtype == jnp.float32 else 4e-3
            assert np.linalg.norm(one - other) <= limit * np.linalg.norm(other)
