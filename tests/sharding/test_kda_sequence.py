"""KDA with the rows of a sequence spread over a mesh axis equals one device."""

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from k3jax.errors import InputError
from k3jax.ops import kda as kda_op
from k3jax.ops.kda import xla
from k3jax.ops.short_conv import short_conv
from sharding.report import hlo_collectives

SEQUENCE_FP32 = 1e-5  # relative to the largest entry, measured 2.6e-6
BATCH, HEADS, K, V, W, BOUND = 3, 2, 16, 24, 4, -5.0


def mesh(**axes):
    types = (jax.sharding.AxisType.Auto,) * len(axes)
    devices = jax.devices()[: int(np.prod(list(axes.values())))]
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=types, devices=devices)


@functools.cache
def draw(length, heads=HEADS):
    """Row 0 remembers all rows, row 1 has equal keys, row 2 forgets at once."""
    rng = np.random.default_rng(length)
    normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    q, k, v, z = (normal(BATCH, length, heads, n) for n in (K, K, V, K))
    b = normal(BATCH, length, heads)
    z[0], b[0] = z[0] - 9, b[0] - 5
    z[1], k[1], b[1] = z[1] - 12, k[1, :1] + 0.01 * k[1], 6
    gates = np.log(rng.uniform(1, 2, heads)).astype(np.float32), normal(heads, K)
    return (q, k, v, z, b), gates, normal(BATCH, heads, V, K)


def spread(mesh, heads=None):
    """`sequence_parallel_kda` over the axis "seq" of a mesh, heads over another axis."""
    rows, state = P(None, "seq", heads), P(None, heads)

    def run(tokens, gates, state, lengths_B):
        return kda_op.sequence_parallel_kda(
            *tokens, *gates, state, axis="seq", lower_bound=BOUND, lengths_B=lengths_B
        )

    ins = (rows, P(heads), state, P())
    out = (rows, state)
    return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=ins, out_specs=out, check_vma=False))


@jax.jit
def one_device(tokens, gates, state, lengths_B):
    return kda_op.gated_kda(*tokens, *gates, state, lower_bound=BOUND, lengths_B=lengths_B)


def check(got, want):
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape
        for row in range(BATCH):
            error = np.abs(np.asarray(a[row]) - np.asarray(b[row])).max()
            assert error <= SEQUENCE_FP32 * np.abs(np.asarray(b[row])).max()  # false for a NaN


def poison(tokens, lengths):
    """NaN behind each row's length."""
    behind = np.arange(tokens[0].shape[1]) >= np.asarray(lengths)[:, None]
    return [np.where(behind.reshape(*behind.shape, *[1] * (x.ndim - 2)), np.float32(np.nan), x)
            for x in tokens]  # fmt: skip


@pytest.mark.parametrize("devices", [1, 2, 3, 5, 7, 8])
def test_equal_to_one_device(devices):
    """70 rows a device: two chunks, the second one almost empty."""
    length = 70 * devices
    tokens, gates, state = draw(length)
    run = spread(mesh(seq=devices))
    for lengths in ([length] * BATCH, [length - 3, length // 2, 1], [(length + 70) // 2, 0, 70]):
        lengths_B = jnp.asarray(lengths, jnp.int32)
        padded = poison(tokens, lengths)
        got = run(padded, gates, state, lengths_B)
        check(got, one_device(padded, gates, state, lengths_B))
        for row, n in enumerate(lengths):
            assert not np.asarray(got[0][row, n:]).any()
            if n == 0:
                assert np.asarray(got[1][row]).tobytes() == state[row].tobytes()


def test_the_state_crosses_devices():
    """What the first device reads changes what the last one gives; and nothing goes back."""
    tokens, gates, state = draw(560)
    run = spread(mesh(seq=8))
    full = jnp.full((BATCH,), 560, jnp.int32)
    base = np.asarray(run(tokens, gates, state, full)[0])
    first = [x.copy() for x in tokens]
    first[2][:, 0] += 100
    changed = np.asarray(run(first, gates, state, full)[0])
    assert np.abs(changed[0, 490:] - base[0, 490:]).max() > 1e-3
    last = [x.copy() for x in tokens]
    last[2][:, 490:] += 1
    changed = np.asarray(run(last, gates, state, full)[0])
    assert changed[:, :490].tobytes() == base[:, :490].tobytes()


def test_with_heads_over_another_axis():
    tokens, gates, state = draw(280, 4)
    full = jnp.full((BATCH,), 270, jnp.int32)
    both = mesh(model=2, seq=4)
    run = spread(both, "model")
    check(run(tokens, gates, state, full), one_device(tokens, gates, state, full))
    text = run.lower(tokens, gates, state, full).compile().as_text()
    assert {(c.kind, c.axes) for c in hlo_collectives(text, both)} == {
        ("collective-permute", ("seq",)),
        ("all-reduce", ("seq",)),
    }


@pytest.mark.parametrize(("devices", "rounds"), [(8, 3), (5, 3), (2, 1)])
def test_collectives(devices, rounds):
    """ceil(log2 D) permutes of maps, one sum of the last state, and nothing with rows."""
    over = mesh(seq=devices)
    arguments = (*draw(70 * devices), jnp.full((BATCH,), 70, jnp.int32))
    text = spread(over).lower(*arguments).compile().as_text()
    found = hlo_collectives(text, over)
    assert Counter(c.kind for c in found) == {"collective-permute": rounds, "all-reduce": 1}
    for one in found:
        rows = V + K if one.kind == "collective-permute" else V
        assert one.results == (("f32", (BATCH, HEADS, rows, K)),)


def test_a_long_part_keeps_no_map_a_chunk():
    """131,072 rows of 96 heads: the maps of all chunks would be 6.4e9 floats."""
    T, H, K = 131072, 96, 128
    spec = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)  # noqa: E731
    rows = spec(1, T, H, K)
    jaxpr = jax.make_jaxpr(xla.span_map)(rows, rows, rows, spec(1, T, H))
    outside = max(v.aval.size for eqn in jaxpr.eqns for v in eqn.outvars)
    assert outside <= 1.01 * T * H * K  # the inputs, padded
    (scan,) = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan")
    inside = max(v.aval.size for eqn in scan.params["jaxpr"].eqns for v in eqn.outvars)
    assert inside <= 2 * K // 64 * xla.GROUP_ELEMENTS  # E of the chunks of one group


def conv_inputs(length, channels=6, dtype=jnp.float32):
    rng = np.random.default_rng(length)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)  # noqa: E731
    qkv = tuple(draw(BATCH, length, channels).astype(dtype) for _ in range(3))
    return (
        qkv,
        tuple(draw(channels, W) for _ in range(3)),
        draw(3, BATCH, W - 1, channels).astype(dtype),
    )


def conv(mesh):
    def run(qkv, filters, tails, lengths_B):
        return kda_op.sequence_parallel_conv(qkv, filters, tails, axis="seq", lengths_B=lengths_B)

    rows = P(None, "seq")
    ins, out = (rows, P(), P(), P()), (rows, P())
    return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=ins, out_specs=out, check_vma=False))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("devices", [1, 3, 8])
def test_convolution(devices, dtype):
    length = 3 * devices  # the fewest rows a device
    qkv, filters, tails = conv_inputs(length, dtype=dtype)
    run = conv(mesh(seq=devices))
    for lengths in ([length] * BATCH, [length - 1, length // 2, 0], [1, 2, 3]):
        padded = tuple(jnp.asarray(x) for x in poison(qkv, lengths)) if dtype == np.float32 else qkv
        lengths_B = jnp.asarray(lengths, jnp.int32)
        y, after = run(padded, filters, tails, lengths_B)
        for i in range(3):
            want, want_tail = jax.jit(short_conv)(padded[i], filters[i], tails[i], lengths_B)
            np.testing.assert_array_equal(np.asarray(y[i]), want)
            np.testing.assert_array_equal(np.asarray(after[i]), want_tail)


def test_one_permute_for_the_convolutions():
    over = mesh(seq=8)
    qkv, filters, tails = conv_inputs(80)
    lengths_B = jnp.full((BATCH,), 80, jnp.int32)
    text = conv(over).lower(qkv, filters, tails, lengths_B).compile().as_text()
    found = hlo_collectives(text, over)
    assert Counter(c.kind for c in found) == {"collective-permute": 1, "all-reduce": 1}
    assert {c.results[0][1][-2] for c in found} == {W - 1}


def test_without_lengths_and_state():
    over = mesh(seq=2)
    tokens, gates, _ = draw(140)
    run = functools.partial(kda_op.sequence_parallel_kda, axis="seq", lower_bound=BOUND)
    rows = P(None, "seq")
    got = jax.jit(
        jax.shard_map(
            lambda tokens, gates: run(*tokens, *gates),
            mesh=over, in_specs=(rows, P()), out_specs=(rows, P()), check_vma=False,
        )
    )(tokens, gates)  # fmt: skip
    check(got, one_device(tokens, gates, None, None))


def test_refusals():
    over = mesh(seq=8)
    qkv, filters, tails = conv_inputs(16)
    with pytest.raises(InputError, match="2 rows a device, expected at least 3"):
        conv(over)(qkv, filters, tails, jnp.full((BATCH,), 16, jnp.int32))
    tokens, gates, state = draw(560)
    with pytest.raises(InputError, match=r"lengths is int32\[2\], expected int32\[3\]"):
        spread(over)(tokens, gates, state, jnp.full((2,), 16, jnp.int32))
    with pytest.raises(InputError, match=r"state is .*expected float32\[3, 2, 24, 16\]"):
        spread(over)(tokens, gates, np.zeros((3, 2, 16, 24), np.float32), None)
