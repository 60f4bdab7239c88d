"""Schedules that fall over a share of the steps."""

from __future__ import annotations

import pytest
from conftest import RandomImages
from test_trainer import arguments
from transformers import TrainingArguments, default_data_collator
from transformers.utils import logging

from entame_hf import EntameTrainer, EntameTrainingArguments, InputError


def rates(model, args, steps):
    """The learning rates of a training of so many steps, and those of its scheduler's own options."""
    trainer = EntameTrainer(model, args, data_collator=default_data_collator)
    trainer.create_optimizer_and_scheduler(steps)
    found = []
    for _ in range(steps):
        found.append(trainer.lr_scheduler.get_last_lr()[0])
        trainer.optimizer.step()
        trainer.lr_scheduler.step()
    return found


def wsd(tmp_path, decay, **changes):
    return arguments(
        tmp_path,
        learning_rate=1.0,
        lr_scheduler_type="warmup_stable_decay",
        lr_scheduler_kwargs={"num_decay_steps": decay, "decay_type": "linear"},
        **changes,
    )


@pytest.mark.parametrize("steps", [10, 11])
def test_a_share_is_that_of_all_steps(tmp_path, tiny_vit, steps):
    args = wsd(tmp_path, 0.25)
    found = rates(tiny_vit, args, steps)
    assert found == rates(tiny_vit, wsd(tmp_path, 3), steps)
    assert found == pytest.approx([1.0] * (steps - 2) + [2 / 3, 1 / 3])
    # As it was given: it is saved, and another training may have other steps.
    assert args.lr_scheduler_kwargs["num_decay_steps"] == 0.25


def test_it_goes_with_a_share_of_warm_up(tmp_path, tiny_vit):
    found = rates(tiny_vit, wsd(tmp_path, 0.2, warmup_steps=0.2), 10)
    assert found == pytest.approx([0, 0.5, *[1.0] * 7, 0.5])


@pytest.mark.parametrize(("warmup", "said"), [(9, False), (10, True), (500, True), (0.99, False)])
@pytest.mark.parametrize("kind", ["linear", "warmup_stable_decay", "constant"])
def test_a_warm_up_that_never_ends_is_said(tmp_path, tiny_vit, monkeypatch, caplog, kind, warmup, said):
    monkeypatch.setattr(logging.get_logger("transformers"), "propagate", True)
    options = {"num_decay_steps": 1} if kind == "warmup_stable_decay" else None
    args = arguments(tmp_path, lr_scheduler_type=kind, lr_scheduler_kwargs=options, warmup_steps=warmup)
    found = rates(tiny_vit, args, 10)
    assert (f"`warmup_steps={warmup}` covers the whole run (10 steps)" in caplog.text) == said
    assert (max(found) < args.learning_rate) == said


def test_options_may_be_typed(tmp_path, tiny_vit):
    args = arguments(
        tmp_path,
        learning_rate=1.0,
        lr_scheduler_type="warmup_stable_decay",
        lr_scheduler_kwargs='{"num_decay_steps": 0.5, "decay_type": "linear"}',
    )
    assert rates(tiny_vit, args, 4) == [1, 1, 1, 0.5]


@pytest.mark.parametrize("steps", [1, 2])
def test_a_warm_up_leaves_a_step(tmp_path, tiny_vit, steps):
    """In which transformers' own count would divide by zero."""
    args = arguments(tmp_path, learning_rate=1.0, lr_scheduler_type="polynomial", warmup_steps=0.6)
    found = rates(tiny_vit, args, steps)
    assert found == [[1.0], [0, 1.0]][steps - 1]
    assert args.warmup_steps == 0.6


@pytest.mark.parametrize(
    ("schedule", "options", "message"),
    [
        ("warmup_stable_decay", None, r"kwargs=\{\}`: .*num_decay_steps"),
        ("cosine", {"power": 0.5}, r"cosine` .*=\{\"power\": 0.5\}`: .*unexpected keyword argument 'power'"),
    ],
    ids=["missing", "foreign"],
)
def test_options_that_do_not_fit_are_told_with_an_example(tmp_path, tiny_vit, schedule, options, message):
    args = arguments(tmp_path, lr_scheduler_type=schedule, lr_scheduler_kwargs=options)
    with pytest.raises(InputError, match=message):
        rates(tiny_vit, args, 4)


@pytest.mark.parametrize("kind", [EntameTrainingArguments, TrainingArguments])
@pytest.mark.parametrize("warmup", [2, 0.5])
def test_a_warm_up_turns_constant_into_constant_with_warmup(tmp_path, tiny_vit, kind, warmup):
    args = kind(
        str(tmp_path),
        learning_rate=1.0,
        lr_scheduler_type="constant",
        warmup_steps=warmup,
        report_to="none",
        use_cpu=True,
    )
    assert rates(tiny_vit, args, 4) == [0, 0.5, 1, 1]
    assert args.lr_scheduler_type == "constant_with_warmup"


def test_constant_without_a_warm_up_stays(tmp_path, tiny_vit):
    args = arguments(tmp_path, learning_rate=1.0, lr_scheduler_type="constant")
    assert rates(tiny_vit, args, 2) == [1, 1]
    assert args.lr_scheduler_type == "constant"


@pytest.mark.parametrize("schedule", ["reduce_lr_on_plateau", "greedy"])
@pytest.mark.parametrize(
    ("options", "mode"),
    [
        ({"metric_for_best_model": "accuracy"}, "max"),
        ({"metric_for_best_model": "loss"}, "min"),
        ({}, "min"),
        ({"metric_for_best_model": "error", "greater_is_better": False}, "min"),
        ({"metric_for_best_model": "accuracy", "lr_scheduler_kwargs": {"mode": "min"}}, "min"),
    ],
    ids=["accuracy", "loss", "default", "error", "given"],
)
def test_a_plateau_follows_the_direction_of_its_metric(tmp_path, tiny_vit, schedule, options, mode):
    args = arguments(tmp_path, lr_scheduler_type=schedule, eval_strategy="steps", **options)
    trainer = EntameTrainer(tiny_vit, args, eval_dataset=RandomImages(4))
    trainer.create_optimizer_and_scheduler(4)
    assert trainer.lr_scheduler.mode == mode


def test_a_warm_up_that_a_schedule_cannot_have_is_logged(tmp_path, tiny_vit, caplog):
    args = arguments(tmp_path, lr_scheduler_type="reduce_lr_on_plateau", warmup_steps=3, eval_strategy="steps")
    EntameTrainer(tiny_vit, args, eval_dataset=RandomImages(4)).create_optimizer_and_scheduler(4)
    assert "`warmup_steps=3` has no effect: `lr_scheduler_type=reduce_lr_on_plateau` has no warm-up" in caplog.text


@pytest.mark.parametrize(
    ("optimizer", "options", "message"),
    [
        ("sgd", "momentm=0.9", r"momentm=0\.9 has no effect on SGD\. Did you mean momentum[?]"),
        ("sgd", "momentum=0.9,nesterov=on", "nesterov=on has no effect on SGD"),
        ("sgd", "weight_decay=0.1", r"weight_decay=0\.1 has no effect .*`weight_decay=0\.01`"),
        ("adamw_torch", "momentum=0.9", r"momentum=0\.9 has no effect on AdamW"),
        ("adamw_torch", "eps=0.5", r"eps=0\.5 has no effect on AdamW"),
        ("rmsprop", "lr=3", "lr=3 has no effect on RMSprop"),
        ("adafactor", "clip_threshold=2", "clip_threshold=2 has no effect on Adafactor"),
    ],
)
def test_options_that_an_optimizer_drops_are_refused(tmp_path, tiny_vit, optimizer, options, message):
    with pytest.raises(InputError, match=message):
        EntameTrainer(tiny_vit, arguments(tmp_path, optim=optimizer, optim_args=options)).create_optimizer()


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        ("sgd", "momentum=0.9, nesterov=True"),
        ("sgd", "momentum=1,nesterov=no"),
        ("rmsprop", "alpha=0.9,centered=yes"),
        ("adagrad", "lr_decay=1e-3"),
    ],
)
def test_options_that_an_optimizer_has_are_used(tmp_path, tiny_vit, optimizer, options):
    assert EntameTrainer(tiny_vit, arguments(tmp_path, optim=optimizer, optim_args=options)).create_optimizer()
