"""Runs of a suite: their rows, and the phases of peers."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import timm
import torch
import yaml
from conftest import RandomImages
from reproduce import main as reproduce_main
from reproduction import run as runs
from reproduction.peers import RunArguments
from reproduction.rows import append_row, read_rows, work_file
from reproduction.run import TRAINERS, run_experiment
from reproduction.suite import read_suite

from entame_hf.patch import as_transformers

SCRIPT = Path(__file__).parents[2] / "scripts" / "reproduce.py"
TAKES_TIME = ("seconds", "commit", "processes", "command")
pytestmark = pytest.mark.reproduction


@pytest.fixture(scope="module")
def suite_file(tmp_path_factory):
    """The smoke suite, with a model that trains in seconds."""
    folder = tmp_path_factory.mktemp("suite")
    torch.manual_seed(1)
    as_transformers(timm.create_model("test_resnet", num_classes=20)).save_pretrained(folder / "tiny")
    suite = yaml.safe_load((SCRIPT.parent / "suites" / "smoke.yaml").read_text())
    suite["models"] = {"Tiny": str(folder / "tiny")}
    suite["arguments"] |= {"per_device_train_batch_size": 256, "learning_rate": 1e-3}
    suite["image"] = {"size": 16}
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump(suite, sort_keys=False))
    return path


@pytest.fixture
def experiment(suite_file):
    suite = read_suite(str(suite_file))
    return lambda method: suite.experiments(methods=[method])[0]


def same(row):
    return {key: value for key, value in row.items() if key not in TAKES_TIME}


def test_row_is_complete_and_reproducible(experiment):
    row = run_experiment(experiment("entame"))
    run_experiment(experiment("base"))
    assert same(run_experiment(experiment("entame"))) == same(row)
    assert same(run_experiment(replace(experiment("entame"), seed=1))) != same(row)
    assert json.loads(json.dumps(row, allow_nan=False)) == json.loads(json.dumps(row))
    assert row["steps_per_epoch"] == row["train_size"] // 256 == 5
    assert row["eval_step"] == row["energy_step"] == list(range(1, 11))
    # Accuracies are counts over the whole test split.
    assert all(
        math.isclose(a * row["test_size"], round(a * row["test_size"]), abs_tol=1e-3) for a in row["eval_accuracy"]
    )
    assert row["energy_noise_share"][0] == pytest.approx(1 / 9, abs=1e-4)
    assert {len(values) for name, values in row.items() if name.startswith("energy_")} == {10}


def test_a_run_that_diverges_counts_as_guessing(experiment):
    found = experiment("base")
    settings = {**found.settings, "learning_rate": 1e38, "corruptions": True}
    row = run_experiment(replace(found, settings=settings))
    # What was measured before stays.
    assert row["eval_step"] == list(range(1, 11))
    assert row["eval_accuracy"][-5:] == [0.1] * 5
    assert set(row["corruption_accuracy"]) == {0.1}
    json.dumps(row, allow_nan=False)


def test_zero_head_has_maximum_entropy(experiment):
    row = run_experiment(experiment("zero head"))
    assert row["energy_entropy"][0] == pytest.approx(math.log(10), rel=1e-3)
    assert row["energy_features_share"][0] == 0
    assert row["energy_noise_share"][0] == pytest.approx(1 / 9, abs=1e-4)


def test_images_are_normalised_by_their_own_colours_or_by_those_given(experiment):
    settings = experiment("base").settings
    own, *_ = runs._data(settings["dataset_source"], 16, False, (), ())
    pixels = torch.stack([own[i]["pixel_values"] for i in range(len(own))])
    assert pixels.mean((0, 2, 3)).abs().max() < 1e-3
    assert (pixels.std((0, 2, 3)) - 1).abs().max() < 1e-2
    given, *_ = runs._data(settings["dataset_source"], 16, False, (0.5,) * 3, (0.25,) * 3)
    pixels = torch.stack([given[i]["pixel_values"] for i in range(len(given))])
    assert [pixels.min().item(), pixels.max().item()] == pytest.approx([-2, 2])


def train_peer(tmp_path, **arguments):
    """Train in phases of 3 and 6 steps, and note which parameters train at each step, and how fast."""
    torch.manual_seed(0)
    model = as_transformers(timm.create_model("test_resnet", num_classes=10))
    args = RunArguments(
        str(tmp_path), report_to="none", disable_tqdm=True, save_strategy="no", num_train_epochs=3,
        per_device_train_batch_size=8, use_cpu=True, **arguments,
    )  # fmt: skip
    noted = []

    class Noting(TRAINERS[args.schedule]):
        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs)
            groups = self.optimizer.param_groups
            noted.append(
                {
                    "moving": {name for name, p in self.model.named_parameters() if p.grad is not None},
                    "rates": [group["lr"] for group in groups if group["params"]],
                    "momentum": groups[0]["betas"][0],
                    "remembered": len(self.optimizer.state),
                    "statistics": self.model.timm_model.bn1.running_mean.clone(),
                }
            )
            return loss

    trainer = Noting(model, args, train_dataset=RandomImages(24))
    trainer.train()
    assert len(noted) == 9
    assert all(parameter.requires_grad for parameter in model.parameters())
    return noted, model


HEAD = {"timm_model.fc.weight", "timm_model.fc.bias"}


def parameters(model, kind=torch.nn.Module):
    modules = [(name, module) for name, module in model.named_modules() if isinstance(module, kind)]
    return {f"{name}.{own}" for name, module in modules for own, _ in module.named_parameters(recurse=False)}


@pytest.mark.parametrize("frozen", [True, False])
def test_lp_ft_probes_then_fine_tunes(tmp_path, frozen):
    noted, model = train_peer(
        tmp_path, entame_method="keep", schedule="lp_ft", probe_learning_rate=1e-2, learning_rate=1e-3,
        freeze_statistics=frozen,
    )  # fmt: skip
    probe, rest, every = noted[:3], noted[3:], parameters(model)
    assert all(step["moving"] == HEAD and step["rates"] == [1e-2] * len(step["rates"]) for step in probe)
    assert all(step["moving"] == every and step["rates"] == [1e-3] * len(step["rates"]) for step in rest)
    # BatchNorm has the same mode in both phases.
    equal = [torch.equal(one["statistics"], other["statistics"]) for one, other in pairwise(noted)]
    assert equal == [frozen] * 8
    model.train()
    assert model.timm_model.bn1.training
    # Adam's state is cleared.
    assert [step["remembered"] for step in noted[:5]] == [0, 2, 2, 0, len(every)]


def test_head_multiplier_applies_to_both_phases(tmp_path):
    noted, _ = train_peer(tmp_path, entame_method="keep", schedule="lp_ft", head_lr_multiplier=10, learning_rate=1e-3)
    assert all({1e-3, 1e-2} == set(step["rates"]) for step in noted)


@pytest.mark.parametrize("head_lr", [9e-3, "auto"])
def test_head_learning_rate_decays_to_the_base(tmp_path, head_lr):
    noted, _ = train_peer(
        tmp_path, entame_method="mei", schedule="head_decay", decay_steps=4, head_lr=head_lr, learning_rate=1e-3
    )
    *base, head, bias = zip(*(step["rates"] for step in noted), strict=True)
    assert base
    assert bias == head
    assert [list(rates) for rates in base] == [pytest.approx([1e-3] * 9)] * len(base)
    # Measured in the first step, after it was noted.
    peak = 9e-3 if head_lr == 9e-3 else (head[1] - 1e-3 / 4) * 4 / 3
    assert peak > 2e-3
    assert head[1:] == pytest.approx([1e-3 + (peak - 1e-3) * max(0, 1 - step / 4) for step in range(1, 9)])


def test_fastai_schedule(tmp_path):
    """fastai's formulas: one cycle up to base_lr, then up to half of it with discriminative learning rates."""
    base = 2e-3
    noted, model = train_peer(tmp_path, entame_method="keep", schedule="fastai", learning_rate=base)
    first, rest, every = noted[:3], noted[3:], parameters(model)
    assert all(step["moving"] == HEAD | parameters(model, torch.nn.BatchNorm2d) for step in first)
    assert not torch.equal(first[0]["statistics"], first[1]["statistics"])
    assert all(step["moving"] == every for step in rest)
    assert first[0]["rates"] == pytest.approx([base / 250, base / 250, base / 25])
    early, late, head = zip(*(step["rates"] for step in rest), strict=True)
    assert head[0] == pytest.approx(base / 2 / 5)
    assert max(head) == pytest.approx(base / 2, rel=0.1)
    assert [h / e for h, e in zip(head, early, strict=True)] == pytest.approx([100] * 6)
    assert [h / m for h, m in zip(head, late, strict=True)] == pytest.approx([10] * 6)
    assert [first[0]["momentum"], rest[0]["momentum"]] == [0.95, 0.95]
    assert min(step["momentum"] for step in rest) == pytest.approx(0.85, abs=0.01)
    assert noted[3]["remembered"] == 0


LAUNCH = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--main_process_port", "0"]


def reproduce(*arguments, launcher=()):
    command = [sys.executable, *launcher, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=900)


def test_processes_share_a_suite_and_a_failed_run_stops_no_other(suite_file, tmp_path):
    results, broken = tmp_path / "results.parquet", tmp_path / "broken.yaml"
    suite = yaml.safe_load(suite_file.read_text())
    broken.write_text(yaml.safe_dump(suite | {"models": {"None": str(tmp_path / "none"), **suite["models"]}}))
    options = ("--suite", broken, "--results", results, "--methods", "base", "LP-FT", "--seeds", 1)
    run = reproduce("run", *options, launcher=LAUNCH)
    assert run.returncode == 1
    assert "seed 0, None, Digits, base: failed: Cannot load" in run.stderr
    assert "processes: 2. 2 failed" in run.stdout
    assert not work_file(results).exists()
    rows = {(row["model"], row["method"]): row for row in read_rows(results).values()}
    assert rows.keys() == {("Tiny", "base"), ("Tiny", "LP-FT")}
    assert {row["processes"] for row in rows.values()} == {2}
    # Each run is the same as alone.
    found = read_suite(str(broken)).experiments(models=["Tiny"], methods=["LP-FT"], seeds=1)[0]
    row = same(json.loads(json.dumps(run_experiment(found))))
    measured = {name for name in row if name.startswith("energy_")}
    assert {name: row[name] for name in row.keys() - measured}.items() <= rows["Tiny", "LP-FT"].items()
    assert rows["Tiny", "LP-FT"]["energy_entropy"] == pytest.approx(row["energy_entropy"], rel=1e-6)


def test_dry_run_counts_finished_runs(experiment, suite_file, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("TQDM_DISABLE", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    results = tmp_path / "results.parquet"
    append_row(results, run_experiment(experiment("base")))
    assert reproduce_main(["run", "--suite", str(suite_file), "--results", str(results), "--dry_run"]) == 0
    printed = capsys.readouterr().out
    assert "Tiny × Digits × base: 1 of 2 done" in printed
    assert "12 runs: 1 done, 11 left" in printed


def started(suite_file, results, rows):
    """Start a suite in a process, and wait for its work file to have some rows."""
    # Ctrl-C is not ignored, however the tests were started.
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), "run", "--suite", str(suite_file), "--results", str(results)],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    work = work_file(results)
    while (not work.exists() or work.read_text().count("\n") < rows) and process.poll() is None:
        time.sleep(0.05)
    return process


@pytest.mark.slow
def test_stopped_suite_continues(suite_file, tmp_path):
    results = tmp_path / "results.parquet"
    process = started(suite_file, results, 1)
    stopped = time.perf_counter()
    process.send_signal(signal.SIGINT)
    assert process.wait() == 130
    assert time.perf_counter() - stopped < 10
    assert "Interrupted. The same command continues with the runs that are left." in process.stderr.read()
    first = read_rows(results)
    process = started(suite_file, results, len(first) + 1)
    process.kill()
    process.wait()
    with work_file(results).open("a") as file:
        file.write('{"suite": "small", "mod')
    assert reproduce("run", "--suite", suite_file, "--results", results).returncode == 0
    rows = read_rows(results)
    assert len(rows) == 12
    assert {key: rows[key]["eval_accuracy"] for key in first} == {key: first[key]["eval_accuracy"] for key in first}


@pytest.mark.slow
def test_smoke_suite(tmp_path):
    """Real weights and real images, and a report of what comes out."""
    results = tmp_path / "smoke.parquet"
    run = reproduce("run", "--suite", "smoke", "--results", results, launcher=LAUNCH)
    assert run.returncode == 0, run.stderr[-3000:]
    assert len(read_rows(results)) == 12
    report = reproduce("report", "--results", results)
    assert report.returncode == 0, report.stderr[-3000:]
    assert "EfficientNet-Lite0" in (tmp_path / "smoke" / "report.md").read_text()
