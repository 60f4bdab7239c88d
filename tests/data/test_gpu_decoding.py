"""Where a GPU decodes, batches are those of the processes. Here the CPU stands in for the GPU."""

from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from test_batches import PROCESSOR, _own_cache, folder, table_of  # noqa: F401

from entame_hf.data import ClassificationDataset, Preparation, StreamingDataset, decode_pixels
from entame_hf.data.images import UnreadableImageError
from entame_hf.data.pipeline import HostBatch, ImagePipeline

PREPARATION = Preparation(PROCESSOR, exact=False)


class Gpu:
    """A device that is CUDA's by name."""

    type = "cuda"


@pytest.fixture
def decoded(monkeypatch) -> list[int]:
    """Decode on the CPU what a GPU would: how many files there were in each call; it fails if one is broken."""
    counts: list[int] = []
    allocate = HostBatch.allocate

    def decode(files, device):
        assert device is GPU
        counts.append(len(files))
        try:
            return [decode_pixels(data) for data in files]
        except UnreadableImageError:
            return None

    monkeypatch.setattr("entame_hf.data.pipeline.decode_on_gpu", decode)
    monkeypatch.setattr("entame_hf.data.pipeline.gpu_decoder", lambda: decode)
    monkeypatch.setattr(HostBatch, "allocate", lambda rows, length, epoch, _: allocate(rows, length, epoch, None))
    return counts


GPU = Gpu()


def pixels_of(batch: HostBatch) -> np.ndarray:
    return batch.pixels_on(torch.device("cpu")).numpy().astype(int)


def table(folder, cache_gb: float = 0) -> ClassificationDataset:  # noqa: F811
    return ClassificationDataset(table_of(folder), "image", "label", PREPARATION, cache_gb=cache_gb)


@pytest.fixture
def broken(tmp_path, folder):  # noqa: F811
    """The images, and one JPEG whose header is whole."""
    for path in folder.glob("*/*"):
        target = tmp_path / "broken" / path.parent.name / path.name
        target.parent.mkdir(parents=True, exist_ok=True)
        data = path.read_bytes()
        # Without its quantization tables.
        target.write_bytes(data.replace(b"\xff\xdb", b"\xff\xef") if path.name == "5.jpg" else data)
    return tmp_path / "broken"


@pytest.mark.parametrize("processes", [0, 2])
@pytest.mark.parametrize("cache_gb", [0, 1])
def test_a_gpu_decodes_what_it_can_and_processes_the_rest(folder, decoded, monkeypatch, processes, cache_gb):  # noqa: F811
    expected = table(folder).read(list(range(60)))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    data = table(folder, cache_gb)
    data.start_workers(processes)
    for batch in (data.read(list(range(60)), device=GPU) for _ in range(2)):
        assert abs(pixels_of(batch) - pixels_of(expected)).max() <= 2
        assert torch.equal(batch.ratios, expected.ratios)
        assert torch.equal(batch.labels, expected.labels)
        if data._cache is not None:
            data._cache.start_writing({})
    # Half of the files are JPEGs. With a cache, nothing is decoded again.
    assert decoded == [30] * (1 if cache_gb else 2)
    if data._cache is not None:
        known = table(folder, cache_gb)
        assert known._cache.fraction() == 1
        assert pixels_of(known.read(list(range(60)))).tolist() == pixels_of(batch).tolist()
    data._workers.stop()


@pytest.mark.parametrize("processes", [0, 2])
def test_threads_decode_what_a_gpu_could_not(broken, decoded, monkeypatch, processes):
    expected = table(broken).read(list(range(60)))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    data = table(broken)
    data.start_workers(processes)
    batch = data.read(list(range(60)), device=GPU)
    assert np.array_equal(pixels_of(batch), pixels_of(expected))
    assert decoded == [30]
    assert data.unreadable.summary() == table_summary(broken)
    data._workers.stop()


def table_summary(folder) -> str:  # noqa: F811
    data = table(folder)
    data.read(list(range(60)))
    return data.unreadable.summary()


@pytest.mark.parametrize("processes", [0, 2])
@pytest.mark.parametrize("damaged", [False, True])
def test_streams_are_decoded_alike(folder, broken, decoded, monkeypatch, processes, damaged):  # noqa: F811
    rows = table_of(broken if damaged else folder).cast_column("image", datasets.Image(decode=False))
    values = [{"bytes": Path(image["path"]).read_bytes(), "path": image["path"]} for image in rows["image"]]
    rows = datasets.Dataset.from_dict({"image": values, "label": rows["label"]}, features=rows.features)

    def read(device):
        data = StreamingDataset(rows.to_iterable_dataset(), "image", "label", PREPARATION, evaluation=True)
        data.start_workers(processes)
        batch = data.read([*data], device=device)
        data._workers.stop()
        return batch, data.unreadable.summary()

    expected, unreadable = read(None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    batch, found = read(GPU)
    assert abs(pixels_of(batch) - pixels_of(expected)).max() <= 2
    assert torch.equal(batch.labels, expected.labels)
    assert (found, decoded) == (unreadable, [30])
    assert (unreadable is not None) == damaged


@pytest.mark.parametrize("processes", [0, 3])
def test_images_of_many_sizes_keep_their_places(tmp_path, decoded, monkeypatch, processes):
    random = np.random.default_rng(0)
    # More than a process reads at a time; groups of one size, and sizes of one image.
    sizes = [(40, 50), (50, 40), (40, 50), (30, 90), *[(40, 40 + i // 8) for i in range(80)]]
    for i, (height, width) in enumerate(sizes):
        (tmp_path / str(i % 2)).mkdir(exist_ok=True)
        flat = np.full((height, width, 3), random.integers(256, size=3), np.uint8)
        Image.fromarray(flat).save(tmp_path / str(i % 2) / f"{i}.jpg")
    expected = table(tmp_path).read(list(range(len(sizes))))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    data = table(tmp_path)
    data.start_workers(processes)
    for _ in range(2):
        batch = data.read(list(range(len(sizes))), device=GPU)
        assert abs(pixels_of(batch) - pixels_of(expected)).max() <= 1
        assert torch.equal(batch.ratios, expected.ratios)
    assert decoded == [84, 84]
    data._workers.stop()


def test_an_evaluation_asks_no_gpu(monkeypatch):
    monkeypatch.setattr("entame_hf.data.pipeline.gpu_decoder", lambda: 1)
    assert not ImagePipeline(Preparation(PROCESSOR), None, 2).decodes_on_gpu
    assert ImagePipeline(PREPARATION, None, 2).decodes_on_gpu
