"""Training arguments: None means "not set", and a recipe fills in nothing but the schedule."""

import dataclasses

import pytest

from entame_hf import EntameConfig, EntameTrainingArguments, InputError
from entame_hf.cli.options import OptionParser
from entame_hf.training_args import HeadArguments

DECAY = {"num_decay_steps": 0.2, "decay_type": "linear"}


def resolved(args):
    return {
        name: args.resolve(name) for name in ("entame_method", "head_lr", "head_lr_multiplier", "freeze_statistics")
    }


def test_the_paper_is_the_default_and_sets_nothing(tmp_path):
    args = EntameTrainingArguments(str(tmp_path))
    assert args.recipe == "paper"
    assert set(resolved(args).values()) == {None}
    assert args.entame_config() == EntameConfig()
    assert (args.lr_scheduler_type, args.lr_scheduler_kwargs, args.warmup_steps) == ("constant", None, 0)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, ("entame", "auto", None, True)),
        ({"entame_method": "mei"}, ("mei", "auto", None, True)),
        ({"head_lr": 1e-3}, ("entame", 1e-3, None, True)),
        ({"head_lr_multiplier": 10.0}, ("entame", None, 10, True)),
        ({"head_lr_multiplier": 1.0}, ("entame", None, 1, True)),
        ({"freeze_statistics": False}, ("entame", "auto", None, False)),
    ],
    ids=["nothing", "method", "rate", "ratio", "ratio-of-one", "statistics"],
)
def test_options_that_are_set_override_the_recipe(tmp_path, given, expected):
    args = EntameTrainingArguments(str(tmp_path), recipe="recommended", **given)
    assert tuple(resolved(args).values()) == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, ("warmup_stable_decay", DECAY, 0.05)),
        ({"lr_scheduler_type": "cosine"}, ("cosine", None, 0.05)),
        ({"lr_scheduler_type": "constant"}, ("constant", None, 0.05)),
        ({"warmup_steps": 0}, ("warmup_stable_decay", DECAY, 0)),
        ({"lr_scheduler_kwargs": {"num_decay_steps": 1}}, ("warmup_stable_decay", {"num_decay_steps": 1}, 0.05)),
    ],
    ids=["nothing", "schedule", "constant", "warm-up", "decay"],
)
def test_a_schedule_that_is_set_overrides_the_recipe_with_its_own_options(tmp_path, given, expected):
    args = EntameTrainingArguments(str(tmp_path), recipe="recommended", **given)
    assert (args.lr_scheduler_type, args.lr_scheduler_kwargs, args.warmup_steps) == expected


@pytest.mark.parametrize("name", ["learning_rate", "seed", "head_lr_multiplier"])
def test_text_is_no_number(tmp_path, name):
    with pytest.raises(InputError, match=f"`{name}='1e-3'` must be a number, "):
        EntameTrainingArguments(str(tmp_path), **{name: "1e-3"})


@pytest.mark.parametrize("value", [0.0, -0.5, 1.5, float("nan")])
def test_a_refused_momentum_is_called_as_the_option_is(tmp_path, value):
    with pytest.raises(InputError, match="`znorm_momentum="):
        EntameTrainingArguments(str(tmp_path), znorm_momentum=value)


@pytest.mark.parametrize("recipe", ["paper", "recommended"])
@pytest.mark.parametrize("given", [{}, {"head_lr_multiplier": 2.0}, {"phi_w": 1e-12}, {"warmup_steps": 3}], ids=str)
@pytest.mark.parametrize(
    "copied",
    [dataclasses.replace, lambda args: EntameTrainingArguments(**args.to_dict())],
    ids=["replace", "to_dict"],
)
def test_a_copy_of_the_arguments_changes_nothing(tmp_path, recipe, given, copied):
    args = EntameTrainingArguments(str(tmp_path), recipe=recipe, report_to="none", **given)
    copy = copied(args)
    assert copy.to_dict() == args.to_dict()
    assert resolved(copy) == resolved(args)
    applied = EntameConfig(phi_w=1e-8, feature_norm=False)
    assert copy.entame_config(applied) == args.entame_config(applied)
    assert copy.peak_head_lr(1e-4) == args.peak_head_lr(1e-4)


@pytest.mark.parametrize(
    ("typed", "expected"),
    [([], None), (["--freeze_statistics"], True), (["--freeze_statistics", "False"], False)],
    ids=["left-out", "named", "refused"],
)
def test_an_option_without_a_value_is_true(typed, expected):
    parser = OptionParser([HeadArguments], "")
    (args,) = parser.build(parser.given(typed))
    assert args.freeze_statistics is expected


def test_a_phi_w_that_is_set_overrides_an_applied_noise_lambda():
    config = HeadArguments(phi_w=1e-12).entame_config(EntameConfig(noise_lambda=2.0))
    assert config == EntameConfig()


def test_a_method_that_is_set_keeps_where_the_head_is():
    config = HeadArguments(entame_method="mei").entame_config(EntameConfig(head="classifier", eps=1e-3))
    assert config == EntameConfig.for_method("mei", head="classifier")


@pytest.mark.parametrize("value", [0, -1e-3, "fast", float("nan"), float("inf")])
def test_head_lr_must_be_positive_or_auto(tmp_path, value):
    with pytest.raises(ValueError, match=r"^head_lr=.* must be \"auto\""):
        EntameTrainingArguments(str(tmp_path), head_lr=value)


def test_a_number_may_come_as_a_string(tmp_path):
    assert EntameTrainingArguments(str(tmp_path), head_lr="2e-3").head_lr == 2e-3
    # A hyperparameter search that starts from "auto" passes its numbers as strings.
    assert HeadArguments(head_lr="0.002").peak_head_lr(1e-4) == 2e-3


@pytest.mark.parametrize("value", ["auto", 1e-3])
def test_a_rate_and_a_ratio_are_refused(tmp_path, value):
    with pytest.raises(ValueError, match="both set the head learning rate"):
        EntameTrainingArguments(str(tmp_path), head_lr=value, head_lr_multiplier=10)


@pytest.mark.parametrize("given", [{"head_lr": "auto"}, {"recipe": "recommended"}], ids=str)
def test_auto_needs_a_learning_rate_to_share_a_schedule_with(tmp_path, given):
    with pytest.raises(ValueError, match="which is 0"):
        EntameTrainingArguments(str(tmp_path), learning_rate=0, **given)


def test_an_unknown_recipe_is_refused_with_what_is_allowed(tmp_path):
    with pytest.raises(ValueError, match=r"'best' is unknown\. Use one of paper, recommended"):
        EntameTrainingArguments(str(tmp_path), recipe="best")


# As of a variable of the shell that is not set, and of a file's format.
@pytest.mark.parametrize("name", ["", "out\0", "\0"])
def test_an_output_folder_without_a_name_is_refused(name):
    with pytest.raises(InputError, match="names no folder"):
        EntameTrainingArguments(name)


def test_one_of_two_that_say_the_same_is_given():
    with pytest.raises(InputError, match="`noise_lambda` stands in the place of `phi_w`"):
        EntameTrainingArguments("out", phi_w=1e-12, noise_lambda=1.0)
