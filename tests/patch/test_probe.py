"""What a model's features say of classes before any training."""

from __future__ import annotations

import math

import pytest
import timm
import torch
from conftest import RandomImages
from scipy.optimize import minimize
from test_ridge import blobs, features_of, fit
from torch.utils.data import DataLoader

from entame_hf import InputError
from entame_hf.patch import probe_features
from entame_hf.patch.probe import log_evidence


@pytest.mark.parametrize(("count", "width"), [(60, 5), (12, 30)], ids=["many images", "fewer images than features"])
def test_logme_is_the_largest_log_evidence(count, width):
    rows, labels = blobs(count, width, spread=3.0)
    wide = rows.double()
    best = []
    for label in range(3):
        y = (labels == label).double()

        def negative(logs, y=y):
            alpha, beta = torch.tensor(logs, dtype=torch.float64).exp()
            # The definition: the density of y under its marginal distribution.
            covariance = torch.eye(count, dtype=torch.float64) / beta + wide @ wide.mT / alpha
            return -float(torch.distributions.MultivariateNormal(torch.zeros(count).double(), covariance).log_prob(y))

        # There may be several maxima.
        found = [minimize(negative, start, method="Nelder-Mead").fun for start in ((0, 0), (4, 2), (8, 2), (2, 6))]
        best.append(-min(found) / count)
    assert log_evidence(features_of(rows, labels), 3) == pytest.approx(sum(best) / 3, abs=1e-4)


def test_better_features_have_a_higher_logme_and_accuracy():
    clear, vague = (blobs(200, 20, spread=spread) for spread in (1.0, 6.0))
    assert log_evidence(features_of(*clear), 3) > log_evidence(features_of(*vague), 3)
    assert fit(*clear, 3).accuracy > fit(*vague, 3).accuracy


def test_a_model_is_probed_for_other_classes_than_its_own():
    torch.manual_seed(0)
    model = timm.create_model("test_resnet", num_classes=1000).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = probe_features(model, DataLoader(RandomImages(60, classes=3), 20), num_classes=3)
    assert found.samples == 60
    assert 0.4 < found.accuracy <= 1
    assert math.isfinite(found.logme)
    assert f"{found.accuracy:.1%} expected on unseen images" in str(found)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_nothing_to_probe_is_refused():
    with pytest.raises(InputError, match="no labelled image"):
        probe_features(timm.create_model("test_resnet", num_classes=3), [], num_classes=3)
