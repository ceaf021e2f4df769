"""Files and arrays to patches: every size, every mode, every kind of damage."""

from __future__ import annotations

import io
import math
import zlib

import numpy as np
import pytest
from PIL import Image, ImageOps

from k3jax.config import Config
from k3jax.errors import InputError
from k3jax.vision import count_tokens, files, grid_of, read
from k3jax.vision.preprocess import SIDE_LIMIT, normalise, over_chessboard

CONFIG = Config.preset("kimi-k3").vision
assert CONFIG is not None
MAX = SIDE_LIMIT * 14
SIDES = (1, 2, 13, 14, 15, 27, 28, 29, 57, MAX, MAX + 1)


def picture(width=40, height=30, mode="RGB", seed=0) -> Image.Image:
    channels = len(Image.new(mode, (1, 1)).getbands())
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, channels), np.uint8)
    return Image.fromarray(noise[..., 0] if channels == 1 else noise, mode=mode)


def encoded(image: Image.Image, kind="PNG", **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def one(source):
    (item,) = read([source], CONFIG)
    return item


class TestSizes:
    @pytest.mark.parametrize("width", SIDES)
    def test_every_pair(self, width):
        for height in SIDES:
            self.check(width, height)

    def test_strips(self):
        for width, height in ((1, 50_000), (50_000, 1), (1, 50 * MAX), (50 * MAX, 1)):
            self.check(width, height)

    @staticmethod
    def check(width, height):
        item = one(np.zeros((height, width, 3), np.uint8))
        t, h, w = item.grid
        assert (item.width, item.height) == (width, height)
        assert t == 1
        assert h % 2 == w % 2 == 0
        assert max(h, w) <= SIDE_LIMIT
        assert len(item.patches_NP) == h * w
        assert item.tokens == h * w // 4 == count_tokens(width, height, CONFIG)
        assert item.grid == grid_of(width, height, CONFIG)
        new_width, new_height = item.resized
        assert new_width <= width
        assert new_height <= height
        assert 0 <= w * 14 - new_width < 28
        assert 0 <= h * 14 - new_height < 28
        # Padding may add an edge to the 65,536 patches of the rule.
        assert h * w <= 65_536 + 2 * (h + w)

    @pytest.mark.parametrize(("width", "height"), [(0, 5), (5, 0), (-3, 4)])
    def test_nothing_to_see(self, width, height):
        with pytest.raises(InputError, match=f"{width} x {height} pixels"):
            count_tokens(width, height, CONFIG)

    def test_published_figures(self):
        assert count_tokens(3584, 3584, CONFIG) == 16_384
        assert count_tokens(1024, 1024, CONFIG) == 37 * 37
        assert count_tokens(1024, 1024, CONFIG, frames=4) == 37 * 37
        assert count_tokens(1024, 1024, CONFIG, frames=5) == 2 * 37 * 37


class TestModes:
    def test_bicubic_and_padding(self):
        image = picture(9000, 90)
        item = one(image)
        width, height = item.resized
        assert (width, height) == (MAX, int(90 * MAX / 9000))
        seen = item.picture()
        want = np.asarray(image.resize((width, height), Image.Resampling.BICUBIC))
        assert np.array_equal(seen[:height, :width], want)
        assert not seen[height:].any()
        assert normalise(seen[height:]).max() == -1

    def test_grey_palette_cmyk_and_others(self):
        grey = picture(mode="L")
        rgb = one(grey.convert("RGB"))
        assert one(grey).digest == rgb.digest
        assert one(encoded(grey)).digest == rgb.digest
        assert one(encoded(grey.convert("P"))).digest == rgb.digest
        assert one(encoded(grey, "BMP")).digest == rgb.digest
        bits = picture(mode="L").convert("1")
        assert one(encoded(bits, "TIFF")).digest == one(bits.convert("RGB")).digest
        cmyk = picture(mode="CMYK")
        assert one(cmyk).digest == one(cmyk.convert("RGB")).digest
        loaded = Image.open(io.BytesIO(encoded(cmyk, "JPEG")))
        assert one(encoded(cmyk, "JPEG")).digest == one(loaded.convert("RGB")).digest

    def test_sixteen_bits_keep_their_high_byte(self):
        values = np.random.default_rng(0).integers(0, 65536, (30, 40), np.uint16)
        want = one((values >> 8).astype(np.uint8)).digest
        deep = Image.fromarray(values)
        assert deep.mode.startswith("I;16")
        assert one(encoded(deep)).digest == want
        assert one(encoded(deep, "TIFF")).digest == want
        assert one(deep).digest == one(values).digest == want
        wide = Image.fromarray(values.astype(np.int32))
        assert one(wide).digest == want
        with pytest.raises(InputError, match="integer pixels from -1 to 70000"):
            one(Image.fromarray(np.array([[-1, 70_000]], np.int32)))

    def test_transparency_over_the_chessboard(self):
        clear = np.zeros((20, 20, 4), np.uint8)
        board = over_chessboard(clear)
        assert set(board[:8, :8].ravel()) == {255}
        assert set(board[:8, 8:16].ravel()) == {180}
        assert set(board[8:16, 8:16].ravel()) == {255}
        half = over_chessboard(np.array([[[10, 20, 31, 128]]], np.uint8))[0, 0]
        assert half.tolist() == [int(c * 128 / 255 + 255 * 127 / 255) for c in (10, 20, 31)]
        image = picture(mode="RGBA")
        want = one(over_chessboard(np.asarray(image))).digest
        assert one(image).digest == one(encoded(image)).digest == want
        assert one(encoded(image, "TIFF")).digest == want
        grey = picture(mode="LA")
        assert one(encoded(grey)).digest == one(grey.convert("RGBA")).digest
        # One transparent colour of a palette, and of an RGB file.
        palette = picture(mode="L").convert("P")
        data = encoded(palette, transparency=3)
        assert one(data).digest == one(Image.open(io.BytesIO(data)).convert("RGBA")).digest

    def test_floats(self):
        image = np.asarray(picture())
        assert one(image / 255).digest == one(image).digest
        assert one((image / 255).astype(np.float32)).digest == one(image).digest

    @pytest.mark.parametrize("orientation", range(1, 9))
    def test_exif_rotation(self, orientation):
        image = picture()
        exif = Image.Exif()
        exif[0x0112] = orientation
        turned = image.copy()
        turned.getexif()[0x0112] = orientation
        want = ImageOps.exif_transpose(turned)
        got = one(encoded(image, exif=exif))
        assert (got.width, got.height) == want.size
        assert got.digest == one(want).digest
        assert one(turned).digest == got.digest
        assert turned.size == image.size  # the caller's picture stays as it is

    def test_broken_exif_turns_nothing(self):
        data = encoded(picture(), exif=b"Exif\0\0MM\0*\xff\xff\xff\xff")
        assert one(data).digest == one(picture()).digest

    def test_digest_tells_images_apart(self):
        items = read([np.full((2, 2), i % 256, np.uint8) for i in range(256)], CONFIG)
        wide = read([np.zeros((28, 56), np.uint8), np.zeros((56, 28), np.uint8)], CONFIG)
        assert len({item.digest for item in (*items, *wide)}) == 258
        assert len(items[0].digest) == 32


class TestVideo:
    @pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8])
    def test_groups_of_four(self, count):
        frames = [np.asarray(picture(seed=i)) for i in range(count)]
        items = read([frames], CONFIG)
        sizes = [min(4, count - start) for start in range(0, count, 4)]
        assert [item.grid for item in items] == [(t, 4, 4) for t in sizes]
        assert sum(item.tokens for item in items) == count_tokens(40, 30, CONFIG, frames=count)
        alone = np.concatenate([one(frame).patches_NP for frame in frames])
        assert np.array_equal(np.concatenate([item.patches_NP for item in items]), alone)
        assert np.array_equal(items[-1].picture(sizes[-1] - 1)[:30, :40], frames[-1])

    @pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
    def test_animated_files(self, kind, tmp_path):
        frames = [picture(seed=i) for i in range(6)]
        path = tmp_path / "some.dat"
        options = {"lossless": True} if kind == "WEBP" else {}
        frames[0].save(path, kind, save_all=True, append_images=frames[1:], **options)
        items = read([path, str(path)], CONFIG)
        assert [item.grid[0] for item in items] == [4, 2, 4, 2]
        if kind != "GIF":  # 256 colours
            want = read([frames], CONFIG)
            assert [i.digest for i in items] == [i.digest for i in want] * 2

    def test_a_transparent_animation(self):
        frames = []
        for shift in (0, 7, 14):
            frame = Image.new("RGBA", (40, 30))
            frame.paste((200, 30, 60, 255), (shift, 5, shift + 9, 20))
            frames.append(frame)
        data = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:], disposal=2)
        (got,), (want,) = read([data], CONFIG), read([frames], CONFIG)
        assert got.digest == want.digest

    def test_pages_and_stereo_pictures_are_no_video(self, tmp_path):
        first, second = picture(seed=1), picture(seed=2)
        for kind in ("TIFF", "MPO"):
            path = tmp_path / f"two.{kind}"
            first.save(path, kind, save_all=True, append_images=[second])
            item = one(path)
            assert item.grid[0] == 1
            if kind == "TIFF":
                assert item.digest == one(first).digest

    def test_frames_share_the_limit_of_patches(self):
        frame = np.zeros((4000, 4000, 3), np.uint8)
        (item,) = read([[frame] * 4], CONFIG)
        _, h, w = item.grid
        assert 4 * h * w <= 65_536 + 8 * (h + w)
        assert item.grid == grid_of(4000, 4000, CONFIG, 4)

    @pytest.mark.parametrize(
        ("frames", "message"),
        [
            ([], "a video without a frame"),
            ([np.zeros((4, 4, 3), np.uint8), np.zeros((4, 5, 3), np.uint8)],
             "frame 1 has 5 x 4 pixels, frame 0 has 4 x 4"),
            ([np.zeros((4, 4), np.uint8)] * 257, "257 frames, at most 256"),
            ([np.zeros((2000, 2000), np.uint8)] * 60, "60 frames of 2000 x 2000 pixels"),
            ([None], "frame 0: a NoneType is no image"),
        ],
    )  # fmt: skip
    def test_refused(self, frames, message):
        with pytest.raises(InputError, match=message):
            read([frames], CONFIG)


def bomb_png(width, height) -> bytes:
    """A valid PNG header and a few bytes of data for a huge picture."""

    def chunk(kind, data):
        body = kind + data
        return len(data).to_bytes(4, "big") + body + zlib.crc32(body).to_bytes(4, "big")

    head = width.to_bytes(4, "big") + height.to_bytes(4, "big") + b"\x08\x02\0\0\0"
    data = zlib.compress(b"\0" * 1000)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def damaged_files() -> dict[str, tuple[bytes, str]]:
    """Name -> (bytes, what the error says)."""
    png, jpeg = encoded(picture(200, 200)), encoded(picture(200, 200), "JPEG")
    flipped = bytearray(png)
    flipped[len(png) // 2] ^= 0xFF
    crc = bytearray(png)
    crc[20] ^= 1  # the width, with the checksum of another
    gif = encoded(picture(200, 200).quantize(), "GIF")
    tiff = encoded(picture(200, 200), "TIFF")
    webp = encoded(picture(200, 200), "WEBP")
    bmp = encoded(picture(200, 200), "BMP")
    return {
        "empty": (b"", "is empty"),
        "cut_png": (png[: len(png) // 2], "damaged"),
        "cut_jpeg": (jpeg[: len(jpeg) // 2], "damaged"),
        "cut_gif": (gif[: len(gif) // 2], "damaged"),
        "cut_tiff": (tiff[: len(tiff) // 2], "damaged"),
        "cut_webp": (webp[: len(webp) // 2], "damaged"),
        "cut_bmp": (bmp[: len(bmp) // 2], "damaged"),
        "flipped_png": (bytes(flipped), "damaged"),
        "wrong_checksum": (bytes(crc), "damaged"),
        "header_alone": (png[:33], "damaged"),
        "jpeg_header_alone": (jpeg[:3], "damaged|no picture"),
        "bomb_png": (bomb_png(60_000, 60_000), "decompression bomb: .*3600000000 pixels"),
        "bomb_100_mp": (bomb_png(10_000, 10_000), "10000 x 10000 pixels"),
        "zero_wide": (bomb_png(0, 10), "damaged|no picture|nothing to see"),
        "text": (b"hello, world\n", "no picture that is known here"),
        "pdf": (b"%PDF-1.7\n", "a PDF; what is read is JPEG, PNG"),
        "mp4": (b"\0\0\0\x20ftypisom\0\0\2\0", "MP4 or QuickTime video"),
        "heic": (b"\0\0\0\x18ftypheic\0\0\0\0", "HEIC"),
        "svg": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "SVG"),
    }


class TestRefused:
    @pytest.mark.parametrize("name", damaged_files())
    def test_damaged_files(self, name, tmp_path):
        data, message = damaged_files()[name]
        path = tmp_path / f"{name}.img"
        path.write_bytes(data)
        for source, called in ((path, str(path)), (data, "image 1")):
            with pytest.raises(InputError, match=message) as caught:
                read([source], CONFIG)
            assert str(caught.value).startswith(called + ": ")
            assert "\n" not in str(caught.value)

    @pytest.mark.parametrize("kind", files.FORMATS)
    def test_any_damage_is_an_error_or_an_image(self, kind):
        """Bytes changed at random: an item or one InputError, never another exception."""
        draw = np.random.default_rng(0)
        options = {"save_all": True, "append_images": [picture(seed=2)]}
        data = encoded(picture(seed=1), kind, **options if kind in files.ANIMATED else {})
        refused = []
        for _ in range(150):
            broken = bytearray(data)
            for _ in range(draw.integers(1, 5)):
                broken[draw.integers(0, min(len(data), 300))] = draw.integers(0, 256)
            try:
                read([bytes(broken)], CONFIG)
            except InputError as error:
                refused.append(str(error))
        assert len(refused) >= 5  # a GIF takes nearly anything
        assert not any("\n" in message for message in refused)

    def test_no_file(self, tmp_path):
        for path, why in ((tmp_path / "none.png", "no such file"), (tmp_path, "is a folder")):
            with pytest.raises(InputError, match=why):
                read([path], CONFIG)

    @pytest.mark.parametrize(
        ("array", "message"),
        [
            (np.full((4, 5, 3), np.nan), r"pixel nan at \[0, 0, 0\], not in 0..1"),
            (np.array([[0, 0.5], [0.5, np.inf]]), r"pixel inf at \[1, 1\]"),
            (np.array([[0, 255.0]]), r"pixel 255.0 at \[0, 1\]"),
            (np.zeros((4, 5, 2), np.uint8), r"shape \(4, 5, 2\)"),
            (np.zeros((0, 5), np.uint8), r"shape \(0, 5\)"),
            (np.zeros(5, np.uint8), r"shape \(5,\)"),
            (np.zeros((4, 5), np.int64), "pixels of int64"),
            (np.broadcast_to(np.uint8(0), (60_000, 60_000)), "60000 x 60000 pixels"),
        ],
    )
    def test_arrays(self, array, message):
        with pytest.raises(InputError, match=message):
            one(array)

    def test_float_pixels_in_a_file(self):
        deep = Image.fromarray(np.full((3, 3), np.nan, np.float32))
        for source in (deep, encoded(deep, "TIFF")):
            with pytest.raises(InputError, match="32-bit floats"):
                one(source)

    @pytest.mark.parametrize(("source", "what"), [(3, "int"), (None, "NoneType")])
    def test_no_image(self, source, what):
        with pytest.raises(InputError, match=f"a {what} is no image"):
            one(source)

    @pytest.mark.parametrize("images", ["a.png", b"x", np.zeros((2, 2), np.uint8), 3])
    def test_not_a_list(self, images):
        with pytest.raises(InputError, match="images must be a list"):
            read(images, CONFIG)

    def test_text_only_model(self):
        with pytest.raises(InputError, match="text-only model"):
            read([picture()], Config.preset("nano"))

    def test_without_pillow(self, monkeypatch):
        monkeypatch.setitem(__import__("sys").modules, "PIL", None)
        with pytest.raises(InputError, match=r"pip install 'k3jax\[vision\]'"):
            one(np.zeros((3, 3), np.uint8))


def test_limits_are_what_the_memory_allows():
    """The pixels that each kind may have, times its cost, stay under half a gigabyte."""
    for cost in (files.PLAIN, files.ALPHA, files.DEEP, files.CMYK_JPEG, *files.BY_FORMAT.values()):
        assert math.prod((cost, files.WORKING_BYTES // cost)) < 500e6
    assert files.WORKING_BYTES // files.PLAIN > MAX * MAX  # the largest square the rule keeps
    assert files.WORKING_BYTES // files.BY_FORMAT["JPEG"] > 48e6  # cameras of phones
