"""A source task without any download: glyphs of matplotlib's fonts, and fractals."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample, interpolate, max_pool2d

from entame_hf.data.batches import BatchDataset, to_device

# No digits, as target datasets have them.
GLYPHS = "ABCDEFGHJKLMNPQRSTUVWXYZabdefghmnqrtΓΔΘΛΞΠΣΦΨΩ&?$@"
FONTS = [
    *(f"DejaVuSans{style}" for style in ("", "-Bold", "-Oblique", "-BoldOblique")),
    *(f"DejaVuSansMono{style}" for style in ("", "-Bold", "-Oblique", "-BoldOblique")),
    *(f"DejaVuSerif{style}" for style in ("", "-Bold", "-Italic", "-BoldItalic")),
    *(f"STIXGeneral{style}" for style in ("", "Bol", "Italic", "BolIta")),
]
FRACTALS = 50
CLASSES = len(GLYPHS) + FRACTALS
SIDE = 64
# Pixels of a shape before it is warped.
_EXTENT = 48
# Mean and standard deviation of each channel.
MEAN = STD = 0.5


def glyph_shapes() -> Tensor:
    """Draw every glyph in every font: (glyphs, fonts, 64, 64), uint8."""
    folder = Path(matplotlib.get_data_path(), "fonts", "ttf")
    fonts = [ImageFont.truetype(str(folder / f"{name}.ttf"), 96) for name in FONTS]
    return torch.stack([torch.stack([_draw(glyph, font) for font in fonts]) for glyph in GLYPHS])


def _draw(glyph: str, font: ImageFont.FreeTypeFont) -> Tensor:
    left, top, right, bottom = font.getbbox(glyph)
    shape = Image.new("L", (round(right - left), round(bottom - top)))
    ImageDraw.Draw(shape).text((-left, -top), glyph, 255, font)
    shape.thumbnail((_EXTENT, _EXTENT))
    canvas = Image.new("L", (SIDE, SIDE))
    canvas.paste(shape, ((SIDE - shape.width) // 2, (SIDE - shape.height) // 2))
    return torch.from_numpy(np.array(canvas))


def fractal_shapes(seed: int) -> Tensor:
    """Draw attractors of random iterated function systems: (50, 16, 64, 64), uint8.

    A class is a system of four affine maps; its variants change each number by up to a tenth. Systems that fill less
    than a fifth of the image are left out.

    Source: [Pre-training without Natural Images](https://arxiv.org/abs/2101.08515).
    """
    generator = torch.Generator().manual_seed(seed)
    candidates = 4 * FRACTALS
    maps = torch.rand(candidates, 4, 2, 3, generator=generator) * 2 - 1
    # Singular values below 1 keep the points inside the image.
    maps[..., :2] *= 0.8 / torch.linalg.matrix_norm(maps[..., :2], 2)[..., None, None].clamp(min=0.8)
    filled = (_attractors(maps, generator) > 0).sum((1, 2)) / _EXTENT**2
    maps = maps[filled > 0.2][:FRACTALS]
    variants = maps[:, None] * (1 + 0.1 * (torch.rand(FRACTALS, len(FONTS), 4, 2, 3, generator=generator) * 2 - 1))
    return _attractors(variants.flatten(0, 1), generator).unflatten(0, (FRACTALS, len(FONTS)))


def _attractors(maps: Tensor, generator: torch.Generator, points: int = 256, steps: int = 60) -> Tensor:
    """Move points through maps, drawn in proportion to their determinants, and count the pixels they visit."""
    systems = torch.arange(len(maps))[:, None]
    shares = torch.linalg.det(maps[..., :2]).abs() + 0.01
    choices = torch.multinomial(shares, points * steps, replacement=True, generator=generator).unflatten(
        1, (steps, -1)
    )
    position, path = torch.zeros(len(maps), points, 2), []
    for step in range(steps):
        chosen = maps[systems, choices[:, step]]
        position = (chosen[..., :2] @ position[..., None])[..., 0] + chosen[..., 2]
        path.append(position)
    track = torch.cat(path[10:], 1)
    low, high = track.amin(1, keepdim=True), track.amax(1, keepdim=True)
    margin = (SIDE - _EXTENT) // 2
    x, y = ((track - low) / (high - low) * (_EXTENT - 1) + margin).round().long().unbind(-1)
    cells = (systems * SIDE + y) * SIDE + x
    counts = torch.bincount(cells.flatten(), minlength=len(maps) * SIDE * SIDE).view(-1, SIDE, SIDE)
    return (counts.float().log1p() / 3 * 255).clamp(max=255).to(torch.uint8)


@cache
def all_shapes(seed: int, device: torch.device) -> Tensor:
    """Return the shapes of all classes on a device: (classes, 16, 64, 64), uint8."""
    return torch.cat([glyph_shapes(), fractal_shapes(seed)]).to(device)


class SourceTask(BatchDataset):
    """A dataset of warped, coloured and noisy glyphs and fractals, which no epoch repeats.

    Args:
        count (`int`): The number of images in an epoch; the classes take turns.
        seed (`int`, *optional*, defaults to 0): Decides the fractals and the images.
        evaluation (`bool`, *optional*, defaults to `False`):
            Whether the images differ from those of training and are the same in every epoch.
    """

    def __init__(self, count: int, seed: int = 0, evaluation: bool = False) -> None:
        self.count, self.seed, self.evaluation = count, seed, evaluation

    def __len__(self) -> int:
        return self.count

    def start_copying(self, indices: list[int], epoch: int, device: torch.device) -> Callable[[], Any]:
        return partial(self.read, indices, epoch, device)

    def read(self, indices: list[int], epoch: int, device: torch.device) -> tuple[list[int], int]:
        return indices, -1 if self.evaluation else epoch

    def finish(self, batch: tuple[list[int], int], device: torch.device) -> dict[str, Tensor]:
        indices, epoch = batch
        generator = torch.Generator(device).manual_seed(hash((self.seed, epoch, *indices)))
        labels = to_device(torch.tensor(indices), torch.device(device)) % CLASSES
        shapes = all_shapes(self.seed, torch.device(device))
        variants = torch.randint(shapes.shape[1], labels.shape, generator=generator, device=device)
        return {"pixel_values": render(shapes[labels, variants], generator), "labels": labels}


def render(shapes: Tensor, generator: torch.Generator) -> Tensor:
    """Draw images (N, 3, 64, 64), normalised with [`MEAN`] and [`STD`], of shapes (N, 64, 64), uint8."""
    count, device = len(shapes), shapes.device

    def uniform(low: float, high: float, *size: int) -> Tensor:
        return torch.rand(count, *size, generator=generator, device=device) * (high - low) + low

    def field(cells: int) -> Tensor:
        """Return smooth noise in about [-1, 1]."""
        coarse = uniform(-1, 1, 3, cells, cells)
        return interpolate(coarse, size=(SIDE, SIDE), mode="bilinear", align_corners=False)

    ink = shapes[:, None].float() / 255
    # Strokes of many widths.
    thick, thin = max_pool2d(ink, 3, 1, 1), -max_pool2d(-ink, 3, 1, 1)
    width = uniform(-0.8, 1, 1, 1, 1)
    ink = ink + width.clamp(min=0) * (thick - ink) + (-width).clamp(min=0) * (thin - ink)

    # From plain to hard, so that a model that learns nothing from the hardest can start with the others.
    hard = uniform(0, 1)
    angle, shear, across, down = hard * uniform(-0.3, 0.3, 4).T
    scale, stretch = 1 + hard * uniform(-0.3, 0.3), 1 + hard * uniform(-0.2, 0.2)
    rows = [
        torch.stack([angle.cos() * scale * stretch, angle.sin() * scale + shear, across], -1),
        torch.stack([-angle.sin() * scale * stretch, angle.cos() * scale, down], -1),
    ]
    grid = affine_grid(torch.stack(rows, 1), [count, 1, SIDE, SIDE], align_corners=False)
    hard = hard[:, None, None, None]
    grid = grid + hard * 0.1 * field(5)[:, :2].permute(0, 2, 3, 1)
    ink = grid_sample(ink, grid, align_corners=False)

    ground = uniform(0, 1, 3, 1, 1)
    # Never close to the ground's colour.
    colour = (ground + uniform(0.3, 0.7, 3, 1, 1)) % 1
    grey, plain = uniform(0, 1, 2, 1, 1).split(1, dim=1)
    ground, colour = (torch.where(grey < 0.5, c[:, :1], c) for c in (ground, colour))
    ground, colour = ground.where(plain > 0.3, 0), colour.where(plain > 0.3, 1)
    texture = hard * uniform(0, 0.2, 1, 1, 1) * field(8)
    image = ground + texture + ink * (colour - ground)
    noise = torch.randn(image.shape, generator=generator, device=device)
    image = (image + hard * uniform(0, 0.08, 1, 1, 1) * noise).clamp(0, 1)
    return (image - MEAN) / STD
