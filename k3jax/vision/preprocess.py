"""Pictures to patches, as Moonshot's processor makes them, and how many tokens that is.

The rule: never enlarge; at most 65,536 patches and 512 a side before padding; bicubic; pad right
and below with zeros to whole merged patches, before normalisation, so padding becomes -1.
Transparency is laid over a chessboard after the resize. Source: Moonshot's `vision_processing`,
and a public mirror of its `media_utils` for the arithmetic.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from k3jax.config import Config, VisionConfig
from k3jax.errors import InputError
from k3jax.vision import files

if TYPE_CHECKING:
    from PIL import Image

PATCH_LIMIT = 65_536  # patches of one item, counted before padding
SIDE_LIMIT = 512  # patches along one side
CELL, LIGHT, DARK = 8, 255, 180  # the chessboard behind transparency, pixels and grey levels
VIDEO_BYTES = 256 * 2**20  # patches of all frames of one video


@dataclass(frozen=True)
class Item:
    """One image, or up to four frames that the tower reads together.

    Attributes:
      name: for messages.
      width, height: pixels of the original, after EXIF rotation; what the prompt states.
      resized: (width, height) in pixels before padding.
      grid: (frames, rows, columns) of patches.
      merge: (rows, columns) of patches that make one token.
      patches_NP: uint8 [t*h*w, 3 * patch^2], order frame, row, column; each (channel, row, column).
    """

    name: str
    width: int
    height: int
    resized: tuple[int, int]
    grid: tuple[int, int, int]
    merge: tuple[int, int]
    patches_NP: np.ndarray

    @property
    def tokens(self) -> int:
        """Rows of the text model it becomes; frames are averaged."""
        return self.grid[1] * self.grid[2] // math.prod(self.merge)

    @functools.cached_property
    def digest(self) -> bytes:
        """sha256 of grid and pixels: what a key of a prefix cache must hold of this item, since
        every image has the same placeholder id."""
        head = np.asarray((*self.grid, *self.merge), np.int64).tobytes()
        return hashlib.sha256(head + np.ascontiguousarray(self.patches_NP).tobytes()).digest()

    def picture(self, frame: int = 0) -> np.ndarray:
        """uint8 [H, W, 3]: what the tower sees, padding included."""
        _, h, w = self.grid
        side = math.isqrt(self.patches_NP.shape[1] // 3)
        patches = self.patches_NP[frame * h * w : (frame + 1) * h * w]
        tiles = patches.reshape(h, w, 3, side, side).transpose(0, 3, 1, 4, 2)
        return tiles.reshape(h * side, w * side, 3)


def normalise(patches_NP: np.ndarray) -> np.ndarray:
    """uint8 pixels -> float32 in [-1, 1]; the tower does the same on the device."""
    return (patches_NP.astype(np.float32) / np.float32(255) - np.float32(0.5)) * np.float32(2)


def resize_rule(width: int, height: int, config: VisionConfig, frames: int = 1) -> tuple[int, int]:
    """(width, height) a picture is resized to, before padding.

    Args:
      width, height: pixels, at least 1.
      frames: pictures that share the limit of patches.
    """
    if width < 1 or height < 1:
        raise InputError(f"a picture of {width} x {height} pixels has nothing to see")
    side, patches = config.patch_size, PATCH_LIMIT // frames
    whole = max(1, width // side) * max(1, height // side)
    scale = min(
        1.0, math.sqrt(patches / whole), SIDE_LIMIT * side / width, SIDE_LIMIT * side / height
    )
    most = SIDE_LIMIT * side
    return min(max(int(width * scale), 1), most), min(max(int(height * scale), 1), most)


def grid_of(width: int, height: int, config: VisionConfig, frames: int = 1) -> tuple[int, int, int]:
    """(frames, rows, columns) in patches of pictures of ``width`` x ``height`` pixels."""
    new_width, new_height = resize_rule(width, height, config, frames)
    down, right = (size * config.patch_size for size in config.merge)
    rows, columns = -(-new_height // down) * config.merge[0], -(-new_width // right)
    return frames, rows, columns * config.merge[1]


def count_tokens(width: int, height: int, config: VisionConfig | Config, frames: int = 1) -> int:
    """Tokens of an image of that size, or of all groups of a video of so many frames.

    Needs neither pixels nor a model. Raises InputError for a size below 1 or a text-only config.
    """
    vision = vision_of(config)
    together = min(frames, vision.position_time)
    _, rows, columns = grid_of(width, height, vision, together)
    return -(-frames // vision.position_time) * rows * columns // math.prod(vision.merge)


def vision_of(config: VisionConfig | Config) -> VisionConfig:
    """The vision part. Raises InputError where the model is text only."""
    vision = config.vision if isinstance(config, Config) else config
    if vision is None:
        raise InputError("an image for a text-only model: its config has no vision_config")
    return vision


def read(images: Iterable[Any], config: VisionConfig | Config) -> list[Item]:
    """Images and videos to items, in order.

    Args:
      images: each a path, bytes of a file, PIL image or array (`k3jax.vision.files.frames_of`), or
        an `Item`, kept as it is; a list or tuple of such pictures is a video, and so is a GIF,
        WebP or PNG with several frames.
    Returns:
      One item an image. Frames of a video are taken in order in groups of 4 (``position_time``),
      one item each, the last one shorter; a frame on its own is encoded as an image. All groups
      have one size: 65,536 patches are shared by the frames of a full group.
    Raises:
      InputError: naming the image and the numbers.
    """
    vision = vision_of(config)
    if isinstance(images, str | bytes | np.ndarray) or not isinstance(images, Iterable):
        raise InputError(f"images must be a list, not a {type(images).__name__}")
    items: list[Item] = []
    for number, source in enumerate(images):
        name = str(source) if isinstance(source, str) or _is_path(source) else f"image {number + 1}"
        if isinstance(source, Item):
            items.append(source)
        elif isinstance(source, list | tuple):
            items += _video([_still(s, f"{name}, frame {i}") for i, s in enumerate(source)],
                            len(source), name, vision)  # fmt: skip
        else:
            count, frames = files.frames_of(source, name)
            items += _video(frames, count, name, vision)
    return items


def _is_path(source: Any) -> bool:
    return hasattr(source, "__fspath__")


def _still(source: Any, name: str) -> Image.Image:
    count, frames = files.frames_of(source, name)
    if count > 1:
        raise InputError(f"{name}: has {count} frames itself")
    return next(frames)


def _video(
    frames: Iterable[Image.Image], count: int, name: str, config: VisionConfig
) -> list[Item]:
    if count == 0:
        raise InputError(f"{name}: a video without a frame")
    if count > files.MAX_FRAMES:
        raise InputError(f"{name}: {count} frames, at most {files.MAX_FRAMES} are taken")
    together = min(count, config.position_time)
    items: list[Item] = []
    size: tuple[int, int] | None = None
    group: list[np.ndarray] = []
    resized, grid = (0, 0), (0, 0, 0)
    number = -1
    for frame in frames:  # not enumerate: it would keep the previous frame alive
        number += 1
        if size is None:
            size = frame.size
            resized = resize_rule(*size, config, together)
            grid = grid_of(*size, config, together)
            nbytes = count * grid[1] * grid[2] * config.patch_width
            if count > 1 and nbytes > VIDEO_BYTES:
                raise InputError(
                    f"{name}: {count} frames of {size[0]} x {size[1]} pixels make {nbytes:,} bytes "
                    f"of patches, at most {VIDEO_BYTES:,} are taken; give fewer or smaller frames"
                )
        elif frame.size != size:
            raise InputError(
                f"{name}: frame {number} has {frame.size[0]} x {frame.size[1]} pixels, frame 0 has "
                f"{size[0]} x {size[1]}"
            )
        if frame.size != resized:
            frame = frame.resize(resized, files.pillow().Resampling.BICUBIC)
        group.append(_patches(frame, grid, config))
        if len(group) == together or number == count - 1:
            patches_NP = group[0] if len(group) == 1 else np.concatenate(group)
            shape = (len(group), grid[1], grid[2])
            items.append(Item(name, *size, resized, shape, config.merge, patches_NP))
            group = []
    return items


def _patches(image: Image.Image, grid: tuple[int, int, int], config: VisionConfig) -> np.ndarray:
    """uint8 [h*w, 3 * patch^2] of one resized picture."""
    _, h, w = grid
    side = config.patch_size
    pixels = np.asarray(image)
    padded = np.zeros((h * side, w * side, 3), np.uint8)
    padded[: image.height, : image.width] = (
        over_chessboard(pixels) if image.mode == "RGBA" else pixels
    )
    tiles = padded.reshape(h, side, w, side, 3).transpose(0, 2, 4, 1, 3)
    return tiles.reshape(h * w, -1)


def over_chessboard(pixels_HWC: np.ndarray) -> np.ndarray:
    """uint8 RGBA [H, W, 4] -> RGB over squares of 8 pixels, white first; fractions are dropped."""
    H, W, _ = pixels_HWC.shape
    result = np.empty((H, W, 3), np.uint8)
    column_W = np.arange(W) // CELL
    for row in range(0, H, 64):  # float32 copies of a few rows at a time
        part = pixels_HWC[row : row + 64]
        row_H1 = (np.arange(row, row + len(part)) // CELL)[:, None]
        board = np.where((row_H1 + column_W) % 2 == 0, LIGHT, DARK).astype(np.float32)[..., None]
        alpha = part[..., 3:].astype(np.float32) / np.float32(255)
        mixed = part[..., :3].astype(np.float32) * alpha + board * (1 - alpha)
        result[row : row + len(part)] = mixed.astype(np.uint8)
    return result
