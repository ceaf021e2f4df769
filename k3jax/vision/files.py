"""Whatever a user calls an image, as Pillow pictures of mode RGB or RGBA; or one clear error.

Pictures with transparency become RGBA; grey, palette, CMYK and the rest RGB; 16 bits keep their
high byte. EXIF rotation is applied. Nothing is decoded before its size is known to fit the memory.
"""

from __future__ import annotations

import contextlib
import io
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from k3jax.errors import InputError

if TYPE_CHECKING:
    from PIL import Image

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
ANIMATED = ("GIF", "WEBP", "PNG")  # several pictures in a TIFF or JPEG are no video: the first one
MAX_FRAMES = 256  # of one video
WORKING_BYTES = 490_000_000
"""Memory that decoding one picture and bringing it to RGB and to its size may take."""

# Bytes a pixel while a picture is decoded, converted and resized. Pillow keeps 4 a pixel, and one
# copy is made at a time (rotation, conversion, the first pass of the resize): 8. Measured by
# benchmarks/image_memory.py.
PLAIN = 8
ALPHA = 12  # resizing premultiplies a copy
DEEP = 14  # 16 bits a pixel: arrays on the way to 8
BY_FORMAT = {"JPEG": 10, "MPO": 10, "WEBP": 22, "GIF": 18, "TIFF": 12}  # decoders' own buffers
CMYK_JPEG = 12

_DAMAGED = "is damaged: its header cannot be read"
_MAGIC = (
    (0, b"\x89PNG", _DAMAGED),
    (0, b"\xff\xd8\xff", _DAMAGED),
    (0, b"GIF8", _DAMAGED),
    (0, b"BM", _DAMAGED),
    (0, b"II*\0", _DAMAGED),
    (0, b"MM\0*", _DAMAGED),
    (8, b"WEBP", _DAMAGED),
    (0, b"%PDF", "a PDF"),
    (0, b"\x1aE\xdf\xa3", "a Matroska or WebM video"),
    (0, b"\x00\x00\x01\x00", "an icon"),
    (0, b"8BPS", "a Photoshop file"),
    (0, b"\x00\x00\x00\x0cJXL", "a JPEG XL image"),
    (0, b"\x00\x00\x00\x0cjP", "a JPEG 2000 image"),
    (0, b"P", "a portable pixmap"),
    (0, b"<", "an SVG, XML or HTML text"),
    (4, b"ftyphei", "a HEIC image"),
    (4, b"ftypmif1", "a HEIC image"),
    (4, b"ftypavi", "an AVIF image"),
    (4, b"ftyp", "an MP4 or QuickTime video"),
    (8, b"AVI ", "an AVI video"),
)


def pillow() -> Any:
    """The PIL.Image module. Raises InputError, naming the extra, where Pillow is not installed."""
    try:
        from PIL import Image
    except ImportError:
        raise InputError("images need Pillow: pip install 'k3jax[vision]'") from None
    return Image


def frames_of(source: Any, name: str) -> tuple[int, Iterator[Image.Image]]:
    """(number of frames, the frames); 1 for a still picture.

    Args:
      source: a path, the bytes of a file, a PIL image, or an array [H, W], [H, W, 1 | 3 | 4] of
        uint8, uint16 (high byte kept) or floats in [0, 1].
      name: what errors call it.
    Raises:
      InputError: a file that is absent, empty, damaged, too large or of another format; an array
        of another shape or dtype, with NaN or values outside its range.
    """
    image_module = pillow()
    if isinstance(source, np.ndarray):
        return 1, iter([to_rgb(image_module.fromarray(_pixels(source, name)), name)])
    if isinstance(source, image_module.Image):
        count = _count(source, name)
        return count, _frames(source, count, name)
    if isinstance(source, bytes | bytearray):
        file = io.BytesIO(source)
    elif isinstance(source, str | os.PathLike):
        path = Path(source)
        if not path.is_file():
            raise InputError(f"{name}: {'is a folder' if path.is_dir() else 'no such file'}")
        file = path.open("rb")
    else:
        raise InputError(f"{name}: a {type(source).__name__} is no image")
    with contextlib.ExitStack() as stack:
        stack.enter_context(file)  # closed on an error here, else when the frames are used up
        image = _open(file, name)
        stack.callback(image.close)
        count = _count(image, name)
        return count, _frames(image, count, name, stack.pop_all())


def _count(image: Image.Image, name: str) -> int:
    """Frames of a picture whose size is checked."""
    check_size(image, name)
    with _readable(name):
        animated = image.format in ANIMATED and getattr(image, "is_animated", False)
        count: int = image.n_frames if animated else 1  # type: ignore[attr-defined]
    if count > MAX_FRAMES:
        raise InputError(f"{name}: {count} frames, at most {MAX_FRAMES} are taken")
    return count


def _frames(
    image: Image.Image, count: int, name: str, stack: contextlib.ExitStack | None = None
) -> Iterator[Image.Image]:
    with stack or contextlib.nullcontext():
        for frame in range(count):
            with _readable(name):
                if count > 1:
                    image.seek(frame)
                image.load()
                if count == 1:
                    image = _upright(image, in_place=stack is not None)
            converted = [to_rgb(image, name)]
            if count == 1 and stack is not None and converted[0] is not image:
                stack.close()  # frees the pixels that were converted
            yield converted.pop()  # the caller alone holds it, and drops it once it is resized


def _open(file: BinaryIO, name: str) -> Image.Image:
    head = file.read(16)
    file.seek(0)
    if not head:
        raise InputError(f"{name}: is empty (0 bytes)")
    image_module = pillow()
    try:
        with _readable(name):
            return image_module.open(file, formats=FORMATS)
    except InputError as error:
        if not isinstance(error.__cause__, image_module.UnidentifiedImageError):
            raise
    known = [kind for start, magic, kind in _MAGIC if head[start:].startswith(magic)]
    if known and known[0] == _DAMAGED:
        raise InputError(f"{name}: {_DAMAGED}") from None
    kind = known[0] if known else f"no picture that is known here (it begins {head[:8].hex(' ')})"
    raise InputError(f"{name}: {kind}; what is read is {', '.join(FORMATS)}") from None


@contextlib.contextmanager
def _readable(name: str) -> Iterator[None]:
    """Any failure of a decoder, which may raise nearly anything, as an InputError."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns of odd metadata; sizes are checked here
            yield
    except (InputError, KeyboardInterrupt):
        raise
    except pillow().DecompressionBombError as error:
        raise InputError(f"{name}: is refused as a decompression bomb: {error}") from error
    except MemoryError as error:
        raise InputError(f"{name}: decoding it takes too much memory") from error
    except Exception as error:
        raise InputError(f"{name}: is damaged: {str(error) or type(error).__name__}") from error


def check_size(image: Image.Image, name: str) -> None:
    """Raises InputError, with the numbers, for a picture that would take too much memory."""
    cost = BY_FORMAT.get(image.format or "", PLAIN)
    if image.mode == "CMYK" and cost > PLAIN:
        cost = max(cost, CMYK_JPEG)
    if _has_alpha(image):
        cost = max(cost, ALPHA)
    if image.mode.startswith("I"):
        cost = max(cost, DEEP)
    width, height = image.size
    if width * height * cost > WORKING_BYTES:
        raise InputError(
            f"{name}: {width} x {height} pixels, at most {WORKING_BYTES // cost:,} pixels of this "
            f"kind ({image.format or 'array'} {image.mode}) are taken"
        )


def _has_alpha(image: Image.Image) -> bool:
    return image.mode in ("RGBA", "RGBa", "LA", "La", "PA") or "transparency" in image.info


def _upright(image: Image.Image, *, in_place: bool) -> Image.Image:
    """Turned as its EXIF orientation says; in place, the copy replaces the picture.

    EXIF data that cannot be read turns nothing.
    """
    from PIL import ImageOps

    with contextlib.suppress(Exception):
        if image.getexif().get(0x0112, 1) != 1:
            return ImageOps.exif_transpose(image, in_place=in_place) or image
    return image


def to_rgb(image: Image.Image, name: str) -> Image.Image:
    """Mode RGB, or RGBA where there is transparency. Raises InputError for float pixels."""
    if image.mode.startswith("I"):
        array = np.asarray(image)
        low, high = int(array.min()), int(array.max())
        if low < 0 or high > 0xFFFF:
            raise InputError(f"{name}: integer pixels from {low} to {high}, 16 bits are taken")
        image = pillow().fromarray((array >> 8).astype(np.uint8))
    if image.mode == "F":
        raise InputError(f"{name}: pixels are 32-bit floats; save it with 8 or 16 bits")
    mode = "RGBA" if _has_alpha(image) else "RGB"
    if image.mode == mode:
        return image
    with _readable(name):
        return image.convert(mode)


def _pixels(array: np.ndarray, name: str) -> np.ndarray:
    """uint8 [H, W] or [H, W, 3 | 4] of an array that is checked."""
    shape = array.shape
    channels = shape[2] if array.ndim == 3 else 1
    if array.ndim not in (2, 3) or channels not in (1, 3, 4) or array.size == 0:
        raise InputError(f"{name}: an array of shape {shape}, not [H, W] or [H, W, 1 | 3 | 4]")
    if shape[0] * shape[1] * (ALPHA if channels == 4 else PLAIN) > WORKING_BYTES:
        limit = WORKING_BYTES // (ALPHA if channels == 4 else PLAIN)
        raise InputError(f"{name}: {shape[1]} x {shape[0]} pixels, at most {limit:,} are taken")
    if array.dtype not in (np.uint8, np.uint16) and array.dtype.kind != "f":
        raise InputError(f"{name}: pixels of {array.dtype}; uint8, uint16 or floats in [0, 1]")
    result = np.empty(shape, np.uint8)
    step = max(1, 2**20 // (shape[1] * channels))  # rows at a time: no copy as large as the array
    for row in range(0, shape[0], step):
        rows = array[row : row + step]
        if array.dtype.kind == "f":
            bad = ~((rows >= 0) & (rows <= 1))
            if bad.any():
                at = np.argwhere(bad)[0]
                value, place = rows[tuple(at)], [int(at[0]) + row, *map(int, at[1:])]
                raise InputError(f"{name}: pixel {value} at {place}, not in 0..1")
            rows = np.rint(rows.astype(np.float32) * 255)
        elif array.dtype == np.uint16:
            rows = rows >> 8
        result[row : row + step] = rows
    return result[..., 0] if array.ndim == 3 and channels == 1 else result
