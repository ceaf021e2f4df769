"""How parameters are made, and the one linear map everything uses."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.core import Tracer

from sharding import collectives
from sharding.collectives import Axes


class Packed(nnx.Variable):
    """A parameter that takes no gradient: MXFP4 codes and scales, the router's selection bias."""


class Maker:
    """Makes the parameters of a module: drawn from ``rngs``, or abstract when ``rngs`` is None.

    Every variable carries ``axes``: one logical axis name per dimension.

    Attributes:
      dtype: of the weights that follow the model; float32 ones say so where they are made.
      stack: length of a leading axis on every array, or None. A scan over periods slices it off
        again.
      stack_axis: the logical name of that axis.
      std: standard deviation of the normal initialiser.
    """

    def __init__(
        self,
        rngs: nnx.Rngs | None,
        dtype,
        std: float,
        stack: int | None = None,
        stack_axis: str = "layers",
    ):
        self.rngs, self.dtype, self.std = rngs, jnp.dtype(dtype), std
        self.stack, self.stack_axis = stack, stack_axis

    def stacked(self, length: int, axis: str = "layers") -> Maker:
        return Maker(self.rngs, self.dtype, self.std, length, axis)

    def __call__(
        self,
        shape: tuple[int, ...],
        axes: tuple[str, ...],
        init: str | Callable = "normal",
        *,
        dtype=None,
        kind: type[nnx.Variable] = nnx.Param,
    ) -> nnx.Variable:
        """A variable; ``init`` is "normal", "zeros", "ones" or a function for `draw`."""
        if len(shape) != len(axes):
            raise ValueError(f"axes {axes} do not name the dimensions of {shape}")
        dtype = self.dtype if dtype is None else jnp.dtype(dtype)
        if self.stack is not None:
            shape, axes = (self.stack, *shape), (self.stack_axis, *axes)
        if self.rngs is None:
            return kind(jax.ShapeDtypeStruct(shape, dtype), axes=axes)
        if init == "normal":
            value = self.std * draw(jax.random.normal, self.rngs.params(), shape)
        elif init in ("zeros", "ones"):
            value = jnp.full(shape, 1.0 if init == "ones" else 0.0, jnp.float32)
        elif isinstance(init, str):
            raise ValueError(f"init={init!r}: one of 'normal', 'zeros', 'ones', or a function")
        else:
            value = draw(init, self.rngs.params(), shape)
        return kind(jnp.asarray(value, dtype), axes=axes)


SMALL = 1 << 18  # elements: up to here compiling a draw takes longer than drawing


def draw(sample: Callable, key: jax.Array, shape: tuple[int, ...]):
    """``sample(key, shape)``, bit for bit: numbers each of which depends on its flat place alone.

    A JAX program is compiled for a shape, and a model has a shape a parameter. The first n numbers
    of a longer draw are a draw of n, so small arrays are cut, on the host, from draws of a power of
    two: a random model of five small layers takes 1.8 s of a CPU core, not 5.3. Large draws
    and traced ones are as they are.
    """
    size = math.prod(shape)
    if isinstance(key, Tracer) or size > SMALL:
        return sample(key, shape)
    return np.asarray(sample(key, (1 << max(12, (size - 1).bit_length()),)))[:size].reshape(shape)


def whole(state, axes: Axes):
    """The same state with every array complete along ``embed``, which is stored over ``axes``."""
    if not axes:
        return state

    def gather(variable):
        names = variable.axes
        if "embed" not in names:
            return variable
        value = variable.get_value()
        # A scan has sliced "layers" off the array but not off the names: count from the end.
        dimension = value.ndim - len(names) + names.index("embed")
        return variable.replace(collectives.all_gather(value, axes, dimension))

    return jax.tree.map(gather, state, is_leaf=lambda v: isinstance(v, nnx.Variable))


def linear(x: jax.Array, w: jax.Array | nnx.Variable, *, out_dtype=None) -> jax.Array:
    """``x @ w.T`` for a weight stored [out, in] as in the checkpoint.

    Accumulates in float32. A float32 input asks for HIGHEST, so that no backend drops to tf32 or
    bfloat16 behind the caller's back.
    """
    w = w[...] if isinstance(w, nnx.Variable) else w
    w = w.astype(x.dtype)
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    y = lax.dot_general(
        x,
        w,
        (((x.ndim - 1,), (1,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    return y.astype(out_dtype or x.dtype)
