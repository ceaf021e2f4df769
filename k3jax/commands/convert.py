"""``k3jax convert``: a published checkpoint as Orbax, for loading onto many devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import tyro


@dataclass(frozen=True)
class Convert:
    """Write a checkpoint of Moonshot's format as a sharded Orbax checkpoint.

    Stopped in the middle, it goes on where it was when it is run again with the same arguments.
    Packed experts keep their bytes. OUT has its name only once it is whole.
    """

    source: tyro.conf.Positional[str]
    """A checkpoint directory, or a preset that ships weights."""
    out: tyro.conf.Positional[str]
    """The directory to make; OUT.partial until it is finished."""
    layers: int | None = None
    """Only the first so many layers."""
    dtype: Literal["bfloat16", "float32"] | None = None
    """Of the weights that are neither packed nor float32 by definition; as stored if not given."""
    overwrite: bool = False
    """Replace OUT if it is an earlier conversion."""

    def run(self) -> None:
        import jax.numpy as jnp

        from k3jax.checkpoint.convert import convert
        from k3jax.commands import prepare_jax

        prepare_jax()
        dtype = None if self.dtype is None else jnp.dtype(self.dtype)
        out = convert(
            self.source, self.out, dtype=dtype, layers=self.layers, overwrite=self.overwrite
        )
        print(out)
