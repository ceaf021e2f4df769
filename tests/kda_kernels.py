"""The implementations of `gated_kda` and `kda_decode` under test, and inputs of their size."""

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from unittest import mock

import jax.numpy as jnp
import numpy as np

from k3jax.ops import target
from k3jax.ops.kda import decode, gated, mosaic_tpu_chunked, mosaic_tpu_decode

D = 128
EPS = 1e-5
BOUNDS = {-6.0: ["bound_-6"], -20.0: ["bound_-20"], None: ["softplus"]}  # regimes beyond -5


@dataclass(frozen=True)
class Implementation:
    """One entry of the contract.

    Attributes:
      name: in both tables of implementations.
      dtype: of the floating inputs.
      bounds: lower bounds of the gate that it takes, besides -5.
      output, state: limits of `gated_kda` relative to the largest value of a row.
      alike: of both where keys are nearly alike, if others than those.
      step: of output and state of `kda_decode`.
      device: device kind that it is told to run on; None for this one.
      patches: what runs it here: [(table of implementations, its entry)].
    """

    name: str
    dtype: type = jnp.float32
    bounds: tuple[float | None, ...] = tuple(BOUNDS)
    output: float = 1e-5
    state: float = 1e-5
    alike: float | None = None
    step: float = 3e-6
    device: str | None = None
    patches: Callable[[], list] = list

    @contextlib.contextmanager
    def running(self):
        with contextlib.ExitStack() as stack:
            for table, kernel in self.patches():
                stack.enter_context(mock.patch.dict(table, {self.name: kernel}))
            if self.device is not None:
                stack.enter_context(
                    mock.patch.object(target, "device_kind", return_value=self.device)
                )
            yield


def interpreted(interpret=True):
    prefill = functools.partial(mosaic_tpu_chunked.gated_kda, interpret=interpret)
    step = functools.partial(mosaic_tpu_decode.kda_decode, interpret=interpret)
    return [
        (gated.IMPLEMENTATIONS, gated.with_xla_gradient(prefill)),
        (decode.IMPLEMENTATIONS, step),
    ]


# Measured: xla 9.8e-7 output and 2.0e-6 state, mosaic_tpu 7.6e-7 and 2.1e-6, all with equal keys at
# T = 4,096; a step 8.6e-7. Outputs in bfloat16 are rounded once (2^-8): 3.7e-3. In bfloat16 a last
# bit of the convolution that rounds the other way moves a step by up to 6.2e-4.
TPU = {"device": "TPU v5", "patches": interpreted}
IMPLEMENTATIONS = {
    "xla": Implementation("xla"),
    "mosaic_tpu": Implementation("mosaic_tpu", **TPU),
    "mosaic_tpu-bfloat16": Implementation(
        "mosaic_tpu", jnp.bfloat16, output=4e-3, step=4e-3, **TPU
    ),
}


def wide(x):
    return np.asarray(x, np.float64)


def logit(p):
    """Within +-60: the sigmoid of that is 0 or 1 for every purpose."""
    with np.errstate(divide="ignore"):
        return np.clip(np.log(p) - np.log1p(-p), -60, 60)


def raw(inputs, dtype, lower_bound=-5.0):
    """Raw inputs of `gated_kda` from normed ones: z and b from g and beta by the gate's inverse."""
    q, k, v, g, beta, state = (wide(x) for x in inputs)
    rng = np.random.default_rng(0)
    heads, k_dim = q.shape[2:]
    A_log = np.log(rng.uniform(0.5, 2, heads)).astype(np.float32)
    dt_bias = rng.standard_normal((heads, k_dim)).astype(np.float32)
    if lower_bound is None:
        rate = -g / np.exp(wide(A_log))[:, None]
        gate = rate + np.log(-np.expm1(-rate))  # inverse of softplus
    else:
        gate = logit(g / lower_bound) / np.exp(wide(A_log))[:, None]
    narrow = [np.asarray(jnp.asarray(x, dtype)) for x in (3 * q, 2 * k, v, gate - dt_bias)]
    b = np.asarray(jnp.asarray(logit(beta), dtype))
    return (*narrow, b, A_log, dt_bias, state.astype(np.float32))


def decode_inputs(rng, dtype, batch, heads, layers=None):
    """((qkv, z, b, gate), (conv, A_log, dt_bias, norm), state, tails) of `kda_decode`."""
    P, lead = heads * D, () if layers is None else (layers,)
    narrow = lambda *shape: np.asarray(jnp.asarray(rng.standard_normal(shape), dtype))  # noqa: E731
    f32 = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    token = (
        tuple(narrow(batch, P) for _ in range(3)), narrow(batch, heads, D), narrow(batch, heads),
        narrow(batch, heads, D),
    )  # fmt: skip
    weights = (tuple(f32(P, 4) for _ in range(3)), f32(heads) / 2, f32(heads, D), f32(D))
    return token, weights, f32(*lead, batch, heads, D, D), narrow(*lead, 3, batch, 3, P)
