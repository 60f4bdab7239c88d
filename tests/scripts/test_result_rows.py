"""Result rows survive whatever happens to the processes that write them."""

from __future__ import annotations

import json
import multiprocessing
import os
from itertools import chain, zip_longest

import accelerate.state
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from reproduction.processes import Place, take_place
from reproduction.rows import append_row, compact, read_rows, work_file
from reproduction.run import run_suite
from sample_rows import row
from torch.distributed import HashStore

from entame_hf import InputError

pytestmark = pytest.mark.reproduction
TEXT = json.dumps(row())


def seeds(path):
    return [each["seed"] for each in read_rows(path).values()]


@pytest.mark.parametrize("compacted", [False, True])
def test_rows_are_read_as_they_were_written(tmp_path, compacted):
    path = tmp_path / "new" / "suite.parquet"
    assert read_rows(path) == {}
    rows = [row(seed=seed, settings={"kwargs": {"a": 1}, "head_lr": None}) for seed in range(3)]
    for each in rows[::-1]:
        append_row(path, each)
    if compacted:
        compact(path)
        assert not work_file(path).exists()
    for found, written in zip(read_rows(path).values(), rows, strict=True):
        noise = written.pop("energy_noise_share"), found.pop("energy_noise_share")
        assert noise[1] == [pytest.approx(noise[0][0]), pytest.approx(noise[0][1]), None]
        del written["energy_feature_var"]
        assert found.items() >= written.items()


def test_rows_of_a_killed_suite_join_the_others(tmp_path):
    path = tmp_path / "suite.parquet"
    append_row(path, row(seed=0))
    compact(path)
    # The second was compacted, but the process was killed before it removed the work file.
    for seed in (0, 1):
        append_row(path, row(seed=seed))
    assert seeds(path) == [0, 1]
    compact(path)
    assert seeds(path) == [0, 1]
    assert pq.read_metadata(path).num_rows == 2


@pytest.mark.parametrize("left", range(1, len(TEXT), 97))
def test_incomplete_row_is_skipped_and_then_removed(tmp_path, left):
    path = tmp_path / "suite.parquet"
    append_row(path, row())
    with work_file(path).open("a") as file:
        file.write(json.dumps(row(seed=1))[:left])
    assert seeds(path) == [0]
    append_row(path, row(seed=2))
    assert [json.loads(text)["seed"] for text in work_file(path).read_text().splitlines()] == [0, 2]


def test_row_without_its_newline_is_kept(tmp_path):
    path = tmp_path / "suite.parquet"
    work_file(path).write_text(TEXT)
    append_row(path, row(seed=1))
    assert seeds(path) == [0, 1]


def _append(path, process):
    for number in range(50):
        append_row(path, row(seed=50 * process + number, command="x" * 5000))
        if number % 20 == 19:
            compact(path)


def test_processes_write_and_compact_at_once(tmp_path):
    path = tmp_path / "suite.parquet"
    processes = [multiprocessing.get_context("fork").Process(target=_append, args=(path, i)) for i in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert sorted(seeds(path)) == list(range(200))


@pytest.mark.parametrize("kind", ["rows", "parquet", "suffix"])
def test_other_files_are_refused(tmp_path, kind):
    path = tmp_path / "suite.parquet"
    if kind == "rows":
        work_file(path).write_text('{"method": "keep", "seed": 0}\n')
    elif kind == "parquet":
        pq.write_table(pa.table({"method": ["keep"]}), path)
    else:
        path = tmp_path / "suite.jsonl"
    before = {each.name: each.read_bytes() for each in tmp_path.iterdir()}
    with pytest.raises(InputError, match=r"holds other rows|must end in \.parquet"):
        read_rows(path)
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == before


def test_results_that_cannot_be_written_are_refused_before_the_first_run(tmp_path):
    (tmp_path / "suite.jsonl").mkdir()
    with pytest.raises(InputError, match="cannot be written"):
        run_suite("mine", [], tmp_path / "suite.parquet", Place())


def test_processes_agree_on_finished_runs():
    store = HashStore()
    found = [Place(rank, 3, store).agree(own) for rank, own in enumerate((["a", "ä"], [], ["a", "ä", "c"]))]
    assert found == [["a", "ä"]] * 3
    assert Place().agree(["b"]) == ["b"]


@pytest.mark.parametrize("world", [1, 2, 16])
def test_processes_share_the_runs(world):
    items, store = list(range(100)), HashStore() if world > 1 else None
    shares = [Place(rank, world, store).share(items, lambda item: item % 3) for rank in range(world)]
    # In turns, as if all were equally fast.
    found = [[item for item in turn if item is not None] for turn in zip_longest(*shares)]
    assert sorted(chain(*found)) == items
    assert all(len(turn) == world for turn in found[:-1])
    kinds = [len({item % 3 for item in own if item is not None}) for own in zip_longest(*found)]
    assert sum(kinds) <= 3 + world - 1 + 100 % world


def test_finished_process_helps_where_most_is_left():
    store = HashStore()
    slow, fast = (Place(rank, 2, store).share(list(range(10)), lambda item: item) for rank in range(2))
    assert [next(slow), next(slow)] == [0, 1]
    assert list(fast) == [5, 6, 7, 8, 9, 2, 3, 4]
    assert list(slow) == []


@pytest.mark.parametrize(("local_rank", "gpu"), [(0, "5"), (3, "7")])
def test_process_trains_alone_on_one_gpu(monkeypatch, local_rank, gpu):
    environment = {"CUDA_VISIBLE_DEVICES": "5,7", "LOCAL_RANK": str(local_rank), "RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    take_place()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == gpu
    assert not {"RANK", "LOCAL_RANK", "WORLD_SIZE"} & os.environ.keys()


def test_launch_without_multi_gpu_is_explained(monkeypatch, capsys):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert take_place() == Place()
    assert "--multi_gpu" in capsys.readouterr().out


def test_gpus_are_asked_for_their_names_once(monkeypatch):
    asked = []
    monkeypatch.setattr("accelerate.state.check_cuda_p2p_ib_support", lambda: asked.append(1) or True)
    take_place()
    assert [accelerate.state.check_cuda_p2p_ib_support() for _ in range(3)] == [True] * 3
    assert asked == [1]
