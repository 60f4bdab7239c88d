"""Heads that know the answer's direction before the first step, and stay near maximum entropy."""

from __future__ import annotations

import copy
import logging
import math

import pytest
import timm
import torch
from conftest import RandomImages, logits_of
from torch import nn
from torch.nn.functional import one_hot
from torch.utils.data import DataLoader

from entame_hf import EntameConfig, InputError, apply_entame, find_heads, fit_head, fold_entame
from entame_hf.patch.apply import logger

INFORMED = EntameConfig.for_method("informed")


def batches_of(side=32, classes=4, count=48, batch=16):
    return list(DataLoader(RandomImages(count, side, classes), batch))


def head_logits(model, images):
    with torch.no_grad():
        return logits_of(model.eval(), images).double()


class Toy(nn.Module):
    """A classifier over given features, as they are."""

    def __init__(self, *heads):
        super().__init__()
        self.heads = nn.ModuleList(heads)

    def forward(self, x):
        outputs = [head(x) for head in self.heads]
        return torch.stack(
            [
                out.flatten(2).mean(2)
                if isinstance(h, nn.Conv2d)
                else out.flatten(1, -2).mean(1)
                if out.ndim > 2
                else out
                for h, out in zip(self.heads, outputs, strict=True)
            ]
        ).mean(0)


def toy(*heads, feature_norm=True, **changes):
    config = EntameConfig(
        init="ridge", feature_norm=feature_norm, head=[f"heads.{i}" for i in range(len(heads))], **changes
    )
    return apply_entame(Toy(*heads), config)


def blobs(*shape, classes=3, count=90, seed=0):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % classes
    centres = 2 * torch.randn(classes, shape[0], generator=generator)
    noise = torch.randn(count, *shape, generator=generator)
    return centres[labels].view(count, shape[0], *[1] * (len(shape) - 1)) + noise, labels


@pytest.mark.runs
def test_a_fitted_head_leans_to_the_right_class_and_all_else_stays(classifier):
    build, side, path = classifier
    model = apply_entame(build(4), INFORMED).train()
    before = copy.deepcopy(model.state_dict())
    batches = batches_of(side)
    (fit,) = fit_head(model, batches)
    assert (fit.path, fit.samples) == (path, 48)
    assert all(module.training for module in model.modules())
    for name, tensor in model.state_dict().items():
        if not name.startswith(f"{path}."):
            assert torch.equal(tensor, before[name]), name
    leaf = model.get_submodule(path)
    assert not leaf.bias.any()
    images = torch.cat([batch["pixel_values"] for batch in batches])
    labels = torch.cat([batch["labels"] for batch in batches])
    logits = head_logits(model, images)
    own = logits.gather(1, labels[:, None])[:, 0]
    margin = float((own - (logits.sum(1) - own) / 3).mean())
    assert 0 < margin < 1
    assert float((logits.argmax(1) == labels).double().mean()) > 0.5
    fold_entame(model)
    torch.testing.assert_close(head_logits(model, images), logits, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("classes", "least"), [(2, 0.83), (10, 0.95), (300, 0.99)])
def test_entropy_stays_near_its_maximum_whatever_the_number_of_classes(classes, least):
    features, labels = blobs(64, classes=classes, count=4 * classes)
    model = toy(nn.Linear(64, classes))
    fit_head(model, [(features, labels)])
    estimates = head_logits(model, features).softmax(1)
    entropy = -(estimates * estimates.log()).sum(1).mean()
    assert least < float(entropy) / math.log(classes) < 1


def test_features_that_say_nothing_of_unseen_images_leave_the_head_at_maximum_entropy():
    generator = torch.Generator().manual_seed(0)
    features, labels = torch.randn(60, 100, generator=generator), torch.arange(60) % 20
    model = toy(nn.Linear(100, 20))
    fit_head(model, [(features, labels)])
    # A head that knew these images by heart would give 0.95.
    assert head_logits(model, features).abs().max() < 0.2


def test_an_unfitted_head_is_at_maximum_entropy_and_says_so(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("entame_hf"), "propagate", True)
    logger.warning_once.cache_clear()
    features, labels = blobs(8)
    model = toy(nn.Linear(8, 3))
    assert "fit_head(model, batches)" in caplog.text
    loss = nn.functional.cross_entropy(model(features), labels)
    assert loss.item() == pytest.approx(math.log(3), abs=1e-4)


def test_the_feature_statistics_are_those_of_the_images():
    features, labels = blobs(8)
    model = toy(nn.Linear(8, 3))
    fit_head(model, [(features[:50], labels[:50]), (features[50:], labels[50:])])
    znorm = model.heads[0].znorm
    torch.testing.assert_close(znorm.mean, features.mean(0), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(znorm.var, features.var(0, correction=0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("head", "shape"), [(nn.Conv2d(8, 3, 1), (8, 3, 3)), (nn.Linear(8, 3), (5, 8))], ids=["1×1 convolution", "tokens"]
)
def test_features_are_averaged_over_positions_and_their_statistics_are_not(head, shape):
    features, labels = blobs(8, math.prod(shape) // 8)
    dim = 1 if isinstance(head, nn.Conv2d) else 2
    features = (features if dim == 1 else features.mT).reshape(len(labels), *shape)
    model = toy(copy.deepcopy(head))
    (fit,) = fit_head(model, [(features, labels)])
    positions = features.movedim(dim, -1).flatten(0, -2)
    torch.testing.assert_close(model.heads[0].znorm.var, positions.var(0, correction=0), rtol=1e-5, atol=1e-6)
    assert fit.accuracy > 0.9
    assert float((head_logits(model, features).argmax(1) == labels).double().mean()) > 0.9


def test_each_head_fits_its_own_features_and_one_that_evaluation_skips_is_left():
    class Two(Toy):
        def forward(self, x):
            return (self.heads[0](x) + self.heads[1](-3 * x + 5)) / 2

    features, labels = blobs(8)
    config = EntameConfig(init="ridge", head=["heads.0", "heads.1", "heads.2"])
    model = apply_entame(Two(*(nn.Linear(8, 3) for _ in range(3))), config)
    left = model.heads[2].weight.detach().clone()
    first, second = fit_head(model, [(features, labels)])
    assert first.accuracy == second.accuracy
    torch.testing.assert_close(model.heads[0].weight, -model.heads[1].weight, rtol=1e-4, atol=1e-6)
    assert torch.equal(model.heads[2].weight, left)


@pytest.mark.parametrize(
    ("heads", "refused"), [(["heads.0", "heads.1"], True), ("heads.0", False)], ids=["both", "one"]
)
def test_heads_of_several_tasks_cannot_be_fitted_to_the_labels_of_one(heads, refused):
    class Tasks(Toy):
        def forward(self, x):
            return self.heads[0](x), self.heads[1](x)

    model = apply_entame(Tasks(nn.Linear(8, 3), nn.Linear(8, 5)), EntameConfig(init="ridge", head=heads))
    if refused:
        with pytest.raises(InputError, match=r"heads\.0 has 3 classes and heads\.1 has 5"):
            fit_head(model, [blobs(8)])
    else:
        assert len(fit_head(model, [blobs(8)])) == 1


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_a_head_over_raw_features_gives_the_logits_of_normalised_ones(bias):
    features, labels = blobs(8)
    features = features + 4
    model = toy(nn.Linear(8, 3, bias=bias), feature_norm=False)
    (fit,) = fit_head(model, [(features, labels)])
    logits = head_logits(model, features)
    assert type(model.heads[0]) is nn.Linear
    # Their mean is zero: no class is preferred.
    torch.testing.assert_close(logits.mean(0), torch.zeros(3).double(), rtol=0, atol=1e-5)
    assert fit.accuracy > 0.9
    assert float((logits.argmax(1) == labels).double().mean()) > 0.9


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_models_in_other_dtypes_are_fitted_alike(dtype):
    features, labels = blobs(8)
    features = features.to(torch.bfloat16).float()
    reference, model = toy(nn.Linear(8, 3)), toy(nn.Linear(8, 3)).to(dtype)
    (expected,), (fit,) = fit_head(reference, [(features, labels)]), fit_head(model, [(features, labels)])
    assert fit.alpha == pytest.approx(expected.alpha, rel=1e-6)
    weight = reference.heads[0].weight.to(dtype)
    if dtype == torch.float16:
        # Such features are rounded before they are read.
        torch.testing.assert_close(model.heads[0].weight, weight, rtol=5e-3, atol=1e-4)
    else:
        torch.testing.assert_close(model.heads[0].weight, weight, rtol=1e-6, atol=1e-7)
    assert model.heads[0].znorm.var.dtype.itemsize >= 4


def test_ignored_images_count_nowhere():
    features, labels = blobs(8)
    reference, model = toy(nn.Linear(8, 3)), toy(nn.Linear(8, 3))
    fit_head(reference, [(features, labels)])
    more, other = torch.cat([features, 1e6 * torch.ones(5, 8)]), torch.cat([labels, torch.full((5,), -100)])
    (fit,) = fit_head(model, [(more, other), (features, torch.full((90,), -100))])
    assert fit.samples == 90
    torch.testing.assert_close(model.state_dict(), reference.state_dict(), rtol=1e-9, atol=1e-12)


def test_soft_labels_count_as_their_largest_class():
    features, labels = blobs(8)
    soft = 0.6 * one_hot(labels, 3) + 0.4 / 3
    hard, mixed = toy(nn.Linear(8, 3)), toy(nn.Linear(8, 3))
    fit_head(hard, [{"pixel_values": features, "labels": labels}])
    fit_head(mixed, [{"pixel_values": features, "labels": soft}])
    torch.testing.assert_close(mixed.state_dict(), hard.state_dict(), rtol=0, atol=0)


def test_weighted_classes_move_the_logits_centre():
    features, labels = blobs(8)
    model = toy(nn.Linear(8, 3))
    weights = torch.tensor([1.0, 2.0, 5.0])
    fit_head(model, [(features, labels)], class_weights=weights)
    logits = head_logits(model, features)
    centre = (weights[labels].double() @ logits) / weights[labels].sum()
    torch.testing.assert_close(centre, torch.zeros(3).double(), rtol=0, atol=1e-6)


def test_no_batch_is_read_after_the_last_sample():
    features, labels = blobs(8)

    def batches():
        yield features[:40], labels[:40]
        yield features[40:], labels[40:]
        raise AssertionError("read on")

    (fit,) = fit_head(toy(nn.Linear(8, 3)), batches(), max_samples=60)
    assert fit.samples == 60


def test_features_that_tell_nothing_leave_a_head_of_zeros():
    model = toy(nn.Linear(8, 3))
    (fit,) = fit_head(model, [(torch.ones(9, 8), torch.arange(9) % 3)])
    assert not model.heads[0].weight.any()
    assert not model(torch.randn(2, 8)).any()
    assert fit.accuracy <= 1 / 3


def test_nothing_is_drawn_from_the_random_generator():
    model = apply_entame(timm.create_model("test_vit", num_classes=4, img_size=32, drop_rate=0.5), INFORMED).train()
    batches, state = batches_of(), torch.get_rng_state()
    fit_head(model, batches)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("method", "said"), [(None, "no configuration"), ("entame", "init='mei'")], ids=["not applied", "entame"]
)
def test_a_model_that_was_not_prepared_is_refused(method, said):
    model = timm.create_model("test_resnet", num_classes=4)
    if method:
        apply_entame(model, EntameConfig.for_method(method))
    with pytest.raises(InputError, match="for_method") as error:
        fit_head(model, batches_of())
    assert said in str(error.value)


@pytest.mark.parametrize(
    "batches",
    [[], [(torch.randn(2, 8), torch.tensor([-100, -100]))], [(torch.randn(2, 8), torch.tensor([0, 3]))]],
    ids=["no batch", "no label", "label out of range"],
)
def test_batches_that_fit_nothing_are_refused(batches):
    with pytest.raises(InputError):
        fit_head(toy(nn.Linear(8, 3)), batches)


def test_applying_again_keeps_the_fitted_head_and_another_method_draws_it_anew():
    model = apply_entame(timm.create_model("test_resnet", num_classes=4), INFORMED)
    fit_head(model, batches_of())
    fitted = find_heads(model)[0].module.weight.detach().clone()
    assert torch.equal(find_heads(apply_entame(model, INFORMED))[0].module.weight, fitted)
    apply_entame(model, EntameConfig())
    assert find_heads(model)[0].module.weight.abs().max() < 1e-4
