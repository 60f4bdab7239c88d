"""Each method of the contest, on a tiny model: what it starts from and how it trains."""

from __future__ import annotations

import math

import pytest
import timm
import torch
import yaml
from conftest import RandomImages
from reproduction import starts
from reproduction.contest import CANDIDATE, CHOICE
from reproduction.corruptions import CORRUPTIONS
from reproduction.fastai import put_head
from reproduction.peers import RunArguments
from reproduction.rows import append_row, read_rows
from reproduction.run import TRAINERS, run_experiment
from reproduction.starts import converge, fit_logistic, fit_temperature, write_probe
from reproduction.suite import SUITES, read_suite
from sklearn.linear_model import LogisticRegression
from torch import nn

from entame_hf import EntameConfig, apply_entame, find_heads, fit_head
from entame_hf.patch import HeadFeatures, as_transformers

pytestmark = pytest.mark.reproduction
CONTEST = read_suite("contest")
FAMILIES = ("test_resnet", "test_vit", "test_convnext")


@pytest.fixture(scope="module")
def dry(tmp_path_factory):
    """The contest on tiny models and small images: two epochs of three steps."""
    folder = tmp_path_factory.mktemp("contest")
    for name in FAMILIES:
        torch.manual_seed(1)
        sized = {"img_size": 32} if name == "test_vit" else {}
        as_transformers(timm.create_model(name, num_classes=20, **sized)).save_pretrained(folder / name)
    suite = {
        "extends": "contest",
        "models": {name: str(folder / name) for name in FAMILIES},
        "datasets": ["digits"],
        "seeds": 1,
        "arguments": {"num_train_epochs": 2, "per_device_train_batch_size": 500},
        "grid": {"learning_rate": [1e-3]},
        "image": {"size": 32},
        "overrides": [{"method": "recommended", "corruptions": True}],
    }
    path = folder / "contest_dry.yaml"
    path.write_text(yaml.safe_dump(suite, sort_keys=False))
    return read_suite(str(path))


# Bodies without a feature map, and with other layers, matter to two methods.
RUNS = [("test_resnet", method) for method in CONTEST.methods]
RUNS += [("test_vit", "fastai"), ("test_convnext", "fastai"), ("test_convnext", "keep, layer decay, cosine")]


@pytest.mark.parametrize(("model", "method"), RUNS)
def test_method_of_the_contest_runs(dry, method, model, tmp_path):
    (experiment,) = dry.experiments(models=[model], methods=[method])
    row = run_experiment(experiment)
    results = tmp_path / "rows.parquet"
    append_row(results, row | {"suite": "contest_dry", "device": "CPU", "processes": 1, "versions": {}, "commit": ""})
    (read,) = read_rows(results).values()
    # A pass costs a third of an epoch.
    assert read["eval_step"][-1] == (5 if "pass_epochs" in experiment.settings and "head ×10" not in method else 6)
    assert all(math.isfinite(accuracy) for accuracy in read["eval_accuracy"])
    informed = experiment.settings.get("entame_method") == "informed"
    assert ("probe_accuracy" in row, "logme" in row) == (informed, informed)
    if method == "recommended":
        assert read["corruption"] == [kind for kind in ("noise", "blur", "contrast", "JPEG") for _ in range(3)]
        assert len(read["corruption_accuracy"]) == 12


def test_suites_of_the_contest_have_its_methods_and_the_candidate():
    for path in SUITES.glob("contest*.yaml"):
        suite = read_suite(path.stem)
        if path.stem.endswith("_refreshed"):
            assert {settings.pop("znorm_refresh_samples") for settings in suite.methods.values()} == {1000}
            assert all(settings.pop("pass_epochs") for settings in suite.methods.values())
            informed = {key: value for key, value in CONTEST.methods[CANDIDATE].items() if key != "pass_epochs"}
            assert list(suite.methods.values()) == [CONTEST.methods["recommended"], informed]
            continue
        assert CANDIDATE in suite.methods
        assert suite.seeds >= (2 if path.stem == CHOICE else 3)
        if path.stem != "contest_choice":
            assert suite.methods == CONTEST.methods
            assert suite.experiments()
    choice = read_suite("contest_choice")
    assert not choice.models.keys() & CONTEST.models.keys()
    assert all(source.endswith("@validation") for source in choice.datasets.values())
    # Candidates measure the head learning rate; all other methods are the contest's.
    peers = {label for label, settings in choice.methods.items() if settings.get("recipe") != "recommended"}
    assert {label: choice.methods[label] for label in peers}.items() <= CONTEST.methods.items()


def features(count=200, width=8, classes=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    centres, noise = (torch.randn(size, width, generator=generator) for size in (classes, count))
    labels = torch.arange(count) % classes
    rows = 3 * (noise + 1.5 * centres[labels]) + 5
    wide = rows.double()
    mean = wide.mean(0)
    return HeadFeatures(rows, labels, torch.tensor(float(count)).double(), mean, (wide - mean).square().sum(0))


def test_probe_converges_to_scikit_learns_logistic_regression():
    read, penalty = features(), 1e-2
    rows = ((read.rows - read.mean) / read.rows.double().std(0, correction=0)).double()
    found = converge(rows.new_zeros(3, 9), rows, read.labels, penalty)
    reference = LogisticRegression(C=1 / (penalty * len(rows)), tol=1e-10, max_iter=10_000).fit(rows, read.labels)
    probabilities = (rows @ found[:, :-1].mT + found[:, -1]).softmax(1)
    torch.testing.assert_close(probabilities, torch.from_numpy(reference.predict_proba(rows)), rtol=0, atol=1e-4)


def test_logistic_head_reads_raw_features_and_its_loss_on_unseen_images_is_low():
    read, leaf = features(), nn.Linear(8, 3)
    write_probe(leaf, fit_logistic(read, 3))
    unseen = features(seed=0, count=600)
    with torch.no_grad():
        right = (leaf(unseen.rows).argmax(1) == unseen.labels).double().mean()
    assert right > 0.8


def test_a_process_fits_the_probe_of_a_model_and_dataset_once(tmp_path, monkeypatch):
    fits = []

    def fit(read, classes):
        fits.append(len(read.rows))
        return torch.arange(classes * (read.rows.shape[1] + 1.0)).view(classes, -1)

    monkeypatch.setattr(starts, "fit_logistic", fit)
    monkeypatch.setattr(starts, "_probes", {})
    options = {"entame_method": "keep", "head_start": "logistic", "use_cpu": True, "max_steps": 1, "report_to": "none"}
    heads = []
    for seed, source in enumerate(["a", "a", "b"]):
        model = as_transformers(timm.create_model("test_resnet", num_classes=10))
        args = RunArguments(str(tmp_path), seed=seed, learning_rate=0.0, save_strategy="no", **options)
        TRAINERS[None](model, args, train_dataset=RandomImages(8), source=source).train()
        heads.append(model.timm_model.fc)
    assert fits == [8, 8]
    for head in heads:
        assert head.bias.tolist() == [head.in_features + row * (head.in_features + 1.0) for row in range(10)]
        assert head.weight[1, 0] == head.in_features + 1


def test_temperature_lowers_the_loss_of_a_ridge_head_and_keeps_its_predictions():
    read = features()
    model = apply_entame(nn.Sequential(nn.Linear(8, 3)), EntameConfig(init="ridge", head="0"))
    fit_head(model, [(read.rows, read.labels)])
    model.eval()
    before = model(read.rows)
    factor = fit_temperature(model[0], read)
    after = model(read.rows)
    assert factor > 1
    torch.testing.assert_close(after, factor * before)
    assert nn.functional.cross_entropy(after, read.labels) < nn.functional.cross_entropy(before, read.labels)


def test_layers_learn_slower_the_earlier_they_are(tmp_path):
    model = as_transformers(timm.create_model("test_resnet", num_classes=10))
    args = RunArguments(
        str(tmp_path), entame_method="keep", layer_decay=0.5, weight_decay=0.1, learning_rate=1e-2, use_cpu=True
    )
    groups = TRAINERS[None](model, args, train_dataset=RandomImages(8)).create_optimizer().param_groups
    rate = {id(p): (group["lr"], group["weight_decay"]) for group in groups for p in group["params"]}
    own = model.timm_model
    assert rate[id(own.fc.weight)] == (1e-2, 0.1)
    assert rate[id(own.fc.bias)] == (1e-2, 0.0)
    first, last = rate[id(own.conv1[0].weight)][0], rate[id(own.layer4[0].conv1.weight)][0]
    assert first < last < 1e-2
    assert len(rate) == len([*model.parameters()])


def test_bits_schedule_warms_up_for_a_fifth_and_drops_by_ten(tmp_path):
    args = RunArguments(str(tmp_path), entame_method="keep", schedule="bit", learning_rate=1.0, use_cpu=True)
    model = as_transformers(timm.create_model("test_resnet", num_classes=10))
    trainer = TRAINERS["bit"](model, args, train_dataset=RandomImages(8))
    trainer.create_optimizer()
    schedule = trainer.create_scheduler(500)
    rates = [schedule.lr_lambdas[0](step) for step in (0, 50, 100, 199, 200, 300, 400, 499)]
    assert rates == pytest.approx([0, 0.5, 1, 1, 0.1, 0.01, 0.001, 0.001])


@pytest.mark.parametrize(("name", "width"), [("test_resnet", 2 * 96), ("test_vit", 64)])
def test_fastais_head_has_batch_norm_on_both_poolings(name, width):
    sized = {"img_size": 32} if name == "test_vit" else {}
    model = as_transformers(timm.create_model(name, num_classes=10, **sized))
    config = put_head(model, 7)
    (head,) = find_heads(model, config.head)
    norms = [module.num_features for module in model.timm_model[1] if isinstance(module, nn.BatchNorm1d)]
    assert norms == [width, 512]
    assert head.module.weight.shape == (7, 512)
    assert head.module.bias is None
    assert model(torch.randn(2, 3, 32, 32)).logits.shape == (2, 7)


def test_stronger_corruption_changes_images_more():
    rows = torch.arange(6 * 3 * 64 * 64).view(6, 3, 64, 64).mul(7919).remainder(256).byte()
    smooth = nn.functional.avg_pool2d(rows.float(), 9, 1, 4).byte()
    for corrupt, strengths in CORRUPTIONS.values():
        changes = [(corrupt(smooth, strength).float() - smooth).abs().mean() for strength in strengths]
        assert 0 < changes[0] < changes[1] < changes[2]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"head_start": "logistic", "entame_method": "informed"}, "needs `entame_method=keep`"),
        ({"head_start": "temperature", "entame_method": "keep"}, "needs `entame_method=informed`"),
        ({"fastai_head": True}, "needs `schedule=fastai`"),
    ],
)
def test_arguments_that_do_not_go_together_are_refused(options, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        RunArguments(str(tmp_path), **options)
