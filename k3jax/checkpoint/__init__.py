"""The published checkpoint format: names, streamed load, save, and a report without loading."""

from k3jax.checkpoint import orbax
from k3jax.checkpoint.loading import load
from k3jax.checkpoint.saving import save

__all__ = ["load", "read", "save"]


def read(directory, abstract_params, config, *, dtype=None, shardings=None, layers=None):
    """Parameters of a folder in the published format or in Orbax's, by what the folder holds.

    See :func:`load` and :func:`k3jax.checkpoint.orbax.load` for arguments and errors.
    """
    if orbax.is_orbax(directory):
        return orbax.load(directory, abstract_params, shardings, dtype, layers)
    return load(directory, abstract_params, config, dtype=dtype, shardings=shardings, layers=layers)
