"""Images come back as they were written, to every process, within a bound, and never damaged."""

import errno
import os
import subprocess
import sys
from threading import Event

import numpy as np
import pytest

from entame_hf.data import cache as module
from entame_hf.data.cache import ImageCache, cache_folder, open_cache
from entame_hf.data.pipeline import DecodedImage

LENGTH = 4096


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)


def image(row: int) -> DecodedImage:
    pixels = np.random.default_rng(row).integers(0, 256, LENGTH, dtype=np.uint8)
    return DecodedImage(pixels, 1.5 + row, row + 1)


def filled(key: str = "a", rows: int = 10, limit: int = 10**9) -> ImageCache:
    cache = ImageCache(key, rows, LENGTH, limit)
    for row in range(cache.kept):
        cache.write(row, image(row))
    return cache


def read(cache: ImageCache, rows: list[int]) -> tuple[np.ndarray, list[bool]]:
    out = np.zeros((len(rows), LENGTH), np.uint8)
    return out, cache.read(np.array(rows), out).tolist()


def flip(key: str, offset: int) -> None:
    """Change a byte of a cache's file."""
    with open(cache_folder() / f"{key}.images", "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def test_what_was_written_is_read():
    cache = ImageCache("a", 10, LENGTH, 10**9)
    assert read(cache, [3, 4])[1] == [False, False]
    for row in (3, 7):
        cache.write(row, image(row))
    out, here = read(cache, [7, 5, 3, 7])
    assert here == [True, False, True, True]
    for position, row in ((0, 7), (2, 3), (3, 7)):
        assert np.array_equal(out[position], image(row).pixels)
    assert cache.fraction() == 0.2
    assert cache.index[["content", "ratio"]][[3, 4]].tolist() == [(4, 4.5), (0, 0.0)]


def test_images_are_written_while_the_next_ones_come(monkeypatch):
    cache, goes_on = ImageCache("a", 10, LENGTH, 10**9), Event()
    write = cache.write
    monkeypatch.setattr(cache, "write", lambda row, image: goes_on.wait(10) and write(row, image))
    cache.start_writing({row: image(row) for row in range(4)})
    assert not cache.has(np.arange(4)).any()
    goes_on.set()
    cache.start_writing({9: image(9)})
    assert cache.has(np.arange(4)).all()
    cache.start_writing({})
    assert read(cache, [2, 9])[1] == [True, True]


def test_threads_copy_parts_of_a_batch(monkeypatch):
    monkeypatch.setattr(module, "_COPY_BYTES", 3 * LENGTH)
    rows = [9, 2, 2, 0, 7, 5, 4, 1]
    out, here = read(filled(), rows)
    assert all(here)
    assert all(np.array_equal(out[position], image(row).pixels) for position, row in enumerate(rows))


@pytest.mark.runs
def test_other_processes_share_it():
    cache = ImageCache("a", 10, LENGTH, 10**9)
    code = (
        "import sys, datasets, numpy as np; datasets.config.HF_DATASETS_CACHE = sys.argv[1];"
        "from entame_hf.data.cache import ImageCache; from entame_hf.data.images import DecodedImage;"
        f"image = DecodedImage(np.full({LENGTH}, 9, np.uint8), 1.0, 5);"
        f"ImageCache('a', 10, {LENGTH}, 10**9).write(2, image)"
    )
    subprocess.run([sys.executable, "-c", code, str(cache_folder().parent)], check=True)
    out, here = read(cache, [2])
    assert here == [True]
    assert (out == 9).all()
    assert read(ImageCache("a", 10, LENGTH, 10**9), [2])[1] == [True]


@pytest.mark.parametrize("rows", [[5], [4, 5, 6]], ids=["alone", "in_a_batch"])
@pytest.mark.parametrize("offset", [4096 + 5 * LENGTH + 100, 4096 + 6 * LENGTH - 1, 5 * 24 + 8, 5 * 24 + 18])
def test_changed_bytes_are_noticed(rows, offset):
    # In the middle and at the end of the pixels, in the hash of the file and in the ratio.
    filled()
    flip("a", offset)
    cache = ImageCache("a", 10, LENGTH, 10**9)
    assert read(cache, rows)[1] == [row != 5 for row in rows]
    assert not cache.has(np.array([5]))[0]
    cache.write(5, image(5))
    assert np.array_equal(read(cache, [5])[0][0], image(5).pixels)


def test_an_image_that_was_not_written_to_its_end_is_not_cached():
    cache = filled()
    with open(cache_folder() / "a.images", "r+b") as file:
        file.seek(4096 + 5 * LENGTH + 1000)
        file.write(bytes(LENGTH - 1000))
    assert read(cache, [5, 6])[1] == [False, True]


def test_the_bound_holds():
    cache = ImageCache("a", 10, LENGTH, 5 * LENGTH + 100)
    assert cache.kept == 4
    cache.write(4, image(4))
    cache.write(3, image(3))
    assert read(cache, [3, 4])[1] == [True, False]
    assert (cache_folder() / "a.images").stat().st_size <= 5 * LENGTH
    # A cache in use is not removed for another, and takes its room.
    other = ImageCache("b", 10, LENGTH, 8 * LENGTH)
    assert other.kept == 2
    del cache, other
    (cache_folder() / "of-an-older-version.records").write_bytes(bytes(LENGTH))
    (cache_folder() / "an-unpacked-archive").mkdir()
    assert ImageCache("c", 6, LENGTH, 7 * LENGTH).kept == 6
    assert {path.name for path in cache_folder().iterdir()} == {"c.images", "lock", "an-unpacked-archive"}


def test_a_higher_limit_makes_room_for_more():
    filled(limit=3 * LENGTH)
    cache = ImageCache("a", 10, LENGTH, 10**9)
    assert cache.kept == 10
    assert read(cache, [0, 1, 2])[1] == [True, True, False]
    cache.write(9, image(9))
    assert read(cache, [9])[1] == [True]


def test_disk_space_is_reserved_before_it_is_promised():
    cache = ImageCache("a", 1000, LENGTH, 10**9)
    assert os.stat(cache_folder() / "a.images").st_blocks * 512 >= cache.kept * LENGTH == 1000 * LENGTH


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_without_disk_space_nothing_is_cached(monkeypatch, number):
    def full(*_):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        assert open_cache(["a"], 10, LENGTH, 10**9) is None
    cache = ImageCache("a", 10, LENGTH, 10**9)
    cache.write(1, image(1))
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        cache.write(2, image(2))
    cache.write(3, image(3))
    assert read(cache, [1, 2, 3])[1] == [True, False, False]


def test_half_of_the_free_disk_space_is_left(monkeypatch):
    usage = module.shutil.disk_usage(cache_folder().parent)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: usage._replace(free=10 * LENGTH))
    assert ImageCache("a", 10, LENGTH, 10**9).kept == 4


def test_where_there_can_be_none_there_is_none(monkeypatch, tmp_path):
    assert open_cache(["a"], 10, LENGTH, 0) is None
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "file")
    assert open_cache(["a"], 10, LENGTH, 10**9) is None
