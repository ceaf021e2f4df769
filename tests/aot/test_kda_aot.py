"""The KDA kernels compile for every TPU generation at K3's sizes, and copy nothing."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from tpu_programs import TOPOLOGIES, array, compiled, kind_of

from k3jax.ops import kda as kda_op
from k3jax.ops import target
from k3jax.ops.kda.packing import num_chunks

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("libtpu")]

D, HEADS, LAYERS, EPS = 128, 96, 4, 1e-5
# Measured: 0.79 MB on a v5p at most (filters and gates of all heads), none elsewhere.
TEMPORARIES = 1e6


def prefill(place, batch, length, heads, dtype=jnp.bfloat16, lower_bound=-5.0):
    """With q, k, v, z and o as projections have them, [B, T, H K]."""
    f32 = partial(array, dtype=jnp.float32)
    wide = array(batch, length, heads * D, dtype=dtype)
    arguments = [
        [wide] * 4, array(batch, length, heads, dtype=dtype), f32(heads), f32(heads, D),
        f32(batch, heads, D, D), array(batch, dtype=jnp.int32),
    ]  # fmt: skip

    def step(qkvz, b, A_log, dt_bias, state, lengths):
        qkvz = [x.reshape(batch, length, heads, D) for x in qkvz]
        o, state = kda_op.gated_kda(
            *qkvz, b, A_log, dt_bias, state, lower_bound=lower_bound, lengths_B=lengths
        )
        return o.reshape(batch, length, -1), state

    return compiled(place, step, arguments)


def test_names_of_generations(place):
    assert kind_of(place) in TOPOLOGIES.values()
    assert target.is_tpu(kind_of(place))


@pytest.mark.parametrize("length", [1, 64, 4096])
@pytest.mark.parametrize("heads", [HEADS, HEADS // 8])
def test_prefill(place, length, heads):
    _, memory = prefill(place, 2, length, heads)
    assert memory.temp_size_in_bytes <= TEMPORARIES


def test_prefill_of_a_million_tokens(place):
    heads = 6 if kind_of(place) == "TPU v5 lite" else 12  # as many as fit in a chip's memory
    _, memory = prefill(place, 1, 1_048_576, heads)
    assert memory.temp_size_in_bytes <= TEMPORARIES


def test_prefill_in_float32_without_a_bound(place):
    _, memory = prefill(place, 1, 1000, 5, jnp.float32, None)
    assert memory.temp_size_in_bytes <= TEMPORARIES


@pytest.mark.parametrize(("length", "sequences"), [(100, 3), (4096, 16)])
@pytest.mark.parametrize("heads", [HEADS, HEADS // 8])
def test_packed_prefill(place, length, sequences, heads):
    """Lengths are traced. Rows move to whole chunks and back, states stay where they are."""
    f32 = partial(array, dtype=jnp.float32)
    arguments = [
        [array(1, length, heads * D)] * 4, array(1, length, heads), f32(heads), f32(heads, D),
        f32(sequences, heads, D, D), array(sequences, dtype=jnp.int32),
    ]  # fmt: skip

    def step(qkvz, b, A_log, dt_bias, state, lengths):
        qkvz = [x.reshape(1, length, heads, D) for x in qkvz]
        o, state = kda_op.gated_kda(
            *qkvz, b, A_log, dt_bias, state, lower_bound=-5.0, packed_lengths_N=lengths
        )
        return o.reshape(1, length, -1), state

    _, memory = compiled(place, step, arguments, donated=(4,))
    assert memory.alias_size_in_bytes >= sequences * heads * D * D * 4
    rows = num_chunks(sequences, length, 64) * 64
    padded = rows * (5 * heads + 1) * D * 2  # q, k, v, z, o, and b on 128 lanes
    # Measured: 1.1 MB more at most, with the table of rows (v5p).
    assert memory.temp_size_in_bytes <= padded + 2 * TEMPORARIES


def test_gradient(place):
    """The forward pass is the kernel, the backward pass the portable form: one program."""
    arguments = [[array(1, 128, 2, D)] * 4, array(1, 128, 2), array(2, D, dtype=jnp.float32)]

    def loss(qkvz, b, dt_bias):
        o, _ = kda_op.gated_kda(*qkvz, b, dt_bias[:, 0], dt_bias, lower_bound=-5.0)
        return jnp.sum(jnp.square(o.astype(jnp.float32)))

    compiled(place, jax.grad(loss, (0, 1, 2)), arguments)


@pytest.mark.parametrize(
    ("batch", "heads"), [(1, HEADS), (256, HEADS), (12, HEADS // 8), (512, HEADS // 8)]
)
def test_decode(place, batch, heads):
    """State and tails of a stack of layers stay where they are."""
    f32 = partial(array, dtype=jnp.float32)
    wide = array(batch, heads * D)
    arguments = [
        [wide] * 3, wide, array(batch, heads), wide, [f32(heads * D, 4)] * 3, f32(heads),
        f32(heads, D), f32(D), f32(LAYERS, batch, heads, D, D),
        array(LAYERS, 3, batch, 3, heads * D), array(batch, dtype=jnp.bool_),
        array(dtype=jnp.int32),
    ]  # fmt: skip

    def step(qkv, z, b, gate, conv, A_log, dt_bias, norm, state, tails, valid, slot):
        z, gate = (x.reshape(batch, heads, D) for x in (z, gate))
        o, state, tails = kda_op.kda_decode(
            tuple(qkv), z, b, gate, tuple(conv), A_log, dt_bias, norm, state, tails,
            lower_bound=-5.0, eps=EPS, valid_B=valid, slot=slot,
        )  # fmt: skip
        return o.reshape(batch, -1), state, tails

    done, memory = compiled(place, step, arguments, donated=(8, 9))
    stack = LAYERS * batch * heads * D * D * 4
    assert memory.alias_size_in_bytes >= stack + LAYERS * 3 * batch * 3 * heads * D * 2
    assert memory.temp_size_in_bytes <= TEMPORARIES
    shape = f"f32[{LAYERS},{batch},{heads},{D},{D}]"
    text = done.as_text()
    assert not [x for x in text.splitlines() if shape in x and (" copy(" in x or "slice(" in x)]
