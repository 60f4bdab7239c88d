"""Write the classes of the images of a folder to a CSV file.

entame predict out/photos FOLDER --output predictions.csv
"""

from __future__ import annotations

import csv
import os
import sys
import time
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm
from transformers import BaseImageProcessor, PreTrainedModel

from ..data import HostBatch, ImagePipeline, Preparation, UnreadableImageError, open_folder, threads
from ..errors import InputError
from ..files import write_text
from ..patch import class_names
from ..training_args import option
from .console import duration
from .launch import options_named
from .model import load_trained
from .options import OptionParser

# Of an image that could not be read: where and why.
Unreadable = tuple[str, UnreadableImageError]


@dataclass
class PredictArguments:
    """Say what is predicted and where it is written."""

    output: str = option("predictions.csv", "CSV file that is written: a row per image.")
    top_k: int = option(3, "Classes per image, the most probable first.")
    batch_size: int = option(64, "Images per batch.")
    overwrite: bool = option(False, "Replace the CSV file if it exists.")
    model_revision: str = option("main", "Branch, tag or commit of the model on the Hub.")
    trust_remote_code: bool = option(False, "Run code that the model's repository holds.")
    use_cpu: bool = option(False, "Predict on the CPU where there is a GPU.")

    def __post_init__(self) -> None:
        for name in ("top_k", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}={getattr(self, name)}` must be 1 or more.")


def main(argv: list[str]) -> None:
    """Run `entame predict`."""
    parser = predict_parser()
    with options_named(parser.named):
        given = parser.given(argv)
        (args,) = parser.build(given)
        file = Path(args.output)
        try:
            taken = file.exists() and not (args.overwrite and file.is_file())
        # Too long a name, or a null byte.
        except (OSError, ValueError) as odd:
            raise InputError(f"`output` cannot be a file ({getattr(odd, 'strerror', odd)}). Give another.") from odd
        if taken:
            raise InputError(f"`output={file}` exists. Replace it (`overwrite`) or give another file.")
        files, shown = _image_files(given["folder"])
        model, processor = load_trained(
            given["model"], revision=args.model_revision, trust_remote_code=args.trust_remote_code
        )
        start = time.monotonic()
        device = torch.device("cuda" if torch.cuda.is_available() and not args.use_cpu else "cpu")
        bar = tqdm(total=len(files), unit="image", leave=False, disable=None)
        probabilities, unreadable = predict(model, processor, files, args.batch_size, device, bar.update)
        bar.close()
        if len(unreadable) == len(files):
            raise InputError(f"None of {len(files):,} files could be read: {shown[0]} ({unreadable[0][1]}).")
        write_text(file, predictions_csv(shown, probabilities, unreadable, class_names(model.config), args.top_k))
    for row, (_, error) in unreadable.items():
        print(f"not read: {shown[row]} ({error})", file=sys.stderr)
    rate = len(files) / (time.monotonic() - start)
    print(
        f"{len(files) - len(unreadable):,} images predicted, {len(unreadable):,} not read: {file} "
        f"({duration(time.monotonic() - start)}, {rate:,.0f} images/s)"
    )


def predict_parser() -> OptionParser:
    """Build the parser of `predict`."""
    parser = OptionParser([PredictArguments], "Write the classes of a folder of images to a CSV file.")
    parser.add_argument("model", help="A run's folder, or an id on the Hub.")
    parser.add_argument("folder", help="A folder of images, searched with all folders in it, or one image.")
    return parser


def predict(
    model: PreTrainedModel,
    processor: BaseImageProcessor,
    files: list[str],
    batch_size: int = 64,
    device: torch.device | str = "cpu",
    progress: Any = None,
) -> tuple[np.ndarray, dict[int, Unreadable]]:
    """Predict the classes of images: decoded by all cores while the device works on the batch before.

    Returns probabilities, float32 (N, C), NaN for images that could not be read, and those images by their index.
    """
    classes = len(class_names(model.config))
    placed: Any = model.eval().to(device)
    if torch.device(device).type == "cpu":
        placed.to(memory_format=torch.channels_last)
    pipeline = ImagePipeline(Preparation(processor), None, classes)
    found = np.full((len(files), classes), np.nan, np.float32)
    unreadable: dict[int, Unreadable] = {}
    for rows, batch, errors in _batches(files, pipeline, batch_size):
        unreadable |= errors
        if len(rows):
            with torch.inference_mode():
                logits = placed(pixel_values=pipeline.finish(batch, device)["pixel_values"]).logits
            found[rows] = logits.float().softmax(dim=-1).cpu().numpy()
        if progress is not None:
            progress(len(rows) + len(errors))
    return found, unreadable


def _batches(
    files: list[str], pipeline: ImagePipeline, size: int
) -> Iterator[tuple[np.ndarray, HostBatch, dict[int, Unreadable]]]:
    """Read batches, each while the one before is used: its rows, its images, and what could not be read."""

    def read(start: int) -> tuple[np.ndarray, HostBatch, dict[int, Unreadable]]:
        errors, images = {}, {}
        for row, made in enumerate(threads().map(pipeline.decode, files[start : start + size]), start):
            if isinstance(made, UnreadableImageError):
                errors[row] = files[row], made
            else:
                images[row] = made
        rows = np.array(list(images), np.int64)
        pixels = torch.empty(len(rows), pipeline.length, dtype=torch.uint8)
        for i, image in enumerate(images.values()):
            pixels[i] = torch.from_numpy(image.pixels)
        ratios = torch.tensor([image.ratio for image in images.values()])
        return rows, HostBatch(pixels, ratios, torch.zeros(len(rows), dtype=torch.int64), rows, 0), errors

    with ThreadPoolExecutor(1) as ahead:
        starts = range(0, len(files), size)
        pending = ahead.submit(read, 0)
        for start in starts:
            current = pending.result()
            if start + size < len(files):
                pending = ahead.submit(read, start + size)
            yield current


def predictions_csv(
    files: list[str], probabilities: np.ndarray, unreadable: dict[int, Unreadable], names: list[str], top_k: int
) -> str:
    """Write predictions as CSV: file, label and probability of the `top_k` most probable classes, and errors."""
    top_k = min(top_k, len(names))
    suffixes = ["", *(f"_{rank}" for rank in range(2, top_k + 1))]
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["file", *(f"{name}{s}" for s in suffixes for name in ("label", "probability")), "error"])
    for row, path in enumerate(files):
        if row in unreadable:
            writer.writerow([path, *[""] * (2 * top_k), unreadable[row][1]])
            continue
        best = np.argsort(-probabilities[row], kind="stable")[:top_k]
        cells = [cell for i in best for cell in (names[i], f"{probabilities[row, i]:.6f}")]
        writer.writerow([path, *cells, ""])
    return text.getvalue()


def _image_files(folder: str) -> tuple[list[str], list[str]]:
    """List the images of a folder or zip file, and of all folders in it: their paths, and how these are shown."""
    if os.path.isfile(folder) and not zipfile.is_zipfile(folder):
        files = shown = [folder]
    else:
        root = open_folder(folder)
        files = root.images()
        # A zip file is unpacked elsewhere.
        shown = [path.replace(root.path, os.path.abspath(os.path.expanduser(folder)), 1) for path in files]
    if not files:
        raise InputError(f"{folder} holds no image. Give a folder of images.")
    # A name need not be UTF-8.
    return files, [path.encode(errors="backslashreplace").decode() for path in shown]
