"""Draw image files to train on."""

from __future__ import annotations

import io
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

# Pictures that are drawn. More files hold the same ones again, each with a comment of its own.
DISTINCT = 16_384


def draw_image(path: Path, width: int, height: int) -> None:
    """Write an image that compresses like a photograph: smooth fields, texture, shapes and a little noise."""
    random = np.random.default_rng(int(path.stem))
    fields = [
        random.integers(0, 256, (6, 8, 3), dtype=np.uint8),
        random.integers(0, 256, (94, 125, 3), dtype=np.uint8),
    ]
    smooth, texture = (
        np.asarray(Image.fromarray(field).resize((width, height), Image.Resampling.BICUBIC), np.float32)
        for field in fields
    )
    noisy = smooth + (texture - 128) / 6 + random.normal(0, 4, (height, width, 1))
    image = Image.fromarray(noisy.clip(0, 255).astype(np.uint8))
    canvas = ImageDraw.Draw(image)
    for _ in range(8):
        x, y, side = (int(random.integers(0, limit)) for limit in (width, height, width // 4 + 1))
        canvas.ellipse([x, y, x + side, y + side], fill=tuple(int(v) for v in random.integers(0, 256, 3)))
    # Large photographs usually are JPEG files, small pictures PNG files.
    options: dict[str, Any] = {"format": "JPEG", "quality": 90} if path.suffix == ".jpg" else {"format": "PNG"}
    data = io.BytesIO()
    image.save(data, **options)
    path.write_bytes(data.getvalue())


def _repeat(path: Path) -> None:
    """Write the picture of another file, with a comment that makes this file another one."""
    number = int(path.stem)
    first = number % DISTINCT
    data = (path.parents[1] / str(first % 10) / f"{first}{path.suffix}").read_bytes()
    comment = str(number).encode()
    # A comment may follow the two bytes that begin a JPEG file.
    path.write_bytes(data[:2] + b"\xff\xfe" + (2 + len(comment)).to_bytes(2, "big") + comment + data[2:])


def draw_images(folder: Path, count: int, size: int) -> None:
    """Write images of ten classes: JPEG files of 500×375 px, or PNG files of `size` if that is at most 64."""
    width, height, suffix = (500, 375, ".jpg") if size > 64 else (size, size, ".png")
    paths = [folder / str(i % 10) / f"{i}{suffix}" for i in range(count)]
    for path in paths[:10]:
        path.parent.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor() as pool:
        distinct = DISTINCT if suffix == ".jpg" else count
        list(pool.map(partial(draw_image, width=width, height=height), paths[:distinct], chunksize=64))
        list(pool.map(_repeat, paths[distinct:], chunksize=256))
