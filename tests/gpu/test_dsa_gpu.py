"""Selection on a Hopper GPU: `JAX_PLATFORMS=cuda,cpu python -m pytest tests/gpu`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dsa_contract import SelectContract
from dsa_kernels import FLOAT8, Selection

from k3jax.ops import dsa, target
from k3jax.ops.dsa import xla

pytestmark = pytest.mark.skipif(
    not target.is_hopper(jax.devices()[0].device_kind),
    reason="needs a Hopper GPU and JAX_PLATFORMS=cuda,cpu",
)


SIZES = {"heads": 32, "width": 128}
FORMS = {
    "bfloat16": Selection("mosaic_gpu", jnp.bfloat16, tile=8, **SIZES),
    "float8": Selection("mosaic_gpu", FLOAT8, tile=32, **SIZES),
}


@pytest.fixture(params=FORMS.values(), ids=FORMS.keys())
def implementation(request):
    return request.param


class TestSelect(SelectContract):
    pass


KEYS, TOPK = 131072, 2048


def regime(name):
    """Whole numbers, whose scores are exact."""
    rng = np.random.default_rng(0)
    q = rng.integers(-1, 2, (1, 16, 32, 128))
    k = rng.integers(-1, 2, (1, KEYS, 128)) * 2 ** rng.integers(0, 3, (1, KEYS, 1))
    w = rng.integers(-511, 512, (1, 16, 32))
    n = np.arange(KEYS)[None, :, None]
    k = {
        "random": k,
        "constant": np.broadcast_to(k[:, :1], k.shape),
        "half": np.where(n % 2, k[:, :1], k),
        "periodic": np.tile(k[:, : KEYS // 8], (1, 8, 1)),
        "rising": k[:, :1] * (1 + n // 1024),
        "one place": np.where((n // 128) % 1024 == 7, k, 0),
    }[name]
    return jnp.asarray(q, jnp.bfloat16), jnp.asarray(k, jnp.bfloat16), jnp.asarray(w, jnp.float32)


@pytest.mark.parametrize("name", ["random", "constant", "half", "periodic", "rising", "one place"])
def test_regimes(name):
    """Long contexts, where the sample says little of what is to come."""
    q, k, w = regime(name)
    positions = jnp.asarray([[KEYS - 1 - 977 * t for t in range(16)]], jnp.int32)
    got = dsa.select(q, k, w, positions, TOPK, implementation="mosaic_gpu")
    score = np.concatenate(
        [np.asarray(xla.scores(q, k[:, s : s + 16384], w)) for s in range(0, KEYS, 16384)], -1
    )
    for t in range(16):
        legal = score[0, t, : int(positions[0, t]) + 1]
        want = np.sort(np.argsort(-legal, kind="stable")[:TOPK])
        np.testing.assert_array_equal(np.asarray(got)[0, t], want)
