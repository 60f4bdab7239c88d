"""Records come back as they were put, to every process, within a bound, and never half."""

import os
import subprocess
import sys

import numpy as np
import pytest

from entame_hf.data import cache as module
from entame_hf.data.cache import RecordCache, cache_folder, open_cache

LENGTH = 4096


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)


def record(row: int) -> np.ndarray:
    return np.random.default_rng(row).integers(1, 256, LENGTH, dtype=np.uint8)


def taken(cache: RecordCache, rows: list[int]) -> tuple[np.ndarray, list[int]]:
    out = np.zeros((len(rows), LENGTH), np.uint8)
    return out, cache.take(np.array(rows), out).tolist()


def test_what_was_put_is_taken():
    cache = RecordCache("a", 10, LENGTH, 10**9)
    assert taken(cache, [3, 4])[1] == [0, 1]
    assert all(cache.put(row, record(row)) for row in (3, 7))
    out, missing = taken(cache, [7, 5, 3, 7])
    assert missing == [1]
    for position, row in ((0, 7), (2, 3), (3, 7)):
        assert np.array_equal(out[position], record(row))
    assert cache.share() == 0.2


def test_threads_copy_parts_of_a_batch(monkeypatch):
    monkeypatch.setattr(module, "_PART", 3 * LENGTH)
    cache = RecordCache("a", 10, LENGTH, 10**9)
    assert all(cache.put(row, record(row)) for row in range(10))
    rows = [9, 2, 2, 0, 7, 5, 4, 1]
    out, missing = taken(cache, rows)
    assert not missing
    assert all(np.array_equal(out[position], record(row)) for position, row in enumerate(rows))


def test_other_processes_share_it():
    cache = RecordCache("a", 10, LENGTH, 10**9)
    code = (
        "import sys, datasets, numpy as np; datasets.config.HF_DATASETS_CACHE = sys.argv[1];"
        "from entame_hf.data.cache import RecordCache;"
        f"RecordCache('a', 10, {LENGTH}, 10**9).put(2, np.full({LENGTH}, 9, np.uint8))"
    )
    subprocess.run([sys.executable, "-c", code, str(cache_folder().parent)], check=True)
    out, missing = taken(cache, [2])
    assert not missing
    assert (out == 9).all()
    assert taken(RecordCache("a", 10, LENGTH, 10**9), [2])[1] == []


def test_a_record_cut_off_is_none():
    cache = RecordCache("a", 10, LENGTH, 10**9)
    with open(cache_folder() / "a.records", "r+b") as file:
        file.seek(5 * LENGTH)
        file.write(record(5)[:-4].tobytes())
    assert taken(cache, [5])[1] == [0]


def test_the_bound_holds(caplog):
    cache = RecordCache("a", 10, LENGTH, 4 * LENGTH + 100)
    assert cache.kept == 4
    assert not cache.put(4, record(4))
    assert cache.put(3, record(3))
    assert taken(cache, [3, 4])[1] == [1]
    assert (cache_folder() / "a.records").stat().st_size <= 4 * LENGTH
    # What is in use isn't removed for another, and takes its room.
    other = RecordCache("b", 10, LENGTH, 6 * LENGTH)
    assert other.kept == 2
    del cache, other
    assert RecordCache("c", 6, LENGTH, 6 * LENGTH).kept == 6
    assert [path.name for path in sorted(cache_folder().glob("*.records"))] == ["c.records"]


def test_a_full_disk_stops_keeping_and_nothing_else(monkeypatch):
    cache = RecordCache("a", 10, LENGTH, 10**9)
    assert cache.put(1, record(1))

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    assert not cache.put(2, record(2))
    monkeypatch.undo()
    assert not cache.put(3, record(3))


def test_where_there_can_be_none_there_is_none(monkeypatch, tmp_path):
    assert open_cache(["a"], 10, LENGTH, 0) is None
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "file")
    assert open_cache(["a"], 10, LENGTH, 10**9) is None


def test_another_boot_has_another_cache(monkeypatch):
    open_cache(["a"], 10, LENGTH, 10**9).put(1, record(1))
    assert taken(open_cache(["a"], 10, LENGTH, 10**9), [1])[1] == []
    monkeypatch.setattr(module, "this_boot", lambda: "another")
    assert taken(open_cache(["a"], 10, LENGTH, 10**9), [1])[1] == [0]
