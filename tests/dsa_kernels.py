"""The implementations of DSA's selection and of latent attention under test, and their sizes."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.ops import dsa, mla, target
from k3jax.ops.choice import Kernel
from k3jax.ops.dsa import xla
from k3jax.ops.mla import blocks
from k3jax.ops.mla.latent import KERNELS, LATENT
from k3jax.ops.rows import Rows, Scaled

FLOAT8 = jnp.float8_e4m3fn


@dataclass(frozen=True, eq=False)
class Implementation:
    """One entry of a contract.

    Attributes:
      name: in the tables of the op.
      dtype: of queries and cache rows.
      device: device kind that it is told to run on; None for this one.
      entry: what stands in the table while it runs, made for block sizes (none: its own); None to
        leave the table alone, as for portable forms and on the device itself.
      blocks: other block sizes, which must change nothing; options of the public function where
        there is no entry.
      tile: caches and pages have a multiple of so many rows; here NaN rows fill them up.
    """

    name: str
    dtype: Any = jnp.float32
    device: str | None = None
    entry: Callable[..., Callable] | None = None
    blocks: tuple[Mapping[str, int], ...] = ()
    tile: int = 1

    TABLES = ()  # (implementations, kernels, [(module, its tuple of names)])

    @contextlib.contextmanager
    def running(self, **sizes):
        entries, kernels, names = self.TABLES
        with contextlib.ExitStack() as stack:
            if self.entry is not None:
                entry = {self.name: self.entry(**sizes)}
                stack.enter_context(mock.patch.dict(entries, entry))
                if self.name not in kernels:  # a stand-in that only tests know
                    only = Kernel(lambda kind: kind == self.device, lambda *_: None)
                    stack.enter_context(mock.patch.dict(kernels, {self.name: only}))
                    for module, name in names:
                        known = (*getattr(module, name), self.name)
                        stack.enter_context(mock.patch.object(module, name, known))
            if self.device is not None:
                stack.enter_context(
                    mock.patch.object(target, "device_kind", return_value=self.device)
                )
            yield

    @contextlib.contextmanager
    def counted(self):
        """`running`, with a list that grows by each call that is traced."""
        calls = []
        with self.running():
            inner = self.TABLES[0][self.name]

            def entry(*arguments, **options):
                calls.append(self.name)
                return inner(*arguments, **options)

            with mock.patch.dict(self.TABLES[0], {self.name: entry}):
                yield calls

    def filled(self, rows_BSC):
        """Rows of NaN behind the others, up to a whole number of tiles."""
        widths = [(0, 0), (0, -rows_BSC.shape[1] % self.tile), (0, 0)]
        return jnp.pad(rows_BSC, widths, constant_values=jnp.asarray(jnp.nan, rows_BSC.dtype))

    def embedded(self):
        """This kernel for any smaller sizes too, which zeros embed in its own, exactly; what "auto"
        takes on a device that has nothing else."""

        def entry(**sizes):
            kernel = self.TABLES[0][self.name] if self.entry is None else self.entry(**sizes)
            return functools.partial(self.embed, kernel)

        name = f"{self.name}-embedded"
        return dataclasses.replace(self, name=name, device="embedded", entry=entry)

    def options(self, sizes) -> dict[str, int]:
        """Block sizes as options of the public function."""
        return dict(sizes) if self.entry is None else {}


@dataclass(frozen=True, eq=False)
class Selection(Implementation):
    """One implementation of `dsa.select`; with float8 rows it is called as its table calls it.

    Attributes:
      heads, width: of the indexer.
    """

    heads: int = 4
    width: int = 8

    TABLES = dsa.SELECT, dsa.SELECT_KERNELS, [(dsa, "SELECT_IMPLEMENTATIONS")]

    def embed(self, kernel, q_BTHK, rows, w_BTH, positions_BT, topk):
        q_BTHK = widened(q_BTHK, {2: self.heads, 3: self.width})
        k_BSK = self.filled(widened(rows.whole(), {2: self.width}))
        return kernel(q_BTHK, Rows.of(k_BSK), widened(w_BTH, {2: self.heads}), positions_BT, topk)

    def rows(self, k_BSK) -> Rows | Scaled:
        """Cache rows of these keys, rounded to ``dtype``; float8 ones have a factor each."""
        k_BSK = self.filled(jnp.asarray(k_BSK, jnp.float32))
        if self.dtype != FLOAT8:
            return Rows.of(k_BSK.astype(self.dtype))
        k_BSK = np.asarray(k_BSK)
        factors = np.abs(k_BSK).max(-1, keepdims=True)
        factors = np.where(factors == 0, np.float32(1), factors)
        return Scaled(Rows.of(jnp.asarray(k_BSK / factors, FLOAT8)), Rows.of(jnp.asarray(factors)))


def widened(x, sizes: Mapping[int, int]):
    """Zeros behind, up to these sizes of axes."""
    widths = [(0, 0)] * x.ndim
    for axis, size in sizes.items():
        widths[axis] = 0, size - x.shape[axis]
    return jnp.pad(x, widths)


def wide(x) -> np.ndarray:
    """What an array or cache rows hold, in float64."""
    if isinstance(x, Scaled):
        return wide(x.codes) * wide(x.factors)
    return np.asarray(x.whole() if isinstance(x, Rows) else x, np.float64)


@dataclass(frozen=True, eq=False)
class Latent(Implementation):
    """One implementation of latent attention, dense (`mla.mla`) and sparse (`dsa.attend`).

    Attributes:
      dense, sparse: names in the tables of `mla` and `dsa.attend`, where ``name`` is not both.
      heads, latent, rope: sizes that reach a kernel; nope and value sizes do not.
      limit: of outputs against float64, relative to the largest.
      cosine: the least of the angle to float64; None where ``limit`` says enough.
      blocking: between block sizes, chunk sizes and forms.
    """

    dense: str | None = None
    sparse: str | None = None
    heads: int = 3
    latent: int = 16
    rope: int = 4
    limit: float = 1e-5
    cosine: float | None = None
    blocking: float = 1e-6

    NOPE, VALUE = 8, 6
    TABLES = LATENT, KERNELS, [(mla, "IMPLEMENTATIONS"), (dsa, "ATTEND_IMPLEMENTATIONS")]

    def embed(self, kernel, q_BTHC, rows, where, *, scale, width):
        heads = q_BTHC.shape[2]
        split = lambda x: (x[..., :width], x[..., width:])  # noqa: E731

        def wider(x):
            latent, rope = split(x)
            parts = widened(latent, {-1: self.latent}), widened(rope, {-1: self.rope})
            return jnp.concatenate(parts, -1)

        q_BTHC, rows_BSC = widened(wider(q_BTHC), {2: self.heads}), wider(rows.whole())
        if where[0] == "indices":  # a row that fills a tile is no row of the cache
            where = where[0], jnp.where(where[1] < rows.shape[1], where[1], -1)
        o_BTHW, lse_BTH = kernel(
            q_BTHC, Rows.of(self.filled(rows_BSC)), where, scale=scale, width=self.latent
        )
        return o_BTHW[:, :, :heads, :width], lse_BTH[:, :, :heads]

    @property
    def scale(self) -> float:
        return (self.NOPE + self.rope) ** -0.5

    def options(self, kind, sizes) -> dict[str, int]:
        options = super().options(sizes)
        if kind == "sparse":
            options.pop("key_block", None)
        return options


def stacked(rows: Rows | Scaled, page: int | None, seed: int = 0) -> Rows | Scaled:
    """The same rows as sequences 2, 3, .. of layer 1 of a stack: in pages of ``page`` rows, in any
    order, or one entry a sequence (None). All else holds NaN.

    Entries of the table whose pages hold only NaN rows are out of range. Made on the host: no shape
    is compiled for it.
    """
    if isinstance(rows, Scaled):
        return Scaled(stacked(rows.codes, page, seed), stacked(rows.factors, page, seed))
    batch, keys, width = rows.shape
    data = np.asarray(rows.stack)
    assert data.shape == rows.shape  # no stack, no pages yet
    if page is None:
        stack = np.full((3, batch + 3, keys, width), np.nan, data.dtype)
        stack[1, 2:-1] = data
        return Rows(jnp.asarray(stack), jnp.int32(1), 2, batch)
    assert keys % page == 0
    rng, count = np.random.default_rng(seed), keys // page
    entries = rng.permutation(batch * count + 5)[: batch * count].reshape(batch, count)
    stack = np.full((3, batch * count + 5, page, width), np.nan, data.dtype)
    stack[1, entries] = data.reshape(batch, count, page, width)
    unused = np.isnan(data.astype(np.float32)).reshape(batch, count, -1).all(-1)
    entries = np.where(unused, rng.choice([-1, -(2**31), 2**31 - 1, 10**6], entries.shape), entries)
    table = np.concatenate([np.full((2, count), -7), entries, np.full((1, count), 2**30)])
    return Rows(jnp.asarray(stack), jnp.int32(1), 2, batch, jnp.asarray(table, jnp.int32))


def check_sizes(jaxpr, limit: int, views: Collection[tuple[int, ...]] = ()) -> None:
    """Nothing that is made has ``limit`` elements or an axis past int32, inner jaxprs included.

    ``views`` are shapes of caches, which may pass through.
    """
    for equation in jaxpr.eqns:
        for made in (v.aval for v in equation.outvars):
            shape = getattr(made, "shape", ())
            assert shape in views or math.prod(shape) < limit, f"{equation.primitive}: {made}"
            assert max(shape, default=0) < 2**31, f"{equation.primitive}: {made}"
        parameters = list(equation.params.values())
        for inner in jax.tree.leaves(parameters, is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                check_sizes(inner, limit, views)


def plain_selection(spare: int = 3):
    """A stand-in for a kernel: more places than topk, by position, what is absent behind."""

    def select(q_BTHK, rows, w_BTH, positions_BT, topk):
        sizes = {"query_block": 3, "key_block": min(7, rows.shape[1])}
        rank, at = xla.streamed(q_BTHK, rows, w_BTH, positions_BT, topk, **sizes)
        late = jnp.where(rank == -jnp.inf, xla.ABSENT, at)
        at, rank = jax.lax.sort((late, rank), num_keys=1)
        widths = [(0, 0), (0, 0), (0, spare)]
        rank = jnp.pad(rank, widths, constant_values=-jnp.inf)
        return rank, jnp.pad(at, widths, constant_values=7)

    return select


def plain_latent(key_block: int = 512):
    """A stand-in for a kernel: the contract of `ops.mla.latent.LATENT` from portable parts."""

    def attention(q_BTHC, rows, where, *, scale, width):
        (kind, value), keys = where, rows.shape[1]

        def piece(k_BXSC, seen_BTS):
            mask_BTXS = seen_BTS[:, :, None]
            return blocks.partial_attention(q_BTHC, k_BXSC, k_BXSC[..., :width], mask_BTXS, scale)

        def step(total, start, fresh_S):
            at_S = start + jnp.arange(fresh_S.shape[0], dtype=jnp.int32)
            seen_BTS = (at_S <= value[..., None]) & fresh_S
            k_BSC = jnp.where(seen_BTS.any(1)[..., None], rows.block(start, fresh_S.shape[0]), 0)
            return blocks.merge(total, piece(k_BSC[:, None], seen_BTS))

        if kind == "positions":
            none = blocks.empty_partial(q_BTHC.shape[:3], width)
            total = blocks.over_keys(step, none, keys, min(key_block, keys), value.max())
        else:
            seen_BTk = (value >= 0) & (value < keys)
            k_BTkC = rows.take(jnp.where(seen_BTk, value, 0))
            total = piece(jnp.where(seen_BTk[..., None], k_BTkC, 0), seen_BTk)
        return blocks.normalise(total), total.top_XM + jnp.log(total.sum_XM)

    return attention


# A new implementation is one more line in these; interpreted kernels name their real device, and
# the sizes that they take. Exactness of a selection has no limit: scores are exact numbers.

SELECTIONS = {
    "streamed": Selection(
        "streamed",
        blocks=({"query_block": 4, "key_block": 32}, {"query_block": 3, "key_block": 7},
                {"query_block": 3, "key_block": 1}),
    ),
    "streamed-bfloat16": Selection("streamed", jnp.bfloat16, heads=32, width=128),
    "streamed-float8": Selection("streamed", FLOAT8),
    "stand-in": Selection(
        "plain", device="plain", entry=plain_selection, heads=8, width=128
    ),
    "stand-in-float8": Selection("plain", FLOAT8, device="plain", entry=plain_selection),
}  # fmt: skip
# Measured: 7.5e-7 against float64, 5.1e-7 between block sizes, 1.6e-7 between batches; in bfloat16
# 6.9e-3, 2.8e-3 and 0, and cosines of 1 - 8e-6 for outputs, 1 - 2.3e-5 for gradients.
LATENT_BLOCKS = tuple({"query_block": t, "key_block": s} for t, s in ((5, 8), (16, 300), (37, 64)))
BF16 = {"dtype": jnp.bfloat16, "limit": 1e-2, "cosine": 0.9999, "blocking": 1e-2}
FORMS = {"absorbed": "gathered", "expanded": "masked"}
LATENTS = {
    **{
        f"{dense}-{sparse}": Latent(dense, dense=dense, sparse=sparse, blocks=LATENT_BLOCKS)
        for dense, sparse in FORMS.items()
    },
    **{
        f"{dense}-{sparse}-bfloat16": Latent(
            dense, dense=dense, sparse=sparse, blocks=LATENT_BLOCKS, **BF16
        )
        for dense, sparse in FORMS.items()
    },
    "stand-in": Latent("plain", device="plain", entry=plain_latent, heads=16, latent=128, rope=64),
    "stand-in-bfloat16": Latent("plain", device="plain", entry=plain_latent, **BF16),
}

# The kernels of a device, run through whole models (tests/oracle, with sizes of their own).
KERNELS_OF = {"stand-in": (SELECTIONS["stand-in"], LATENTS["stand-in"])}
