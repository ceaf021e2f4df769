"""The published checkpoint format: names, streamed load, save, and a report without loading."""

from k3jax.checkpoint.loading import load
from k3jax.checkpoint.saving import save

__all__ = ["load", "save"]
