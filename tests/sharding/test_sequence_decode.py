"""Decode over a cache whose rows are striped over eight devices: the positions and outputs of one
device, with kernels as without; and what it communicates."""

import contextlib
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dsa_kernels import LATENTS, SELECTIONS
from jax.sharding import PartitionSpec as P

from k3jax.layers.tokens import Stripe
from k3jax.ops import dsa, mla
from sharding import report
from sharding.parallel import Parallel

FP32 = 1e-5  # of outputs, relative to the largest
B, T, TOPK = 8, 2, 16
HI, KI = 4, 8  # of the indexer
H, N, R, C, V = 8, 8, 4, 16, 6
SCALE = (N + R) ** -0.5

# Axes of the mesh, and what they do: x splits sequences, y heads; rows are striped over "rows".
LAYOUTS = {
    "sequences": ({"x": 8}, "x"),
    "heads": ({"y": 8}, "y"),
    "both": ({"x": 4, "y": 2}, "xy"),
    "sequences-of-both": ({"x": 4, "y": 2}, "x"),
}


def roles(name):
    sizes, striped = LAYOUTS[name]
    has = lambda axis: (axis,) if axis in sizes else ()  # noqa: E731
    return sizes, Parallel(batch=has("x"), tensor=has("y"), cache_sequence=tuple(striped))


def inputs(keys, seed=0):
    """(index q, k, w), (q, cache, w_k, w_v) and positions; sequences end anywhere, one is empty."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    index = normal(B, T, HI, KI), normal(B, keys, KI), normal(B, T, HI)
    index[1][3] = index[1][3, :1]  # one sequence of equal scores
    index[1][4, ::2] = index[1][4, :1]  # and one of half equal ones
    attention = (
        *(2 * normal(B, T, H, N + R), normal(B, keys, C + R)),
        *(normal(H, N, C) / 4, normal(H, V, C) / 4),
    )
    ends = rng.integers(0, keys - 1, B)
    ends[0], ends[1] = keys - 2, 3
    positions = ends[:, None] + np.arange(T)
    positions[5] = -1
    unused = np.arange(keys) > positions.max(1, keepdims=True)
    index[1][unused] = attention[1][unused] = np.nan
    return index, attention, positions.astype(np.int32)


def striped(rows, sizes, parallel):
    """Rows in the order of the devices that hold them: 0, n, 2n, .., then 1, n + 1, .."""
    count = math.prod(sizes[axis] for axis in parallel.cache_sequence)
    return rows.reshape(B, -1, count, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)


def step(parallel, length, index, attention, positions, *, topk=TOPK, dense=True):
    """One global layer's selection and attention on one device, as `GlobalAttention` calls them:
    (selected positions, sparse output, dense output)."""
    stripe, (index_q, index_k, w) = Stripe(parallel), index
    everyone = stripe.sequences
    visible = stripe.visible(everyone(positions))
    rank, at = dsa.candidates(everyone(index_q), index_k, everyone(w), visible, topk)
    kept = dsa.keep(rank, stripe.position(at), topk, length, stripe.all_reduce)
    spread = mla.Spread(stripe.heads, stripe.merge(attention[2].shape[-1]))
    options = {"scale": SCALE, "spread": spread}
    outputs = [dsa.attend(*attention, jnp.where(kept, at, -1), **options)]
    if dense:
        outputs.append(mla.mla(*attention, visible, **options))
    return jnp.where(kept, stripe.position(at), -1), *outputs


def over_devices(name, length, mesh=None, **options):
    """(the step over the devices of a layout, their mesh)."""
    sizes, parallel = roles(name)
    x, y = parallel.batch or None, parallel.tensor or None
    # Where the rows of a sequence are on all devices of x, so are all sequences.
    rows = P(None if "x" in parallel.cache_sequence else x, parallel.cache_sequence)
    types = (jax.sharding.AxisType.Auto,) * len(sizes)
    mesh = mesh or jax.make_mesh((*sizes.values(),), (*sizes,), axis_types=types)
    heads = P(x, None, y)
    run = jax.shard_map(
        functools.partial(step, parallel, length, **options),
        mesh=mesh,
        in_specs=((P(x), rows, P(x)), (heads, rows, P(y), P(y)), P(x)),
        out_specs=(
            P(rows[0], None, parallel.cache_sequence),
            *[heads] * (1 + options.get("dense", 1)),
        ),
        check_vma=False,
    )
    return jax.jit(run), mesh


@functools.cache
def one_device(keys):
    (index_q, index_k, w), attention, positions = jax.tree.map(jnp.asarray, inputs(keys))
    selected = dsa.select(index_q, index_k, w, positions, TOPK)
    sparse = dsa.attend(*attention, selected, scale=SCALE)
    return selected, sparse, mla.mla(*attention, positions, scale=SCALE)


def error(got, want):
    return np.abs(np.asarray(got) - np.asarray(want)).max() / np.abs(np.asarray(want)).max()


@contextlib.contextmanager
def kernels(on: bool):
    """With stand-ins for kernels, which "auto" takes."""
    with contextlib.ExitStack() as stack:
        for table in (SELECTIONS, LATENTS) if on else ():
            stack.enter_context(table["stand-in"].running())
        yield


@pytest.mark.parametrize("through_kernels", [False, True])
@pytest.mark.parametrize("name", LAYOUTS)
def test_positions_and_outputs_are_those_of_one_device(name, through_kernels):
    keys = 192
    index, attention, positions = inputs(keys)
    sizes, parallel = roles(name)
    order = functools.partial(striped, sizes=sizes, parallel=parallel)
    index, attention = list(index), list(attention)
    index[1], attention[1] = order(index[1]), order(attention[1])
    with kernels(through_kernels):
        run, _ = over_devices(name, keys)
        selected, sparse, dense = run(tuple(index), tuple(attention), positions)
    want, *outputs = one_device(keys)
    selected = np.asarray(selected)
    for b, t in np.ndindex(B, T):
        chosen = sorted(p for p in selected[b, t].tolist() if p >= 0)
        assert chosen == [p for p in np.asarray(want)[b, t].tolist() if p >= 0]
        assert len(chosen) == min(TOPK, positions[b, t] + 1)
    for got, exact in zip((sparse, dense), outputs, strict=True):
        assert error(got, exact) < FP32
        assert not np.asarray(got)[5].any()


def shapes(batch, length, index=(HI, KI), attention=(H, N, R, C, V), dtype=jnp.float32):
    """Arguments of a step with one token a sequence, as shapes."""
    (heads_i, width_i), (heads, nope, rope, latent, value) = index, attention
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=dtype)
    float32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    return (
        (
            *(shape((batch, 1, heads_i, width_i)), shape((batch, length, width_i))),
            float32((batch, 1, heads_i)),
        ),
        (
            *(shape((batch, 1, heads, nope + rope)), shape((batch, length, latent + rope))),
            *(shape((heads, nope, latent)), shape((heads, value, latent))),
        ),
        jax.ShapeDtypeStruct((batch, 1), jnp.int32),
    )


@pytest.mark.parametrize("through_kernels", [False, True])
@pytest.mark.parametrize("name", LAYOUTS)
def test_no_collective_moves_a_cache(name, through_kernels):
    """In compiled HLO: what is communicated is the same whatever the context, and far smaller than
    a device's share of the smaller cache."""
    found = {}
    for length in (4096, 8192):  # both need 4 digits of a position
        with kernels(through_kernels):
            run, mesh = over_devices(name, length)
            arguments = shapes(B, length)
            listed = report.collectives(jax.make_jaxpr(run)(*arguments))
            text = run.lower(*arguments).compile().as_text()
        collectives = report.hlo_collectives(text, mesh)
        assert report.unlisted(collectives, listed) == []
        found[length] = sorted((c.kind, c.axes, c.results) for c in collectives)
        largest = max(math.prod(shape) for c in collectives for _, shape in c.results)
        share = B * length * KI // 8
        assert 10 * largest < share, (largest, share)
    assert found[4096]
    assert found[4096] == found[8192]


def bytes_of_a_step(parallel, sizes, batch, length, index, attention):
    """What one device sends for one token a sequence, from the ring costs of the collectives."""
    (heads_i, width_i), (heads, _, rope, latent, _) = index, attention
    n = math.prod(sizes[axis] for axis in parallel.cache_sequence)
    n_x = math.prod(sizes[axis] for axis in parallel.sequence_batch)
    n_y = math.prod(sizes[axis] for axis in parallel.sequence_tensor)
    x, y, both = ((k - 1) / k for k in (n_x, n_y, n))
    digits = 32 // 4 + -(-length.bit_length() // 4)
    counts = 2 * both * batch * 4 * (15 * digits + 1)
    mine = heads // n_y  # of a device's own
    index_bytes = x * batch * (2 * heads_i * width_i + 4 * heads_i + 4)
    queries = 2 * batch * (latent + rope) * (x * mine + y * heads)
    tops = 2 * both * 4 * batch * heads
    sums = 4 * (latent + 1) * heads * (x * batch + y * batch / n_x)
    return index_bytes + counts + queries + tops + sums


K31 = {"index": (32, 128), "attention": (96, 128, 64, 512, 128)}


@pytest.mark.parametrize(("name", "kibibytes"), [("heads", 265), ("sequences", 272), ("both", 271)])
def test_a_decode_step_at_full_size_sends_kilobytes(name, kibibytes):
    """By shapes: a layer of K3.1 with 1,048,576 tokens a sequence, 2,048 selected, over 8 devices.

    A device's share of one sequence's cache is 176 MiB. Sent are, for each sequence, queries in the
    latent space (bfloat16) and partial sums over rows (float32), some 270 KiB at 96 heads, and 1.5
    KiB of counts for the selection.
    """
    sizes, parallel = roles(name)
    batch = sizes.get("x", 1)
    types = (jax.sharding.AxisType.Auto,) * len(sizes)
    mesh = jax.sharding.AbstractMesh((*sizes.values(),), (*sizes,), axis_types=types)
    run, _ = over_devices(name, 2**20, mesh, topk=2048, dense=False)
    arguments = shapes(batch, 2**20, **K31, dtype=jnp.bfloat16)
    listed = report.collectives(jax.make_jaxpr(run)(*arguments))
    sent = sum(c.total_bytes for c in listed)
    formula = bytes_of_a_step(parallel, sizes, batch, 2**20, **K31)
    print(name, f"{sent} bytes for {batch} sequences, {sent / batch / 1024:.1f} KiB each")
    assert sent == pytest.approx(formula, rel=1e-3)
    assert sent / batch / 1024 == pytest.approx(kibibytes, rel=1e-2)
