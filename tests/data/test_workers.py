"""Processes that are forked to decode."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from datasets import Image as ImageFeature
from PIL import Image
from transformers import ViTImageProcessor

from entame_hf.data import ClassificationDataset, Preparation, StreamingDataset, set_image_size
from entame_hf.data.images import DecodedImage, EncodedImage, UnreadableImageError
from entame_hf.data.pipeline import HostBatch, ImagePipeline
from entame_hf.data.workers import Workers, default_workers


class Ends:
    """What leaves a mark where it ends; it is in a cycle, so that a garbage collection ends it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.itself = folder, self

    def __del__(self) -> None:
        (self.folder / str(os.getpid())).touch()


def collect(row: int, value: int) -> DecodedImage:
    # One of its own is collected there.
    cycle: list = []
    cycle.append(cycle)
    del cycle
    return fill(row, gc.collect())


def fill(row: int, value: int) -> DecodedImage | UnreadableImageError:
    return UnreadableImageError("odd") if row % 2 else DecodedImage(np.full(3, value, np.uint8), row / 2, os.getpid())


def decode(workers: Workers, values: list[int]):
    pixels, ratios = np.zeros((len(values) + 1, 3), np.uint8), np.zeros(len(values) + 1, np.float32)
    positions = np.arange(len(values))[::-1] + 1
    errors = workers.start_decoding(pixels, ratios, positions, np.arange(len(values)), values)()
    return pixels, ratios, [i for i, _ in errors]


@pytest.mark.parametrize("shared", [2**20, 3 * 4096, 1])
@pytest.mark.parametrize("processes", [0, 1, 3])
def test_each_image_gets_to_its_position(processes, shared, monkeypatch):
    # Room for all images, for three and for one.
    monkeypatch.setattr("entame_hf.data.board._PART_BYTES", shared)
    workers = Workers(fill, 3)
    workers.start(processes)
    values = list(range(10, 21))
    for _ in range(2):
        pixels, ratios, unreadable = decode(workers, values)
        assert unreadable == [1, 3, 5, 7, 9]
        for i in range(0, 11, 2):
            assert pixels[11 - i].tolist() == [values[i]] * 3
            assert ratios[11 - i] == i / 2
        assert pixels[0].tolist() == [0, 0, 0]
        values = [value + 40 for value in values]
    workers.stop()


@pytest.mark.parametrize("processes", [0, 2])
def test_rows_are_enough_where_images_can_be_fetched(processes):
    asked = []

    def fetch(rows):
        asked.append(len(rows))
        return (rows * 2).tolist()

    workers = Workers(fill, 3, fetch)
    workers.start(processes)
    pixels, ratios = np.zeros((20, 3), np.uint8), np.zeros(20, np.float32)
    errors = workers.start_decoding(pixels, ratios, np.arange(20), np.arange(20))()
    assert pixels[::2, 0].tolist() == [*range(0, 40, 4)]
    assert [(i, str(error)) for i, error in errors] == [(i, "odd") for i in range(1, 20, 2)]
    # Processes fetch for themselves.
    assert asked == ([] if processes else [20])
    workers.stop()


@pytest.mark.parametrize("cuda", [False, True])
def test_processes_step_back_behind_what_feeds_a_gpu(cuda, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: cuda)
    workers = Workers(lambda row, value: DecodedImage(np.full(3, os.nice(0), np.uint8), 1, 0), 3)
    workers.start(1)
    pixels, *_ = decode(workers, [0])
    # No process can step back further than 19.
    assert pixels[1, 0] == min(os.nice(0) + 10 * cuda, 19)
    workers.stop()


@pytest.mark.parametrize(("cores", "expected"), [(1, 1), (2, 2), (4, 4), (8, 7), (9, 8), (16, 14), (32, 28)])
def test_an_eighth_of_the_cores_is_left_to_the_training(cores, expected, monkeypatch):
    monkeypatch.setattr("entame_hf.data.workers.cores", lambda: cores)
    assert default_workers() == expected


@pytest.mark.parametrize("room", [2**20, 5000, 10])
def test_files_larger_than_their_pixels_reach_the_processes(room, monkeypatch):
    monkeypatch.setattr("entame_hf.data.board._PART_BYTES", room)
    workers = Workers(lambda row, value: fill(2 * row, len(value["bytes"]) // 100), 3)
    workers.start(2)
    # Two of them fit in 5,000 bytes, none in 10: threads decode the others.
    files = [{"bytes": memoryview(bytes(size)), "path": None} for size in (1000, 3000, 2000, 0)]
    for _ in range(4):
        pixels, *_ = decode(workers, files)
        assert pixels[::-1, 0].tolist() == [10, 30, 20, 0, 0]
    workers.stop()


def test_processes_end_when_nobody_refers_to_them():
    workers = Workers(fill, 3)
    workers.start(2)
    processes = workers.processes
    copy = multiprocessing.get_context("fork").Process(target=workers._close)
    copy.start()
    copy.join()
    assert decode(workers, [4, 5])[2] == [1]
    del workers
    gc.collect()
    for process in processes:
        process.join(10)
        assert process.exitcode == 0


def test_many_batches_are_offered_before_the_first_is_taken():
    workers = Workers(fill, 3)
    workers.start(2)
    batches = [(np.zeros((9, 3), np.uint8), np.zeros(9, np.float32)) for _ in range(3)]
    waits = [
        workers.start_decoding(*batch, np.arange(9), np.arange(9) * 2, [n] * 9) for n, batch in enumerate(batches)
    ]
    for n in (2, 0, 1):
        assert waits[n]() == []
        assert (batches[n][0] == n).all()
    # Those who ask meanwhile are served to the end.
    last = workers.start_decoding(*batches[0], np.arange(9), np.arange(9) * 2, [7] * 9)
    workers.stop()
    assert last() == []
    assert (batches[0][0] == 7).all()


def test_those_at_work_when_workers_stop_are_left_to_end():
    def slow(row, value):
        time.sleep(0.5)
        return fill(2 * row, os.getpid() == parent)

    parent = os.getpid()
    workers = Workers(slow, 3)
    workers.start(2)
    pixels, ratios = np.full((1, 3), 9, np.uint8), np.zeros(1, np.float32)
    wait = workers.start_decoding(pixels, ratios, np.arange(1), np.arange(1), [0])
    workers.stop()
    assert wait() == []
    assert (pixels == 0).all()


def test_a_worker_that_is_killed_at_work_costs_no_image(caplog):
    def decode_or_die(row, value):
        if row == 4 and os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
        return fill(2 * row, value)

    parent = os.getpid()
    workers = Workers(decode_or_die, 3)
    workers.start(2)
    pixels, _, errors = decode(workers, [*range(20)])
    assert pixels[:0:-1, 0].tolist() == [*range(20)]
    assert errors == []
    assert caplog.text.count("is memory short?") == 1
    assert workers.processes == []


@pytest.fixture
def paused():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("paused")
def test_what_the_parent_has_thrown_away_ends_in_the_parent(tmp_path):
    Ends(tmp_path)
    workers = Workers(collect, 3)
    workers.start(1)
    assert decode(workers, [0])[0][1, 0] >= 1
    workers.stop()
    assert list(tmp_path.iterdir()) == []
    # As it was.
    assert not gc.isenabled()
    gc.collect()
    assert [int(mark.name) for mark in tmp_path.iterdir()] == [os.getpid()]


@pytest.mark.parametrize("enabled", [True, False])
def test_a_parent_that_collects_goes_on_so(enabled):
    if not enabled:
        gc.disable()
    try:
        workers = Workers(lambda row, value: fill(row, gc.isenabled()), 3)
        workers.start(1)
        assert gc.isenabled() == enabled
        assert decode(workers, [0])[0][1, 0] == 1
        workers.stop()
    finally:
        gc.enable()


def test_an_error_of_a_decoder_keeps_no_memory():
    workers = Workers(lambda row, value: 1 / (value - 1), 3)
    workers.start(1)
    # More often than there are parts of the memory.
    for _ in range(5):
        with pytest.raises(ZeroDivisionError):
            decode(workers, [1])
    workers.stop()


@pytest.mark.parametrize("processes", [0, 2])
@pytest.mark.parametrize("fetches", [False, True])
def test_files_that_a_gpu_decodes_are_read_in_the_processes(processes, fetches, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    # The second has no room in the memory that is shared: threads read it. The third is decoded all the same.
    files = [{"bytes": bytes([i]) * size, "path": None} for i, size in enumerate((5000, 2**19 + 1, 10, 60000))]

    def read(value):
        data = value["bytes"]
        return EncodedImage(np.frombuffer(data, np.uint8), os.getpid(), 4) if len(data) > 10 else None

    fetch = (lambda rows: [files[i] for i in rows]) if fetches else None
    workers = Workers(lambda row, value: fill(2 * row, 7), 3, fetch, read)
    workers.start(processes)
    pixels, ratios, rows = np.zeros((4, 3), np.uint8), np.zeros(4, np.float32), np.arange(4)
    for _ in range(5):
        rest = dict(workers.start_decoding(pixels, ratios, rows, rows, () if fetches else files, True)())
        assert {i: file.file.tobytes() for i, file in rest.items()} == {i: files[i]["bytes"] for i in (0, 1, 3)}
        assert pixels[2].tolist() == [7] * 3
        here = [i for i, file in rest.items() if file.height == os.getpid()]
        assert sorted(here) == ([1] if processes else [0, 1, 3])
    assert workers.start_decoding(pixels, ratios, rows, rows, () if fetches else files)() == []
    assert (pixels == 7).all()
    workers.stop()


@pytest.mark.parametrize(("processes", "gpu"), [(0, True), (7, True), (8, False), (12, False)])
def test_a_gpu_decodes_where_few_processes_do(processes, gpu, monkeypatch):
    asked = []
    workers = Workers(fill, 3)
    workers.processes = [None] * processes
    monkeypatch.setattr(ImagePipeline, "decodes_on_gpu", True)

    def start_decoding(self, pixels, ratios, positions, rows, values=(), for_gpu=False):
        asked.append(for_gpu)
        return list

    monkeypatch.setattr(Workers, "start_decoding", start_decoding)
    # There is no GPU here whose memory a batch would be copied to.
    monkeypatch.setattr(
        HostBatch,
        "allocate",
        lambda rows, length, epoch, device, new=HostBatch.allocate: new(rows, length, epoch, None),
    )
    rows = Dataset.from_dict({"image": [Image.new("RGB", (9, 9))] * 2, "label": [0, 1]})
    rows = rows.cast_column("image", ImageFeature())
    preparation = Preparation(set_image_size(ViTImageProcessor(), 32), exact=False)
    table = ClassificationDataset(rows, "image", "label", preparation, num_classes=2, cache_gb=0)
    stream = StreamingDataset(rows.to_iterable_dataset(), "image", "label", preparation, num_classes=2)
    for data, batch in ((table, [0, 1]), (stream, [*stream])):
        data._workers = workers
        data.start_reading(batch, 0, torch.device("cuda"))
    assert asked == [gpu] * 2
