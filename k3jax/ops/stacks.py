"""One layer of an array that leads with layers."""

from __future__ import annotations

from jax import Array, lax


def take(stack: Array, slot: Array | None) -> Array:
    """Layer ``slot``; the array itself where there is no slot, and so no axis of layers."""
    return stack if slot is None else lax.dynamic_index_in_dim(stack, slot, 0, keepdims=False)


def put(stack: Array, layer: Array, slot: Array | None) -> Array:
    """The stack with one layer replaced, in its dtype; ``layer`` itself where there is no slot."""
    layer = layer.astype(stack.dtype)
    return layer if slot is None else lax.dynamic_update_index_in_dim(stack, layer, slot, 0)
