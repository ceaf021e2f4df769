"""Images and video: files to patches, patches to features, features into a prompt."""

from k3jax.vision.encoder import Encoder
from k3jax.vision.merge import aligned, expand, prompt
from k3jax.vision.preprocess import Item, count_tokens, grid_of, read

__all__ = ["Encoder", "Item", "aligned", "count_tokens", "expand", "grid_of", "prompt", "read"]
