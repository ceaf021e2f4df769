"""How parameters are made, and the one linear map everything uses."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

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
        """A variable; ``init`` is "normal", "zeros", "ones" or ``f(key, shape) -> f32``."""
        if len(shape) != len(axes):
            raise ValueError(f"axes {axes} do not name the dimensions of {shape}")
        dtype = self.dtype if dtype is None else jnp.dtype(dtype)
        if self.stack is not None:
            shape, axes = (self.stack, *shape), (self.stack_axis, *axes)
        if self.rngs is None:
            return kind(jax.ShapeDtypeStruct(shape, dtype), axes=axes)
        if init == "normal":
            value = self.std * jax.random.normal(self.rngs.params(), shape, jnp.float32)
        elif init in ("zeros", "ones"):
            value = jnp.full(shape, 1.0 if init == "ones" else 0.0, jnp.float32)
        elif isinstance(init, str):
            raise ValueError(f"init={init!r}: one of 'normal', 'zeros', 'ones', or a function")
        else:
            value = init(self.rngs.params(), shape)
        return kind(value.astype(dtype), axes=axes)


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
