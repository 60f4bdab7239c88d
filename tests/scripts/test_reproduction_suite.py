"""Suites: the runs that a file asks for, and messages about its errors."""

from __future__ import annotations

from collections import Counter

import pytest
import timm
import torch
import yaml
from reproduction.suite import read_suite, run_arguments

from entame_hf import InputError
from entame_hf.training_args import RECIPES

pytestmark = pytest.mark.reproduction
SUITE = {
    "models": {"A": "a/model", "B": "b/model"},
    "datasets": ["sets/one", "sets/two"],
    "methods": {"keep": {"entame_method": "keep"}, "fast": {"entame_method": "mei", "learning_rate": 0.01}},
    "seeds": 3,
    "arguments": {"per_device_train_batch_size": 256},
    "image": {"size": 32},
}


@pytest.fixture
def read(tmp_path):
    def read(**changes):
        path = tmp_path / "mine.yaml"
        path.write_text(yaml.safe_dump(SUITE | changes, sort_keys=False))
        return read_suite(str(path))

    return read


def test_every_combination_is_a_run(read):
    experiments = read().experiments()
    assert len(experiments) == len({each.identity for each in experiments}) == 2 * 2 * 2 * 3
    # A stopped suite has complete seeds.
    assert [each.seed for each in experiments] == sorted(each.seed for each in experiments)
    assert {each.settings["model_source"] for each in experiments if each.model == "A"} == {"a/model"}
    assert {each.settings["dataset_source"] for each in experiments} == {"sets/one", "sets/two"}


def test_part_of_a_suite_has_the_same_runs(read):
    suite = read()
    part = suite.experiments(models=["B"], datasets=["sets/one"], methods=["keep"], seeds=2)
    assert len(part) == 2
    assert {each.identity for each in part} < {each.identity for each in suite.experiments()}


def test_suite_extends_another_one(read, tmp_path):
    first = read(methods={"keep": {"entame_method": "keep"}})
    path = tmp_path / "longer.yaml"
    path.write_text(yaml.safe_dump({"extends": str(tmp_path / "mine.yaml"), "arguments": {"num_train_epochs": 30}}))
    longer = read_suite(str(path))
    assert (longer.name, longer.models, longer.methods) == ("longer", first.models, first.methods)
    settings = longer.experiments()[0].settings
    assert settings["num_train_epochs"] == 30
    assert "per_device_train_batch_size" not in settings


def test_method_overrides_the_grid(read):
    rates = [1e-3, 1e-4]
    experiments = read(grid={"learning_rate": rates}).experiments(models=["A"], datasets=["sets/one"], seeds=1)
    assert [(each.method, each.settings["learning_rate"]) for each in experiments] == [
        ("keep", 1e-3),
        ("keep", 1e-4),
        ("fast", 0.01),
    ]


def test_last_override_wins(read):
    overrides = [
        {"model": "A", "per_device_train_batch_size": 64, "image": {"size": 48}},
        {"model": "A", "dataset": "sets/two", "per_device_train_batch_size": 128},
        {"method": "fast", "learning_rate": 0.1},
    ]
    found = {
        (each.model, each.dataset, each.method): each.settings
        for each in read(overrides=overrides).experiments(seeds=1)
    }
    assert found["A", "sets/one", "keep"]["per_device_train_batch_size"] == 64
    assert found["A", "sets/two", "keep"]["per_device_train_batch_size"] == 128
    assert found["B", "sets/two", "keep"]["per_device_train_batch_size"] == 256
    assert found["A", "sets/two", "keep"]["image_size"] == 48
    assert found["B", "sets/one", "keep"]["image_size"] == 32
    assert found["B", "sets/one", "fast"]["learning_rate"] == 0.1


def test_numbers_are_equal_however_yaml_writes_them(read):
    written = [1e-4, "1e-4", "0.0001"]
    experiments = [
        read(arguments={"learning_rate": value, "num_train_epochs": 10}).experiments()[0] for value in written
    ]
    assert len({each.identity for each in experiments}) == 1
    assert read(arguments={"learning_rate": 1e-4, "num_train_epochs": 10.0}).experiments()[0] == experiments[0]
    assert (
        read(arguments={"learning_rate": 2e-4, "num_train_epochs": 10}).experiments()[0].identity
        != experiments[0].identity
    )


def test_enums_are_read_by_their_values(read):
    settings = read(arguments={"optim": "sgd", "lr_scheduler_type": "cosine"}).experiments()[0].settings
    arguments = run_arguments(settings)
    assert (arguments.optim, arguments.lr_scheduler_type) == ("sgd", "cosine")


def test_measured_rate_is_another_run_with_another_delta(read, monkeypatch):
    methods = {"auto": {"entame_method": "mei", "head_lr": "auto"}, "set": {"entame_method": "mei", "head_lr": 1e-3}}
    suite = read(methods=methods)
    before = [each.identity for each in suite.experiments(seeds=1)]
    monkeypatch.setattr("reproduction.suite.LOGIT_STEP", 1.0)
    after = [each.identity for each in suite.experiments(seeds=1)]
    assert [one == other for one, other in zip(before, after, strict=True)] == [False, True] * 4
    assert run_arguments(suite.experiments()[0].settings).head_lr == "auto"


def test_recipe_is_the_options_that_it_sets(read, monkeypatch):
    def settings():
        return read(methods={"ours": {"recipe": "recommended"}}).experiments()[0].settings

    parts = RECIPES["recommended"]
    arguments = run_arguments(settings())
    assert {name: getattr(arguments, name) for name in parts} == parts
    assert {name: settings()[name] for name in parts} == parts
    assert "recipe" not in settings()

    other = parts | {"lr_scheduler_kwargs": {"num_decay_steps": 0.5}}
    monkeypatch.setitem(RECIPES, "recommended", other)
    assert {name: settings()[name] for name in parts} == other


def test_methods_can_be_a_list_of_names(read):
    experiments = read(methods=["base_wu", "mei"]).experiments()
    assert {(each.method, each.settings["entame_method"]) for each in experiments} == {
        ("base_wu",) * 2,
        ("mei",) * 2,
    }


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sedes": 3}, "'sedes' is unknown. Allowed: models, datasets"),
        ({"models": {}}, "models has nothing"),
        ({"methods": []}, "methods is empty. Allowed: base, base_wu"),
        ({"methods": ["based"]}, "'based' is unknown"),
        ({"methods": {"m": {"entame_metod": "mei"}}}, "Close to it: entame_method"),
        ({"methods": {"m": {"entame_method": "mai"}}}, "'mai' is unknown. Did you mean mei"),
        ({"methods": {"m": {"schedule": "slow"}}}, "'slow' is unknown"),
        ({"methods": {"m": {"schedule": "lp_ft", "probe_epochs": 3}}}, "num_train_epochs=3"),
        ({"methods": {"m": {"schedule": "fastai", "head_lr_multiplier": 10}}}, "fastai"),
        ({"methods": {"m": {"schedule": "fastai", "head_lr": "auto"}}}, "fastai"),
        ({"arguments": {"learning_rate": "high"}}, "'high' is no number"),
        ({"arguments": {"output_dir": "here"}}, "'output_dir' is not an argument of a run"),
        ({"arguments": {"max_steps": 3}}, "'max_steps' is not an argument of a run"),
        ({"seeds": 0}, "give their number, such as 24"),
        ({"seeds": True}, "give their number, such as 24"),
        ({"image": {"flip": True}}, "image has no size"),
        ({"image": {"size": "large"}}, "size cannot be large"),
        ({"image": {"size": 32, "mean": [0.5]}}, "mean cannot be [0.5]"),
        ({"image": {"size": 32, "mean": [0.5, 0.5, 0.5]}}, "mean or std alone"),
        ({"grid": {"learning_rate": 1e-4}}, "give a list of values"),
        ({"overrides": [{"learning_rate": 1e-4}]}, "must say what it is for: model, dataset, method"),
        ({"overrides": [{"model": "C", "learning_rate": 1e-4}]}, "'C' is unknown. Allowed: A, B"),
        ({"overrides": {"model": "A"}}, "overrides must be a list"),
    ],
)
def test_errors_say_what_is_allowed(read, changes, said):
    with pytest.raises(InputError) as error:
        read(**{"arguments": {"num_train_epochs": 3}} | changes).experiments()
    assert said in str(error.value)


def test_unknown_suite_is_refused():
    with pytest.raises(InputError, match=r"contest, .*head_rate, .*modern, offline, paper, recipe, .*smoke"):
        read_suite("papers")
    with pytest.raises(InputError, match="does not exist"):
        read_suite("nowhere/mine.yaml")


@pytest.mark.parametrize("arguments", [{"models": ["C"]}, {"methods": ["C"]}, {"seeds": 4}, {"seeds": 0}])
def test_unknown_labels_are_refused(read, arguments):
    with pytest.raises(InputError, match=r"Allowed: |a number from 1 to 3"):
        read().experiments(**arguments)


@pytest.mark.parametrize(
    ("name", "runs"),
    [
        ("paper", 7 * 4 * 6 * 24),
        ("modern", 5 * 4 * 6 * 3 * 6),
        ("offline", 3 * 3 * 8 * 24),
        ("smoke", 12),
        ("head_rate", 2 * 3 * 3 * 7 * 4),
        ("head_rate_frozen", 2 * 3 * 3 * 7 * 3),
        ("head_rate_settings", 2 * 2**3 * 6 * 3),
        ("head_rate_sgd", 3 * 2 * 9 * 3),
        ("head_rate_sgd_frozen", 3 * 2 * 9 * 3),
        ("head_rate_models", 7 * 2 * 3 * 3 * 7 * 2),
        ("head_rate_decay", 2 * 4 * 3 * 6),
        ("recipe", 7 * 3 * 3 * 6 * 4),
        ("recipe_parts", 7 * 3 * 3 * 4 * 2),
        ("recipe_sgd", 7 * 3 * 2 * 6 * 2),
        ("recipe_choice", 4 * 2 * 3 * 13 * 3),
    ],
)
def test_suites_have_all_their_runs(name, runs):
    experiments = read_suite(name).experiments()
    assert len(experiments) == len({each.identity for each in experiments}) == runs
    assert len(set(Counter(each.seed for each in experiments).values())) == 1


def test_paper_protocol():
    experiments = {(each.model, each.dataset): each.settings for each in read_suite("paper").experiments(seeds=1)}
    assert {settings["learning_rate"] for settings in experiments.values()} == {1e-4}
    for (model, dataset), settings in experiments.items():
        small = model == "InceptionV3" or dataset == "Caltech101"
        assert settings["per_device_train_batch_size"] == (64 if small else 256)
        assert settings["num_train_epochs"] == (15 if dataset == "CIFAR100" else 10)
        assert (settings["image_size"] == 229) == (model == "InceptionV3")


def models_and_sizes():
    """timm's models, each with the smallest images that a suite gives it."""
    smallest: dict[str, int] = {}
    for each in [*read_suite("paper").experiments(seeds=1), *read_suite("modern").experiments(seeds=1)]:
        library, _, name = each.settings["model_source"].partition("/")
        if library == "timm":
            smallest[name] = min(each.settings["image_size"], smallest.get(name, 1000))
    return sorted(smallest.items())


@pytest.mark.parametrize(("name", "size"), models_and_sizes())
def test_models_have_weights_and_take_the_images(name, size):
    """On the device that computes shapes only."""
    assert name in timm.list_pretrained()
    with torch.device("meta"):
        model = timm.create_model(name, num_classes=10).eval()
        assert model(torch.zeros(2, 3, size, size)).shape == (2, 10)
