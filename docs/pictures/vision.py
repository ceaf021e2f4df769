"""Draws docs/pictures/vision.png: a scene, its tokens, and how alike their features are.

    python docs/pictures/vision.py

The features are those of the random tiny tower in tests/golden/vision_tiny, so the map shows how
the function is used, not what a trained model thinks.
"""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
from PIL import Image, ImageDraw

import k3jax
from k3jax import vision
from k3jax.vision.pictures import show

ROOT = Path(__file__).parent.parent.parent


def scene(width: int = 430, height: int = 300) -> Image.Image:
    y = np.mgrid[0:height, 0:width][0]
    sky = np.stack([90 + y // 3, 150 + y // 4, 230 - y // 5], -1)
    image = Image.fromarray(
        np.where((y > 0.7 * height)[..., None], [90, 140, 60], sky).astype("u1")
    )
    draw = ImageDraw.Draw(image)
    draw.ellipse((320, 30, 380, 90), fill=(255, 230, 90))
    draw.rectangle((90, 130, 220, 230), fill=(190, 90, 70))
    draw.polygon(((80, 130), (155, 70), (230, 130)), fill=(90, 50, 50))
    draw.rectangle((140, 175, 170, 230), fill=(60, 40, 30))
    for left in (270, 310, 350):
        draw.rectangle((left + 12, 190, left + 18, 230), fill=(100, 70, 40))
        draw.polygon(((left, 195), (left + 15, 140), (left + 30, 195)), fill=(30, 90, 50))
    return image


def main():
    folder = ROOT / "tests" / "golden" / "vision_tiny"
    model, _ = k3jax.load(folder, dtype=jnp.float32, tokenizer=False)
    items = vision.read([scene()], model.config)
    features = model.encode_images(items)[0]
    rows = features / np.linalg.norm(features, axis=1, keepdims=True)
    chosen = 5 * (items[0].grid[2] // 2) + 5  # a token of the house
    figure = show(items[0], rows @ rows[chosen], label="likeness to token (5, 5)")
    figure.axes[1].plot(5.5, 5.5, "wx")
    figure.savefig(ROOT / "docs" / "pictures" / "vision.png", dpi=90)


if __name__ == "__main__":
    main()
