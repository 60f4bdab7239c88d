"""k processes of b examples are one process of k·b."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from itertools import chain
from pathlib import Path

import pytest
import torch
import train as worker
from conftest import launch_by
from evaluate_all import WEIGHTS
from hub_server import HubServer
from torch.nn.functional import cross_entropy

pytestmark = pytest.mark.runs

WORKER = Path(__file__).parent / "train.py"
GLOBAL_BATCH = 24


def launch(processes: int, *arguments: str, timeout: int = 180) -> subprocess.CompletedProcess:
    several = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    command = [sys.executable, *several, *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment)


def train(folder: Path, processes: int, batch: int | None = None, **options) -> list[dict]:
    folder.mkdir(exist_ok=True)
    options = {"double": True, "per_device_train_batch_size": batch or GLOBAL_BATCH // processes, **options}
    if processes == 1:
        # Here: starting Python and its libraries takes longer than the training.
        worker.main(str(folder), json.dumps(options))
    else:
        result = launch(processes, str(WORKER), str(folder), json.dumps(options))
        assert result.returncode == 0, result.stderr[-3000:]
    return states(folder, processes)


def states(folder: Path, processes: int) -> list[dict]:
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(processes)]


WARM = {"entame_method": "base_wu", "optim": "adamw_torch", "learning_rate": 1e-3}
# What two processes train, in one go.
IN_TWO = {
    "accumulated": {"count": 41, "gradient_accumulation_steps": 2},
    "ignored": {"count": 48, "ignored": 20, "gradient_accumulation_steps": 2},
    "warm": {**WARM, "max_steps": 1},
    "later": {**WARM, "max_steps": 3},
    "local": {"max_steps": 2, "znorm_sync": False, "znorm_refresh_samples": 0},
    "fn": {"max_steps": 3, "entame_method": "fn"},
    "energies": {"max_steps": 2},
    "blind": {"max_steps": 2, "blind_rank": 1, "entame_method": "base"},
    "head_lr": {"max_steps": 3, "head_lr": "auto", "optim": "sgd"},
    "evaluations": {"evaluate": True},
    "dropout": {"max_steps": 4, "dropout": 0.5, "save_strategy": "steps", "save_steps": 2},
    "resumed": {"max_steps": 4, "dropout": 0.5, "resume": "dropout/checkpoint-2"},
    "frozen": {"max_steps": 2, "freeze_backbone": True},
    "informed": {"max_steps": 2, "entame_method": "informed", "count": 41},
    # They have no view without mixing.
    "mixed": {"max_steps": 4, "count": 39, "mixed": True, "znorm_refresh_samples": 0},
}
IN_THREE = {"uneven": {"count": 22}, "evaluations": {"evaluate": True}}


def train_all(folder: Path, processes: int, runs: dict[str, dict]) -> dict[str, list[dict]]:
    common = {"double": True, "per_device_train_batch_size": GLOBAL_BATCH // processes}
    for name in runs:
        (folder / name).mkdir()
    given = []
    for name, options in runs.items():
        resume = {"resume": str(folder / options["resume"])} if "resume" in options else {}
        given.append((str(folder / name), json.dumps({**common, **options, **resume})))
    # As README has it for CPUs.
    how = ["--num_processes", str(processes), str(WORKER)]
    result = launch_by("cpu", *how, *chain(*given), timeout=180, OMP_NUM_THREADS="1")
    assert result.returncode == 0, result.stderr[-3000:]
    return {name: states(folder / name, processes) for name in runs}


@pytest.fixture(scope="module")
def in_two(tmp_path_factory) -> dict[str, list[dict]]:
    return train_all(tmp_path_factory.mktemp("two"), 2, IN_TWO)


@pytest.fixture(scope="module")
def in_three(tmp_path_factory) -> dict[str, list[dict]]:
    return train_all(tmp_path_factory.mktemp("three"), 3, IN_THREE)


def test_uneven_batches_are_normalised_as_one():
    """22 images on 3 processes are a batch of 22, and a process without an image takes part."""
    result = launch(3, str(WORKER.with_name("normalise.py")), json.dumps([[8, 7, 7], [5, 0, 1]]))
    assert result.returncode == 0, result.stderr[-3000:]


def test_a_process_that_fails_ends_the_job_with_its_message(tmp_path):
    options = {"per_device_train_batch_size": 8, "fails_at": 2, "max_steps": 1000}
    result = launch(2, str(WORKER), str(tmp_path), json.dumps(options))
    assert result.returncode != 0
    assert "this process has had enough" in result.stderr


def test_processes_that_do_not_know_of_each_other_are_refused(tmp_path):
    result = launch(2, str(WORKER), str(tmp_path), json.dumps({"use_cpu": False, "max_steps": 1}))
    assert result.returncode != 0
    assert result.stderr.count("2 processes were started") == 1
    assert not list(tmp_path.iterdir())


def test_two_processes_equal_one_on_batches_of_12_and_8_or_9_accumulated(tmp_path, in_two):
    check_equal(train(tmp_path, 1, **IN_TWO["accumulated"])[0], in_two["accumulated"])


def test_two_processes_equal_one_where_labels_are_ignored(tmp_path, in_two):
    check_equal(train(tmp_path, 1, **IN_TWO["ignored"])[0], in_two["ignored"])


def test_three_processes_equal_one_on_22_images(tmp_path, in_three):
    check_equal(*train(tmp_path, 1, **IN_THREE["uneven"]), in_three["uneven"])


# What is evaluated, and the mean of its loss over the labels that count.
LOSSES = {
    "table": cross_entropy,
    "stream": cross_entropy,
    "stream-read-by-all": cross_entropy,
    "smoothed": partial(cross_entropy, label_smoothing=0.1),
    "weighted": lambda *pair: cross_entropy(*pair, WEIGHTS, reduction="sum") / 22,
    "shares": cross_entropy,
    "unlabelled": cross_entropy,
    "own-loss": cross_entropy,
    "pictures": cross_entropy,
    "streamed-pictures": cross_entropy,
}


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory, in_two, in_three) -> list[dict]:
    (alone,) = train(tmp_path_factory.mktemp("one"), 1, evaluate=True)
    return [alone, *in_two["evaluations"], *in_three["evaluations"]]


@pytest.mark.parametrize("name", LOSSES)
def test_each_example_is_evaluated_once(evaluated, name):
    """Whatever the batches and the processes, and whether streamed or not."""
    table = evaluated[0]["pictures" if "pictures" in name else name if name in ("shares", "unlabelled") else "table"]
    for rank in evaluated:
        logits, labels = rank[name]["logits"], rank[name]["labels"]
        torch.testing.assert_close(logits, table["logits"], rtol=0, atol=1e-5)
        torch.testing.assert_close(labels, table["labels"], rtol=0, atol=0)
        expected = pytest.approx(LOSSES[name](logits, labels).item(), abs=1e-5)
        for metrics in rank[name]["metrics"]:
            assert metrics["eval_loss"] == expected
            assert metrics.get("eval_mean_loss", expected) == expected
            assert metrics.get("eval_examples", 22) == 22
            count = metrics["eval_samples_per_second"] * metrics["eval_runtime"]
            assert count == pytest.approx(22, rel=0.3)


def test_a_backbone_stands_still_on_two_processes(tmp_path, in_two):
    check_equal(*train(tmp_path, 1, **IN_TWO["frozen"]), in_two["frozen"])


def test_two_processes_fit_the_informed_head_of_one(tmp_path, in_two):
    check_equal(*train(tmp_path, 1, **IN_TWO["informed"]), in_two["informed"])


def test_images_are_mixed_with_the_same_ones_on_two_processes(tmp_path, in_two):
    """In batches of 24 and of 15, of which the first process has 8 and the last image stays as it is."""
    check_equal(*train(tmp_path, 1, **IN_TWO["mixed"]), in_two["mixed"])


def test_gradients_are_sent_from_where_they_are(in_two):
    assert not any(rank["copies_gradients"] for rank in in_two["accumulated"])


# In float64: sums in another order.
CLOSE = {"rtol": 1e-9, "atol": 1e-10}


def check_equal(whole, ranks):
    """Weights, statistics and predictions."""
    for rank in ranks:
        torch.testing.assert_close(rank["model"], whole["model"], **CLOSE)
        torch.testing.assert_close(rank["model"], ranks[0]["model"], rtol=0, atol=0)
    torch.testing.assert_close(ranks[0]["predictions"], whole["predictions"], **CLOSE)
    assert len(ranks[0]["predictions"]) == 22


def test_head_warmup(tmp_path, in_two):
    """The backbone has neither moved nor gathered optimizer state until its first step, on every rank."""
    warm, later = in_two["warm"], in_two["later"]
    start = train(tmp_path / "start", 1, max_steps=1, learning_rate=0.0, entame_method="base")[0]["model"]
    for rank in warm:
        moved = {name for name, tensor in rank["model"].items() if not torch.equal(tensor, start[name])}
        assert moved == {"classifier.weight", "classifier.bias"}
        assert rank["stepped"] == 2
    torch.testing.assert_close(later[0]["model"], later[1]["model"], rtol=0, atol=0)
    assert later[0]["stepped"] == len(list(later[0]["model"]))
    (whole,) = train(tmp_path / "one", 1, **IN_TWO["later"])
    torch.testing.assert_close(later[0]["model"], whole["model"], **CLOSE)


def test_statistics_of_each_process_alone_where_asked_for(in_two):
    ranks = in_two["local"]
    means = [rank["model"]["classifier.znorm.mean"] for rank in ranks]
    assert (means[0] - means[1]).abs().max() > 1e-3
    torch.testing.assert_close(ranks[0]["model"]["classifier.weight"], ranks[1]["model"]["classifier.weight"])
    # What is evaluated is what the first process saves, everywhere.
    for rank in ranks:
        torch.testing.assert_close(dict(rank["evaluated"]), ranks[0]["model"], rtol=0, atol=0)


def test_each_process_drops_what_it_draws(in_two):
    """From one head, over the same order of images, and on from where it was after resuming."""
    first, second = in_two["dropout"]
    assert len(first["masks"]) == 4
    for mine, others in zip(first["masks"], second["masks"], strict=True):
        assert mine.float().mean() == pytest.approx(0.5, abs=0.05)
        assert (mine == others).float().mean() == pytest.approx(0.5, abs=0.05)
    torch.testing.assert_close(first["model"], second["model"], rtol=0, atol=0)
    for rank, resumed in zip(in_two["dropout"], in_two["resumed"], strict=True):
        torch.testing.assert_close(resumed["masks"], rank["masks"][2:], rtol=0, atol=0)
        torch.testing.assert_close(resumed["model"], rank["model"], **CLOSE)


def test_a_batch_size_is_not_looked_for_by_each_process(tmp_path):
    result = launch(2, str(WORKER), str(tmp_path), json.dumps({"auto_find_batch_size": True}))
    assert result.returncode != 0
    assert result.stderr.count("auto_find_batch_size works in one process") == 1


def test_a_gradient_flows_through_the_other_ranks_statistics(tmp_path, in_two):
    """Without it the backbones would drift apart from the single process's within these steps."""
    (whole,) = train(tmp_path, 1, **IN_TWO["fn"])
    torch.testing.assert_close(in_two["fn"][0]["model"], whole["model"], **CLOSE)


def energies(log):
    return [{k: v for k, v in entry.items() if k.startswith("energy/")} for entry in log if "energy/total" in entry]


def test_the_energies_are_those_of_all_processes(tmp_path, in_two):
    """Of features that are normalised together, and of gradients that are averaged."""
    (whole,) = train(tmp_path, 1, **IN_TWO["energies"])
    expected = energies(whole["log"])
    assert len(expected) == 2
    for rank in in_two["energies"]:
        for one, several in zip(expected, energies(rank["log"]), strict=True):
            assert "energy/features" in one
            for name, value in one.items():
                # The mean of layer-normalised features is zero.
                tolerance = 1e-6 if name == "energy/feature_mean" else 0
                assert several[name] == pytest.approx(value, rel=1e-3, abs=tolerance), name


def test_a_process_that_has_seen_nothing_stops_no_other(in_two):
    first, second = (energies(rank["log"]) for rank in in_two["blind"])
    assert len(first) == 2
    assert first == second


def test_the_head_rate_is_measured_over_all_processes(tmp_path, in_two):
    """On features that are normalised over all of them, and on the gradients of the whole batch."""
    (whole,), ranks = train(tmp_path, 1, **IN_TWO["head_lr"]), in_two["head_lr"]
    (expected,), first, second = (
        [entry["head_lr"] for entry in rank["log"] if "head_lr" in entry] for rank in (whole, *ranks)
    )
    assert first == second == [pytest.approx(expected, rel=1e-4)]
    torch.testing.assert_close(ranks[0]["model"], ranks[1]["model"], rtol=0, atol=0)
    torch.testing.assert_close(ranks[0]["model"], whole["model"], rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_resuming_from_a_whole_checkpoint_and_pushing_once(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    whole = train(folder, 2, save_strategy="steps", save_steps=2)
    for checkpoint in ("checkpoint-4", "checkpoint-5"):
        (folder / checkpoint / "checkpoint_files.json").write_text("")
    with HubServer() as hub:
        for name, value in hub.environment(tmp_path / "home").items():
            monkeypatch.setenv(name, value)
        resumed = train(folder, 2, resume=True, push_to_hub=True, hub_model_id="ada/tuned")
        assert hub.repos["models", "ada/tuned"].messages == ["initial commit", "End of training"]
    for before, after in zip(whole, resumed, strict=True):
        torch.testing.assert_close(after["model"], before["model"], rtol=0, atol=0)
