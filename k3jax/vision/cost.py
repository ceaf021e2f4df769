"""What an item costs: operations and bytes of the tower, counted from the config."""

from __future__ import annotations

import math

from k3jax.config import VisionConfig


def flops(config: VisionConfig, grid: tuple[int, int, int]) -> int:
    """Multiplications and additions of one item of (frames, rows, columns) patches, unpadded.

    A patch goes through the embedding and the linear maps of every block; attention is over all
    t*h*w patches of the item; the projector sees one row a merged patch.
    """
    c = config
    patches = math.prod(grid)
    tokens = grid[1] * grid[2] // math.prod(c.merge)
    block = 4 * c.hidden_size * c.qkv_size + 2 * c.hidden_size * c.intermediate_size
    linear = patches * (c.patch_width * c.hidden_size + c.num_layers * block)
    attention = c.num_layers * 2 * patches**2 * c.qkv_size
    projector = tokens * c.merged_size * (c.merged_size + c.text_hidden_size)
    return 2 * (linear + attention + projector)


def parameters(config: VisionConfig) -> tuple[int, int]:
    """Weights of (tower, projector); K3: 401.21e6 and 46.14e6."""
    c = config
    block = 4 * c.hidden_size * c.qkv_size + 2 * c.hidden_size * c.intermediate_size
    tower = c.num_layers * (block + 2 * c.hidden_size) + c.hidden_size
    tower += c.hidden_size * (c.patch_width + math.prod(c.position_table))
    return tower, c.merged_size * (c.merged_size + c.text_hidden_size) + c.text_hidden_size


def moved_bytes(config: VisionConfig, grid: tuple[int, int, int], itemsize: int = 2) -> int:
    """Bytes that must cross the memory at least once for one item: weights, pixels, features."""
    tokens = grid[1] * grid[2] // math.prod(config.merge)
    pixels = math.prod(grid) * config.patch_width
    return sum(parameters(config)) * itemsize + pixels + tokens * config.text_hidden_size * itemsize
