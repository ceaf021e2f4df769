"""Peak memory of reading one image at the limit of its kind, in a process of its own.

    python benchmarks/image_memory.py [--only WORD]

Bound: 500 MB beyond the interpreter and its imports, for any image that is accepted
(`k3jax.vision.files.WORKING_BYTES`).
"""

from __future__ import annotations

import argparse
import math
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

BOUND_MB = 500.0
ROTATED = 6  # EXIF orientation: a quarter turn

# name -> (Pillow format, mode, options of save); the limit is that of the kind.
CASES = {
    "png rgb": ("PNG", "RGB", {}),
    "png rgb turned": ("PNG", "RGB", {"exif": ROTATED}),
    "png rgba turned": ("PNG", "RGBA", {"exif": ROTATED}),
    "png palette, transparent": ("PNG", "P", {"transparency": 0}),
    "png grey with alpha": ("PNG", "LA", {}),
    "png 16 bit": ("PNG", "I;16", {}),
    "bmp rgb": ("BMP", "RGB", {}),
    "jpeg turned": ("JPEG", "RGB", {"exif": ROTATED}),
    "jpeg progressive 4:4:4 turned": (
        "JPEG",
        "RGB",
        {"progressive": True, "subsampling": 0, "exif": ROTATED},
    ),
    "jpeg progressive cmyk": ("JPEG", "CMYK", {"progressive": True}),
    "webp rgb": ("WEBP", "RGB", {"method": 0}),
    "webp rgba lossless": ("WEBP", "RGBA", {"method": 0, "lossless": True}),
    "gif": ("GIF", "P", {}),
    "gif two frames": ("GIF", "P", {"save_all": True}),
    "tiff one strip": ("TIFF", "RGB", {"compression": "tiff_deflate", "strip_size": 2**31 - 1}),
    "tiff rgba": ("TIFF", "RGBA", {"compression": "tiff_lzw"}),
}


def write(path: Path, kind: str, mode: str, options: dict) -> tuple[int, int]:
    """A picture with as many pixels as are accepted; returns its size."""
    from PIL import Image

    from k3jax.vision import files

    cost = files.BY_FORMAT.get(kind, files.PLAIN)
    if mode in ("RGBA", "LA") or "transparency" in options:
        cost = max(cost, files.ALPHA)
    cost = {"CMYK": files.CMYK_JPEG, "I;16": files.DEEP}.get(mode, cost)
    side = math.isqrt(files.WORKING_BYTES // cost)
    image = Image.new(mode, (side, side))
    options = dict(options)
    if orientation := options.pop("exif", None):
        options["exif"] = Image.Exif()
        options["exif"][0x0112] = orientation
    if options.get("save_all"):
        other = image.copy()
        other.paste(1, (0, 0, side, side))
        options["append_images"] = [other]
    if "strip_size" in options:
        from PIL import TiffImagePlugin

        TiffImagePlugin.STRIP_SIZE = options.pop("strip_size")
    image.save(path, kind, **options)
    return image.size


def child(path: str) -> None:
    import numpy as np  # noqa: F401
    from PIL import Image  # noqa: F401

    from k3jax.config import Config
    from k3jax.vision.preprocess import read

    config = Config.preset("kimi-k3")
    before = resident()
    items = read([path], config)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    print(f"{after - before:.0f} {len(items)} {items[0].grid}")


def resident() -> float:
    """MB now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return child(options.child)
    worst = 0.0
    with tempfile.TemporaryDirectory() as folder:
        for name, case in CASES.items():
            if options.only not in name:
                continue
            path = Path(folder) / name.split()[0]
            # Written in a process of its own too, so that this one stays small.
            target = f"pathlib.Path({str(path)!r})"
            script = f"import image_memory as m, pathlib; m.write({target}, *{case!r})"
            subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(__file__).parent)
            done = subprocess.run(
                [sys.executable, __file__, "--child", str(path)],
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                print(f"{name:32s} {done.stderr.strip().splitlines()[-1]}")
                worst = math.inf
                continue
            megabytes, items, grid = done.stdout.split(maxsplit=2)
            worst = max(worst, float(megabytes))
            print(
                f"{name:32s} {megabytes:>5s} MB, {items} item(s), grid {grid.strip()}", flush=True
            )
            path.unlink()
    print(f"worst {worst:.0f} MB, bound {BOUND_MB:.0f} MB")
    raise SystemExit(worst > BOUND_MB)


if __name__ == "__main__":
    main()
