"""Ridge regression over features: the same as its definition, and defined at every edge."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import one_hot

from entame_hf.patch.features import HeadFeatures
from entame_hf.patch.ridge import COARSE, FINE, fit_ridge


def features_of(rows, labels) -> HeadFeatures:
    wide = rows.double()
    count = torch.tensor(float(len(rows)), dtype=torch.float64)
    mean = wide.mean(0) if len(rows) else torch.zeros(rows.shape[1], dtype=torch.float64)
    return HeadFeatures(rows, labels, count, mean, (wide - mean).square().sum(0))


def fit(rows, labels, classes, **options):
    features = features_of(rows, labels)
    mean, var = features.statistics()
    return fit_ridge(features, classes, mean, torch.sqrt(var + 1e-5), **options)


def blobs(count=120, width=12, classes=3, spread=1.5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % classes
    centres = torch.randn(classes, width, generator=generator)
    return centres[labels] + spread * torch.randn(count, width, generator=generator), labels


def normal_equations(rows, labels, classes, alpha, weights=None, mean=None, std=None):
    """The definition: R = (ZᵀWZ + αI)⁻¹ ZᵀW(Y − mean Y), with the intercept kept apart."""
    rows = rows.double()
    mean = rows.mean(0) if mean is None else mean
    std = torch.sqrt(rows.var(0, correction=0) + 1e-5) if std is None else std
    weights = torch.ones(len(rows)).double() if weights is None else weights
    targets = one_hot(labels, classes).double()
    centre = weights @ ((rows - mean) / std) / weights.sum()
    z, y = (rows - mean) / std - centre, targets - weights @ targets / weights.sum()
    gram = z.mT @ (weights[:, None] * z) + alpha * torch.eye(z.shape[1], dtype=z.dtype)
    return torch.linalg.solve(gram, z.mT @ (weights[:, None] * y)).mT, centre


@pytest.mark.parametrize(("count", "width"), [(120, 12), (9, 40)], ids=["many images", "fewer images than features"])
def test_the_weight_is_the_solution_of_the_normal_equations(count, width):
    rows, labels = blobs(count, width)
    ridge = fit(rows, labels, 3)
    expected, _ = normal_equations(rows, labels, 3, ridge.alpha)
    torch.testing.assert_close(ridge.weight, expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("width", [12, 60], ids=["many images", "fewer images than features"])
@pytest.mark.parametrize("weighted", [False, True], ids=["unweighted", "weighted"])
def test_leave_one_out_accuracy_is_that_of_refitting_without_each_image(width, weighted):
    rows, labels = blobs(40, width, spread=3.0)
    class_weights = torch.tensor([1.0, 3.0, 0.5]) if weighted else None
    ridge = fit(rows, labels, 3, class_weights=class_weights)
    wide = rows.double()
    mean, std = wide.mean(0), torch.sqrt(wide.var(0, correction=0) + 1e-5)
    weights = torch.ones(40).double() if class_weights is None else class_weights.double()[labels]
    weights = weights * 40 / weights.sum()
    right = 0
    for left_out in range(40):
        others = torch.arange(40) != left_out
        weight, centre = normal_equations(
            wide[others], labels[others], 3, ridge.alpha, weights[others], mean=mean, std=std
        )
        right += int((weight @ ((wide[left_out] - mean) / std - centre)).argmax() == labels[left_out])
    assert ridge.accuracy == right / 40


def test_features_far_from_zero_give_the_same_weight():
    rows, labels = blobs()
    rows = (rows.double() * 64).round() / 64
    near, far = fit(rows, labels, 3), fit((rows + 2**14).float(), labels, 3)
    torch.testing.assert_close(far.weight, near.weight, rtol=1e-8, atol=1e-10)


def test_class_weights_are_weighted_least_squares():
    rows, labels = blobs(90)
    keep = (labels != 2) | (torch.arange(90) < 30)
    rows, labels = rows[keep], labels[keep]
    class_weights = torch.tensor([1.0, 2.0, 5.0])
    ridge = fit(rows, labels, 3, class_weights=class_weights)
    weights = class_weights.double()[labels]
    weights = weights * len(labels) / weights.sum()
    expected, centre = normal_equations(rows, labels, 3, ridge.alpha, weights)
    torch.testing.assert_close(ridge.weight, expected, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(ridge.centre, centre, rtol=1e-9, atol=1e-12)


def test_weights_that_are_all_alike_change_nothing():
    rows, labels = blobs()
    alike, none = fit(rows, labels, 3, class_weights=torch.full((3,), 7.0)), fit(rows, labels, 3)
    torch.testing.assert_close(alike.weight, none.weight, rtol=1e-9, atol=1e-12)
    assert alike.accuracy == none.accuracy


def test_a_map_that_is_blind_to_the_mean_needs_no_bias():
    rows, labels = blobs(40, 60)
    rows = rows + 3
    ridge = fit(rows, labels, 3, blind=True)
    wide = rows.double()
    mean, std = wide.mean(0), torch.sqrt(wide.var(0, correction=0) + 1e-5)
    torch.testing.assert_close(wide / std @ ridge.weight.mT, (wide - mean) / std @ ridge.weight.mT)
    # It is the best of those: the solution over rows from which the direction was taken.
    unit = (mean / std) / (mean / std).norm()
    z = (wide - mean) / std
    expected, _ = normal_equations(
        z - torch.outer(z @ unit, unit), labels, 3, ridge.alpha, mean=torch.zeros(60), std=torch.ones(60)
    )
    torch.testing.assert_close(ridge.weight, expected, rtol=1e-7, atol=1e-9)
    assert ridge.accuracy > 0.6


def test_a_constant_feature_has_no_weight():
    rows, labels = blobs()
    rows[:, 4] = 1234.5
    ridge = fit(rows, labels, 3)
    assert ridge.weight.isfinite().all()
    assert ridge.weight[:, 4].abs().max() < 1e-12


@pytest.mark.parametrize(
    ("rows", "labels"),
    [
        (torch.ones(6, 4), torch.arange(6) % 3),
        (torch.randn(5, 4), torch.zeros(5, dtype=torch.long)),
        (torch.randn(1, 4), torch.tensor([1])),
    ],
    ids=["constant features", "one class", "one image"],
)
def test_what_tells_nothing_gives_a_map_of_zeros(rows, labels):
    ridge = fit(rows, labels, 3)
    assert ridge.weight.abs().max() < 1e-9
    assert 0 <= ridge.accuracy <= 1


def test_one_image_a_class_says_nothing_of_unseen_ones():
    rows, labels = torch.randn(30, 200, generator=torch.Generator().manual_seed(0)), torch.arange(30)
    ridge = fit(rows, labels, 30)
    assert ridge.accuracy == 0
    # The largest penalty of all: the head starts next to maximum entropy.
    assert ridge.alpha == pytest.approx(30 * COARSE[-1] * FINE[-1])
    assert ridge.weight.abs().max() < 1e-3


def test_a_class_without_images_is_never_predicted_and_one_with_a_single_image_is_learned():
    rows, labels = blobs(60, classes=3)
    rows, labels = torch.cat([rows, 8 * torch.ones(1, 12)]), torch.cat([labels, torch.tensor([4])])
    ridge = fit(rows, labels, 5)
    assert ridge.weight[3].abs().max() == 0
    wide = rows.double()
    logits = (wide - wide.mean(0)) / torch.sqrt(wide.var(0, correction=0) + 1e-5) @ ridge.weight.mT
    assert logits[-1].argmax() == 4
    assert (logits.argmax(1) != 3).all()
    # Left out, its class is unknown.
    assert ridge.accuracy <= 60 / 61


def test_the_penalty_grows_with_noise():
    alphas = [fit(*blobs(200, 20, spread=spread), 3).alpha for spread in (0.5, 8.0)]
    assert alphas[0] < alphas[1]
    assert all(math.isfinite(alpha) for alpha in alphas)
