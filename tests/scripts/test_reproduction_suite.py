"""A suite's file says which runs there are, and what is wrong with it."""

from __future__ import annotations

from collections import Counter

import pytest
import timm
import torch
import yaml
from reproduction.suite import run_arguments
from reproduction.suite_file import read_suite

from entame_hf import InputError
from entame_hf.training_args import RECIPES

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


def test_every_combination_is_one_run(read):
    cells = read().cells()
    assert len(cells) == len({cell.identity for cell in cells}) == 2 * 2 * 2 * 3
    # A suite that is stopped has whole seeds.
    assert [cell.seed for cell in cells] == sorted(cell.seed for cell in cells)
    assert {cell.settings["model_source"] for cell in cells if cell.model == "A"} == {"a/model"}
    assert {cell.settings["dataset_source"] for cell in cells} == {"sets/one", "sets/two"}


def test_a_part_of_a_suite_has_the_same_runs(read):
    suite = read()
    part = suite.cells(models=["B"], datasets=["sets/one"], methods=["keep"], seeds=2)
    assert len(part) == 2
    assert {cell.identity for cell in part} < {cell.identity for cell in suite.cells()}


def test_a_grid_leaves_alone_what_a_method_sets_itself(read):
    rates = [1e-3, 1e-4]
    cells = read(grid={"learning_rate": rates}).cells(models=["A"], datasets=["sets/one"], seeds=1)
    assert [(cell.method, cell.settings["learning_rate"]) for cell in cells] == [
        ("keep", 1e-3),
        ("keep", 1e-4),
        ("fast", 0.01),
    ]


def test_the_last_override_wins(read):
    overrides = [
        {"model": "A", "per_device_train_batch_size": 64, "image": {"size": 48}},
        {"model": "A", "dataset": "sets/two", "per_device_train_batch_size": 128},
        {"method": "fast", "learning_rate": 0.1},
    ]
    found = {
        (cell.model, cell.dataset, cell.method): cell.settings for cell in read(overrides=overrides).cells(seeds=1)
    }
    assert found["A", "sets/one", "keep"]["per_device_train_batch_size"] == 64
    assert found["A", "sets/two", "keep"]["per_device_train_batch_size"] == 128
    assert found["B", "sets/two", "keep"]["per_device_train_batch_size"] == 256
    assert found["A", "sets/two", "keep"]["image_size"] == 48
    assert found["B", "sets/one", "keep"]["image_size"] == 32
    assert found["B", "sets/one", "fast"]["learning_rate"] == 0.1


def test_a_number_is_the_same_number_however_it_is_written(read):
    written = [1e-4, "1e-4", "0.0001"]
    cells = [read(arguments={"learning_rate": value, "num_train_epochs": 10}).cells()[0] for value in written]
    assert len({cell.identity for cell in cells}) == 1
    assert read(arguments={"learning_rate": 1e-4, "num_train_epochs": 10.0}).cells()[0] == cells[0]
    assert read(arguments={"learning_rate": 2e-4, "num_train_epochs": 10}).cells()[0].identity != cells[0].identity


def test_what_transformers_names_is_said_by_its_name(read):
    settings = read(arguments={"optim": "sgd", "lr_scheduler_type": "cosine"}).cells()[0].settings
    arguments = run_arguments(settings)
    assert (arguments.optim, arguments.lr_scheduler_type) == ("sgd", "cosine")


def test_a_rate_that_is_measured_is_another_run_with_another_delta(read, monkeypatch):
    methods = {"auto": {"entame_method": "mei", "head_lr": "auto"}, "set": {"entame_method": "mei", "head_lr": 1e-3}}
    suite = read(methods=methods)
    before = [cell.identity for cell in suite.cells(seeds=1)]
    monkeypatch.setattr("reproduction.suite.LOGIT_STEP", 1.0)
    after = [cell.identity for cell in suite.cells(seeds=1)]
    assert [one == other for one, other in zip(before, after, strict=True)] == [False, True] * 4
    assert run_arguments(suite.cells()[0].settings).head_lr == "auto"


def test_a_recipe_is_what_it_fills_in(read, monkeypatch):
    def settings():
        return read(methods={"ours": {"recipe": "recommended"}}).cells()[0].settings

    parts = RECIPES["recommended"]
    arguments = run_arguments(settings())
    assert {name: getattr(arguments, name) for name in parts} == parts
    assert {name: settings()[name] for name in parts} == parts
    assert "recipe" not in settings()

    other = parts | {"lr_scheduler_kwargs": {"num_decay_steps": 0.5}}
    monkeypatch.setitem(RECIPES, "recommended", other)
    assert {name: settings()[name] for name in parts} == other


def test_methods_may_be_named_only(read):
    cells = read(methods=["base_wu", "mei"]).cells()
    assert {(cell.method, cell.settings["entame_method"]) for cell in cells} == {("base_wu",) * 2, ("mei",) * 2}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sedes": 3}, "'sedes' is unknown. Allowed: models, datasets"),
        ({"models": {}}, "models holds nothing"),
        ({"methods": []}, "methods is empty. Allowed: base, base_wu"),
        ({"methods": ["based"]}, "'based' is unknown"),
        ({"methods": {"m": {"entame_metod": "mei"}}}, "near it are entame_method"),
        ({"methods": {"m": {"entame_method": "mai"}}}, "Method 'mai' is unknown"),
        ({"methods": {"m": {"schedule": "slow"}}}, "invalid choice: 'slow'"),
        ({"methods": {"m": {"schedule": "lp_ft", "probe_epochs": 3}}}, "leave an epoch of num_train_epochs=3"),
        ({"methods": {"m": {"schedule": "fastai", "head_lr_multiplier": 10}}}, "fastai"),
        ({"methods": {"m": {"schedule": "fastai", "head_lr": "auto"}}}, "fastai"),
        ({"arguments": {"learning_rate": "high"}}, "invalid float value: 'high'"),
        ({"arguments": {"output_dir": "here"}}, "'output_dir' is no argument of a run"),
        ({"arguments": {"max_steps": 3}}, "'max_steps' is no argument of a run"),
        ({"seeds": 0}, "give how many, such as 24"),
        ({"seeds": True}, "give how many, such as 24"),
        ({"image": {"flip": True}}, "image has no size"),
        ({"image": {"size": "large"}}, "size cannot be large"),
        ({"image": {"size": 32, "mean": [0.5]}}, "mean cannot be [0.5]"),
        ({"image": {"size": 32, "mean": [0.5, 0.5, 0.5]}}, "mean and std"),
        ({"grid": {"learning_rate": 1e-4}}, "give a list of values"),
        ({"overrides": [{"learning_rate": 1e-4}]}, "must say what it is for: model, dataset, method"),
        ({"overrides": [{"model": "C", "learning_rate": 1e-4}]}, "'C' is unknown. Allowed: A, B"),
        ({"overrides": {"model": "A"}}, "overrides must be a list"),
    ],
)
def test_mistakes_are_said_with_what_is_allowed(read, changes, said):
    with pytest.raises(InputError) as error:
        read(**{"arguments": {"num_train_epochs": 3}} | changes).cells()
    assert said in str(error.value)


def test_a_suite_that_is_not_there():
    with pytest.raises(InputError, match=r"Give one of head_rate, .*modern, offline, paper, recipe, .*smoke"):
        read_suite("papers")
    with pytest.raises(InputError, match="no such suite"):
        read_suite("nowhere/mine.yaml")


@pytest.mark.parametrize("arguments", [{"models": ["C"]}, {"methods": ["C"]}, {"seeds": 4}, {"seeds": 0}])
def test_a_part_that_is_not_there(read, arguments):
    with pytest.raises(InputError, match=r"Allowed: |has seeds for 1 to 3"):
        read().cells(**arguments)


@pytest.mark.parametrize(
    ("name", "runs"),
    [
        ("paper", 7 * 4 * 6 * 24),
        ("modern", 5 * 4 * 6 * 3 * 6),
        ("offline", 3 * 3 * 8 * 24),
        ("statistics", 3 * 3 * 5 * 12),
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
def test_the_suites_are_whole(name, runs):
    cells = read_suite(name).cells()
    assert len(cells) == len({cell.identity for cell in cells}) == runs
    assert len(set(Counter(cell.seed for cell in cells).values())) == 1


def test_the_paper_s_protocol():
    cells = {(cell.model, cell.dataset): cell.settings for cell in read_suite("paper").cells(seeds=1)}
    assert {settings["learning_rate"] for settings in cells.values()} == {1e-4}
    for (model, dataset), settings in cells.items():
        small = model == "InceptionV3" or dataset == "Caltech101"
        assert settings["per_device_train_batch_size"] == (64 if small else 256)
        assert settings["num_train_epochs"] == (15 if dataset == "CIFAR100" else 10)
        assert (settings["image_size"] == 229) == (model == "InceptionV3")


def models_and_sizes():
    """timm's models, each with the smallest images that a suite gives it."""
    smallest: dict[str, int] = {}
    for cell in [*read_suite("paper").cells(seeds=1), *read_suite("modern").cells(seeds=1)]:
        library, _, name = cell.settings["model_source"].partition("/")
        if library == "timm":
            smallest[name] = min(cell.settings["image_size"], smallest.get(name, 1000))
    return sorted(smallest.items())


@pytest.mark.parametrize(("name", "size"), models_and_sizes())
def test_models_have_weights_and_take_the_images(name, size):
    """On the device that computes shapes only."""
    assert name in timm.list_pretrained()
    with torch.device("meta"):
        model = timm.create_model(name, num_classes=10).eval()
        assert model(torch.zeros(2, 3, size, size)).shape == (2, 10)
