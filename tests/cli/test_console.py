"""What a run says, and when it stops."""

from __future__ import annotations

import sys
from io import StringIO
from types import SimpleNamespace

import pytest
from transformers import TrainerControl, TrainerState, TrainingArguments

from entame_hf.cli.console import Console, Patience, best_evaluation, duration, fitted


def evaluations(*accuracies):
    return [{"step": 10 * (i + 1), "eval_accuracy": a, "eval_loss": 1 - a} for i, a in enumerate(accuracies)]


@pytest.fixture
def args(tmp_path):
    return TrainingArguments(
        str(tmp_path), metric_for_best_model="accuracy", greater_is_better=True, use_cpu=True, disable_tqdm=True
    )


@pytest.mark.parametrize(
    ("metric", "accuracies", "best"),
    [
        ("accuracy", [0.1, 0.5, 0.5, 0.4], 20),
        ("loss", [0.1, 0.5, 0.7], 30),
        ("eval_accuracy", [0.9], 10),
    ],
)
def test_the_best_evaluation_is_the_first_of_equals(args, metric, accuracies, best):
    args.metric_for_best_model, args.greater_is_better = metric, not metric.endswith("loss")
    assert best_evaluation(evaluations(*accuracies), args)["step"] == best


def test_no_evaluation_is_the_best_of_none(args):
    assert best_evaluation([{"step": 1, "loss": 2.0}], args) == {}


@pytest.mark.parametrize(
    ("accuracies", "stops"),
    [([0.1, 0.2, 0.3], False), ([0.3, 0.2], False), ([0.3, 0.2, 0.3], True), ([0.1, 0.3, 0.2, 0.4], False)],
    ids=str,
)
def test_patience_counts_evaluations_without_improvement(args, accuracies, stops):
    state, control = TrainerState(log_history=evaluations(*accuracies)), TrainerControl()
    # A callback without memory: a run that is resumed stops where it would have.
    Patience(2).on_evaluate(args, state, control)
    assert control.should_training_stop == stops


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "00:00"), (75, "01:15"), (3671, "1:01:11")])
def test_durations_are_short(seconds, text):
    assert duration(seconds) == text


def test_a_line_per_logging_step_and_per_evaluation(args, capsys):
    console, control = Console(), TrainerControl()
    state = TrainerState(max_steps=1250, num_train_epochs=5, is_world_process_zero=True)
    console.on_train_begin(args, state, control)
    console.on_log(args, state, control, logs={"probe_accuracy": 0.9131, "probe_samples": 50_000})
    state.global_step, state.epoch = 250, 1.0
    console.on_step_end(args, state, control)
    console.on_log(args, state, control, logs={"loss": 0.43215, "learning_rate": 1e-4, "grad_norm": 1.0})
    console.on_log(args, state, control, logs={"energy/noise_share": 0.1})
    state.log_history = [{"step": 250, "eval_accuracy": 0.91, "eval_loss": 0.3}]
    console.on_evaluate(args, state, control, metrics={"eval_accuracy": 0.91, "eval_f1_macro": 0.9})
    console.on_train_end(args, state, control)
    console.on_evaluate(args, state, control, metrics={"eval_accuracy": 0.91, "eval_f1_macro": 0.9})
    start, first, second = capsys.readouterr().out.splitlines()
    assert start == "informed start  91.3% expected on unseen images, by leaving one of 50,000 out"
    assert first.startswith("step   250/1,250  loss 0.4321  lr 1.00e-04  ")
    assert first.endswith("left")
    assert second == "epoch 1/5  step 250  accuracy 91.0%  macro F1 90.0%  best 91.0% at step 250"
    assert max(len(start), len(first), len(second)) <= 80


def test_epochs_of_a_stream_have_no_number(args, capsys):
    console, control = Console(), TrainerControl()
    state = TrainerState(max_steps=30, num_train_epochs=sys.maxsize, is_world_process_zero=True)
    console.on_train_begin(args, state, control)
    state.global_step, state.epoch = 10, 1.5
    state.log_history = [{"step": 10, "eval_accuracy": 0.91, "eval_loss": 0.3}]
    console.on_evaluate(args, state, control, metrics={"eval_accuracy": 0.91, "eval_f1_macro": 0.9})
    assert capsys.readouterr().out.startswith("step 10  accuracy 91.0%")


def test_images_per_second_leave_evaluations_out(args, capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("entame_hf.cli.console.time", SimpleNamespace(monotonic=lambda: now[0]))
    console, control = Console(), TrainerControl()
    state = TrainerState(max_steps=100, num_train_epochs=1, is_world_process_zero=True)
    console.on_train_begin(args, state, control)
    for step, seconds in ((10, 10), (20, 20)):
        now[0], state.global_step = now[0] + seconds, step
        console.on_step_end(args, state, control)
        if step == 10:
            now[0] += 90
            console.on_evaluate(args, state, control, metrics={})
        console.on_log(args, state, control, logs={"loss": 1.0})
    first, second = capsys.readouterr().out.splitlines()
    assert "  8 images/s  15:00 left" in first
    assert "  4 images/s  08:00 left" in second


@pytest.mark.parametrize("columns", [20, 80])
def test_a_terminals_lines_break_between_words_and_a_files_stay_whole(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    text, file, terminal = f"{'word ' * 30}/a/path/that/is/longer/than/a/line\nend", StringIO(), StringIO()
    terminal.isatty = lambda: True
    assert fitted(text, file) == text
    lines = fitted(text, terminal).split("\n")
    assert max(len(line) for line in lines if "path" not in line) <= columns
    assert " ".join(line.strip() for line in lines) == text.replace("\n", " ")
