"""Runs of a suite: what a line holds, that it comes out the same again, and what peers do in their two phases."""

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
from reproduction import cell as cells
from reproduction.cell import run_cell
from reproduction.peers import TRAINERS, RunArguments
from reproduction.results import append_line
from reproduction.suite_file import read_suite

from entame_hf.patch import as_transformers

SCRIPT = Path(__file__).parents[2] / "scripts" / "reproduce.py"
TAKES_TIME = ("seconds", "commit", "processes", "command")


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
def cell(suite_file):
    suite = read_suite(str(suite_file))
    return lambda method: suite.cells(methods=[method])[0]


def same(line):
    return {key: value for key, value in line.items() if key not in TAKES_TIME}


def test_a_line_says_it_all_and_comes_out_the_same_again(cell):
    line = run_cell(cell("entame"))
    run_cell(cell("base"))
    assert same(run_cell(cell("entame"))) == same(line)
    assert same(run_cell(replace(cell("entame"), seed=1))) != same(line)
    assert json.loads(json.dumps(line, allow_nan=False)) == json.loads(json.dumps(line))
    steps = [step for step, _ in line["evaluations"]]
    assert line["steps_per_epoch"] == line["train_size"] // 256 == 5
    assert steps == list(range(1, 11))
    # Accuracies of the whole test part.
    assert all(
        math.isclose(a * line["test_size"], round(a * line["test_size"]), abs_tol=1e-3) for _, a in line["evaluations"]
    )
    assert line["energies"]["step"] == steps
    assert line["energies"]["noise_share"][0] == pytest.approx(1 / 9, abs=1e-4)
    lengths = {name: len(column) for name, column in line["energies"].items()}
    assert lengths.pop("phi_w") == lengths["noise_share"] / len(steps) == 1
    assert set(lengths.values()) == {1, len(steps)}


def test_a_zero_head_says_nothing_at_first(cell):
    energies = run_cell(cell("zero head"))["energies"]
    assert energies["entropy"][0] == pytest.approx(math.log(10), rel=1e-3)
    assert energies["features"][0] == 0
    assert energies["noise_share"][0] == pytest.approx(1 / 9, abs=1e-4)


def test_images_are_normalised_by_their_own_colours_or_by_those_given(cell):
    settings = cell("base").settings
    own, _ = cells._data(settings["dataset_source"], 16, False, (), ())
    pixels = torch.stack([own[i]["pixel_values"] for i in range(len(own))])
    assert pixels.mean((0, 2, 3)).abs().max() < 1e-3
    assert (pixels.std((0, 2, 3)) - 1).abs().max() < 1e-2
    given, _ = cells._data(settings["dataset_source"], 16, False, (0.5,) * 3, (0.25,) * 3)
    pixels = torch.stack([given[i]["pixel_values"] for i in range(len(given))])
    assert [pixels.min().item(), pixels.max().item()] == pytest.approx([-2, 2])


def train_peer(tmp_path, **arguments):
    """Train in two phases of 3 and 6 steps, and note at each step what may learn and how fast."""
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


@pytest.mark.parametrize("still", [True, False])
def test_lp_ft_probes_and_then_fine_tunes(tmp_path, still):
    noted, model = train_peer(
        tmp_path, entame_method="keep", schedule="lp_ft", probe_learning_rate=1e-2, learning_rate=1e-3,
        freeze_statistics=still,
    )  # fmt: skip
    probe, rest, every = noted[:3], noted[3:], parameters(model)
    assert all(step["moving"] == HEAD and step["rates"] == [1e-2] * len(step["rates"]) for step in probe)
    assert all(step["moving"] == every and step["rates"] == [1e-3] * len(step["rates"]) for step in rest)
    # The backbone's mode is the same in both phases.
    same = [torch.equal(one["statistics"], other["statistics"]) for one, other in pairwise(noted)]
    assert same == [still] * 8
    model.train()
    assert model.timm_model.bn1.training
    # Adam starts anew.
    assert [step["remembered"] for step in noted[:5]] == [0, 2, 2, 0, len(every)]


def test_the_head_stays_ahead_in_both_phases(tmp_path):
    noted, _ = train_peer(tmp_path, entame_method="keep", schedule="lp_ft", head_lr_multiplier=10, learning_rate=1e-3)
    assert all({1e-3, 1e-2} == set(step["rates"]) for step in noted)


@pytest.mark.parametrize("head_lr", [9e-3, "auto"])
def test_the_head_s_rate_falls_to_the_base_rate(tmp_path, head_lr):
    noted, _ = train_peer(
        tmp_path, entame_method="mei", schedule="head_decay", decay_steps=4, head_lr=head_lr, learning_rate=1e-3
    )
    *base, head, bias = zip(*(step["rates"] for step in noted), strict=True)
    assert base
    assert bias == head
    assert [list(rates) for rates in base] == [pytest.approx([1e-3] * 9)] * len(base)
    # Measured before the first step is taken, and after this noted it.
    peak = 9e-3 if head_lr == 9e-3 else (head[1] - 1e-3 / 4) * 4 / 3
    assert peak > 2e-3
    assert head[1:] == pytest.approx([1e-3 + (peak - 1e-3) * max(0, 1 - step / 4) for step in range(1, 9)])


def test_fastai_s_schedule(tmp_path):
    """Against fastai's own formulas: one cycle to base_lr, then to half of it, discriminative."""
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


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_processes_share_a_suite_and_a_failure_is_the_failed_run_s_only(suite_file, tmp_path):
    results, broken = tmp_path / "results.jsonl", tmp_path / "broken.yaml"
    suite = yaml.safe_load(suite_file.read_text())
    broken.write_text(yaml.safe_dump(suite | {"models": {"None": str(tmp_path / "none"), **suite["models"]}}))
    options = ("--suite", broken, "--results", results, "--methods", "base", "LP-FT", "--seeds", 1)
    run = reproduce("run", *options, launcher=LAUNCH)
    assert run.returncode == 1
    assert "seed 0, None, Digits, base: failed: Cannot load" in run.stderr
    assert "processes: 2. 2 failed" in run.stdout
    lines = {(line["model"], line["method"]): line for line in lines_of(results)}
    assert lines.keys() == {("Tiny", "base"), ("Tiny", "LP-FT")}
    assert {line["processes"] for line in lines.values()} == {2}
    # As if each had been alone.
    found = read_suite(str(broken)).cells(models=["Tiny"], methods=["LP-FT"], seeds=1)[0]
    assert same(json.loads(json.dumps(run_cell(found)))).items() <= lines["Tiny", "LP-FT"].items()


def test_a_dry_run_counts_what_is_done(cell, suite_file, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("TQDM_DISABLE", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    results = tmp_path / "results.jsonl"
    append_line(results, run_cell(cell("base")))
    assert reproduce_main(["run", "--suite", str(suite_file), "--results", str(results), "--dry_run"]) == 0
    printed = capsys.readouterr().out
    assert "Tiny × Digits × base: 1 of 2 done" in printed
    assert "12 runs, of which 1 are done and 11 left" in printed


def started(suite_file, results):
    """Start a suite in a process of its own, and wait for its first line."""
    # However the tests were started, Ctrl-C is not ignored.
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), "run", "--suite", str(suite_file), "--results", str(results)],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    while not results.exists() and process.poll() is None:
        time.sleep(0.05)
    return process


@pytest.mark.slow
def test_a_suite_that_was_stopped_goes_on(suite_file, tmp_path):
    results = tmp_path / "results.jsonl"
    process = started(suite_file, results)
    stopped = time.perf_counter()
    process.send_signal(signal.SIGINT)
    assert process.wait() == 130
    assert time.perf_counter() - stopped < 10
    assert "Interrupted. The same command goes on with the runs that are left." in process.stderr.read()
    first = lines_of(results)
    process = started(suite_file, results)
    while len(results.read_text().splitlines()) == len(first):
        time.sleep(0.05)
    process.kill()
    process.wait()
    with results.open("a") as file:
        file.write('{"suite": "small", "mod')
    assert reproduce("run", "--suite", suite_file, "--results", results).returncode == 0
    lines = lines_of(results)
    assert lines[: len(first)] == first
    assert len(lines) == len({(line["method"], line["seed"]) for line in lines}) == 12


@pytest.mark.slow
def test_the_smoke_suite(tmp_path):
    """Real weights and real images, and a report of what comes out."""
    results = tmp_path / "smoke.jsonl"
    run = reproduce("run", "--suite", "smoke", "--results", results, launcher=LAUNCH)
    assert run.returncode == 0, run.stderr[-3000:]
    assert len(lines_of(results)) == 12
    report = reproduce("report", "--results", results)
    assert report.returncode == 0, report.stderr[-3000:]
    assert "EfficientNet-Lite0" in (tmp_path / "smoke" / "report.md").read_text()
