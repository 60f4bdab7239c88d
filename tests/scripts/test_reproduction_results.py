"""The file of result lines survives whatever happens to the processes that write it."""

from __future__ import annotations

import json
import multiprocessing
import os
from itertools import chain, zip_longest

import pytest
from reproduction.processes import Place, take_place
from reproduction.results import append_line, done, identity, read_lines
from reproduction.running import run_suite
from torch.distributed import HashStore

from entame_hf import InputError

LINE = {"model": "M", "dataset": "D", "method": "keep", "seed": 0, "settings": {"learning_rate": 1e-4}, "rest": [1, 2]}


def test_lines_are_read_as_they_were_written(tmp_path):
    path = tmp_path / "new" / "results.jsonl"
    assert read_lines(path) == []
    lines = [LINE | {"seed": seed} for seed in range(3)]
    for line in lines:
        append_line(path, line)
    assert read_lines(path) == lines
    assert done(path) == {identity("M", "D", "keep", seed, {"learning_rate": 1e-4}) for seed in range(3)}


@pytest.mark.parametrize("left", range(1, len(json.dumps(LINE)), 7))
def test_what_is_left_of_a_torn_line_is_passed_over_and_then_gone(tmp_path, left):
    path = tmp_path / "results.jsonl"
    append_line(path, LINE)
    with path.open("a") as file:
        file.write(json.dumps(LINE | {"seed": 1})[:left])
    assert read_lines(path) == [LINE]
    append_line(path, LINE | {"seed": 2})
    assert [json.loads(line)["seed"] for line in path.read_text().splitlines()] == [0, 2]


def test_a_line_whose_end_alone_is_missing_is_kept(tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_text(json.dumps(LINE))
    append_line(path, LINE | {"seed": 1})
    assert [line["seed"] for line in read_lines(path)] == [0, 1]


def _append(path, process):
    for number in range(50):
        append_line(path, LINE | {"seed": 50 * process + number, "rest": "x" * 5000})


def test_processes_may_write_at_once(tmp_path):
    path = tmp_path / "results.jsonl"
    processes = [multiprocessing.get_context("fork").Process(target=_append, args=(path, i)) for i in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert sorted(json.loads(line)["seed"] for line in path.read_text().splitlines()) == list(range(200))


def test_a_file_of_something_else_is_refused_and_left_as_it_is(tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_text('{"method": "keep", "seed": 0}\n')
    with pytest.raises(InputError, match="give another file"):
        done(path)
    assert path.read_text() == '{"method": "keep", "seed": 0}\n'


def test_processes_agree_on_what_is_done():
    store = HashStore()
    found = [Place(rank, 3, store).agree(own) for rank, own in enumerate((["a", "ä"], [], ["a", "ä", "c"]))]
    assert found == [["a", "ä"]] * 3
    assert Place().agree(["b"]) == ["b"]


@pytest.mark.parametrize("world", [1, 2, 16])
def test_processes_share_the_runs(world):
    cells, store = list(range(100)), HashStore() if world > 1 else None
    shares = [Place(rank, world, store).share(cells, lambda cell: cell % 3) for rank in range(world)]
    # In turns: all are as fast as each other.
    found = [[cell for cell in turn if cell is not None] for turn in zip_longest(*shares)]
    assert sorted(chain(*found)) == cells
    assert all(len(turn) == world for turn in found[:-1])
    by_process = list(zip_longest(*found))
    kinds = [len({cell % 3 for cell in own if cell is not None}) for own in by_process]
    assert sum(kinds) <= 3 + world - 1 + 100 % world


def test_who_is_done_helps_where_most_is_left():
    store = HashStore()
    slow, fast = (Place(rank, 2, store).share(list(range(10)), lambda cell: cell) for rank in range(2))
    assert [next(slow), next(slow)] == [0, 1]
    assert list(fast) == [5, 6, 7, 8, 9, 2, 3, 4]
    assert list(slow) == []


@pytest.mark.parametrize(("local_rank", "gpu"), [(0, "5"), (3, "7")])
def test_a_process_trains_alone_on_one_gpu(monkeypatch, local_rank, gpu):
    environment = {"CUDA_VISIBLE_DEVICES": "5,7", "LOCAL_RANK": str(local_rank), "RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    take_place()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == gpu
    assert not {"RANK", "LOCAL_RANK", "WORLD_SIZE"} & os.environ.keys()


def test_several_processes_that_accelerate_did_not_start(monkeypatch, capsys):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert take_place() == Place()
    assert "--multi_gpu" in capsys.readouterr().out


def test_a_file_that_cannot_be_written_costs_no_run(tmp_path):
    with pytest.raises(InputError, match="cannot be written"):
        run_suite("mine", [], tmp_path, Place())
