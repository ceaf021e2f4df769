"""SiTU against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.ops.situ import IMPLEMENTATIONS, reference, situ

FP32 = 2e-6  # of each value; measured 4.9e-7
BF16 = 1.001 * 2.0**-8  # of each value; one rounding is at most 2**-8, measured 0.99 of it


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
class TestSitu:
    @pytest.mark.parametrize("linear_beta", [25.0, None])
    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
    def test_reference(self, implementation, dtype, linear_beta):
        rng = np.random.default_rng(0)
        gate, up = jnp.asarray(rng.standard_normal((2, 64, 96)) * 8, dtype)
        got = situ(gate, up, 4.0, linear_beta, implementation=implementation)
        assert got.dtype == dtype
        want = reference.situ(gate, up, 4.0, linear_beta)
        error = np.abs(np.asarray(got, np.float64) - want)
        limit = FP32 if dtype == jnp.float32 else BF16
        assert (error <= limit * np.abs(want)).all()

    def test_known_values(self, implementation):
        gate = jnp.array([0.0, 4.0, -4.0, 1000.0, -1000.0])
        up = jnp.array([3.0, 25.0, 25.0, 1000.0, 1000.0])
        got = situ(gate, up, 4.0, 25.0, implementation=implementation)
        t = np.tanh(1.0)
        # the sigmoid takes the raw gate: 1 / (1 + exp(-4)), not of 4 tanh(1)
        want = [0, 100 * t * t / (1 + np.exp(-4)), -100 * t * t / (1 + np.exp(4)), 100, 0]
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7)

    def test_gradient_is_finite_far_out(self, implementation):
        x = jnp.array([-1e4, -50.0, 0.0, 50.0, 1e4])
        gradient = jax.grad(lambda x: situ(x, x, 4.0, 25.0, implementation=implementation).sum())(x)
        assert np.isfinite(gradient).all()


def test_unknown_implementation():
    with pytest.raises(ValueError, match="'cuda' is not one of"):
        situ(jnp.ones(2), jnp.ones(2), 4.0, 25.0, implementation="cuda")
