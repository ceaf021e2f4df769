"""The kernels of the routed experts and of a depth read compile for TPUs at K3's sizes, with
bounded memory and without a copy of weights or of a bank.

The whole model with them is in test_layouts_aot.py.
"""

import re

import jax.numpy as jnp
import pytest
from tpu_programs import LARGE, array, compiled, one_device

from k3jax.ops import attention_residuals
from k3jax.ops.grouped_matmul import experts
from k3jax.quantization.mxfp4 import GROUP, MXFP4

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("libtpu")]

K, L, F, D = 16, 3584, 3072, 7168
LAYERS = 22  # of a stack: the periods
SHARE, MANY = 14, 56  # experts of one device among 64, and of one among 16
ONE_EXPERT = 3 * L * F * 2  # bytes in bfloat16: 66 MB
# Bytes of temporaries: latents and activations of `mosaic_tpu.ROWS` sorted rows at most, and the
# map of tiles. Measured at most, on v5p, v6e and TPU7x: 19.0, 1.4 and 18.0 MB; 62.3, 32.9 and
# 60.5 MB.
DECODE, PREFILL = 25e6, ONE_EXPERT
READ = 0.2e6  # measured: 0.1 MB at most


@pytest.fixture(params=LARGE, scope="module")
def place(request):
    return one_device(request.param)


def routed(place, tokens, count, activations=None):
    """Temporary bytes of one layer's experts, as a step of the model calls them."""

    def packed(out, width):
        parts = width // 2, width // GROUP
        return MXFP4(*(array(LAYERS, count, out, part, dtype=jnp.uint8) for part in parts))

    arguments = [
        array(tokens, L), array(tokens, K, dtype=jnp.int32), array(tokens, K, dtype=jnp.float32),
        packed(2 * F, L), packed(L, F), array(dtype=jnp.int32),
    ]  # fmt: skip

    def step(z, ids, weights, w13, w2, layer):
        options = {"situ_beta": 4.0, "situ_linear_beta": 25.0, "out_dtype": jnp.float32}
        return experts(z, ids, weights, w13, w2, layer=layer, activations=activations, **options)

    done, memory = compiled(place, step, arguments, kernels=2, free=(3, 4))
    text = done.as_text()
    assert "experts_up" in text
    assert "experts_down" in text
    # Neither codes nor scales are made anew.
    assert not re.findall(r" u8\[[\d,]+\]\S* (?:copy|fusion|transpose|dynamic-slice)\(", text)
    return memory.temp_size_in_bytes


def test_decode(place):
    """64 tokens, which one device of 64 sees in a decode step; tiles of 16 rows."""
    assert routed(place, 64, SHARE) < DECODE


@pytest.mark.parametrize(("tokens", "count", "form"), [(1024, SHARE, "mxfp8"), (4096, MANY, None)])
def test_prefill(place, tokens, count, form):
    """Tiles of 32 and of 128 rows. Less than one expert in bfloat16."""
    assert routed(place, tokens, count, form) < PREFILL


@pytest.mark.parametrize("tokens", [1, 4096])
def test_depth_read(place, tokens):
    """A float32 copy of nine sources of 4,096 tokens would be 1,057 MB."""
    vectors = [array(D)] * 3

    def step(bank, partial_sum, norm, query, out_norm, count):
        options = {"eps": 1e-5, "out_eps": 1e-5, "weight_after_cast": True}
        return attention_residuals.read(bank, partial_sum, norm, query, out_norm, count, **options)

    arguments = [array(8, 1, tokens, D), array(1, tokens, D), *vectors, array(dtype=jnp.int32)]
    done, memory = compiled(place, step, arguments)
    assert "depth_read" in done.as_text()
    assert memory.temp_size_in_bytes < READ
