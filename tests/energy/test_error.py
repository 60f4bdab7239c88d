import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from entame_hf import error_energy


def test_uniform_estimates():
    energy = error_energy(torch.full((6, 10), 3.0), torch.arange(6))
    expected = {"estimates": 0.1, "labels": 1, "alignment": 0.1, "total": 0.9, "noise_share": 1 / 9}
    for name, value in expected.items():
        assert float(getattr(energy, name)) == pytest.approx(value, abs=1e-6), name
    assert float(energy.entropy) == pytest.approx(math.log(10), abs=1e-6)


def test_certain_estimates():
    labels = torch.arange(4)
    right = error_energy(1e4 * torch.eye(4), labels)
    assert float(right.total) == 0
    assert float(right.noise_share) == 0
    assert float(right.entropy) == 0
    wrong = error_energy(1e4 * torch.eye(4), (labels + 1) % 4)
    assert float(wrong.total) == pytest.approx(2)
    assert float(wrong.noise_share) == pytest.approx(0.5)


@settings(max_examples=50, deadline=None)
@given(
    n=st.integers(1, 20),
    classes=st.integers(2, 30),
    scale=st.floats(0, 100),
    seed=st.integers(0, 2**16),
    soft=st.booleans(),
)
def test_against_float64_and_within_the_papers_bounds(n, classes, scale, seed, soft):
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(n, classes, generator=generator)
    labels = torch.randint(classes, (n,), generator=generator)
    targets = torch.nn.functional.one_hot(labels, classes).double()
    if soft:
        targets = (targets + torch.rand(n, classes, generator=generator).double()).softmax(-1)
    energy = error_energy(logits, targets if soft else labels)
    estimates = logits.double().softmax(-1)
    assert float(energy.estimates) == pytest.approx(float((estimates**2).sum(1).mean()), abs=1e-5)
    assert float(energy.labels) == pytest.approx(float((targets**2).sum(1).mean()), abs=1e-5)
    assert float(energy.alignment) == pytest.approx(float((estimates * targets).sum(1).mean()), abs=1e-5)
    assert float(energy.total) == pytest.approx(float(((estimates - targets) ** 2).sum(1).mean()), abs=1e-5)
    assert float(energy.total) == pytest.approx(
        float(energy.estimates + energy.labels - 2 * energy.alignment), abs=1e-5
    )
    assert 1 / classes - 1e-5 <= float(energy.estimates) <= 1 + 1e-5
    assert -1e-5 <= float(energy.total) <= 2 + 1e-5
    assert -1e-5 <= float(energy.entropy) <= math.log(classes) + 1e-4


def test_half_precision_logits_are_measured_in_float32():
    logits = torch.randn(8, 10, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert error_energy(logits, torch.zeros(8, dtype=torch.long)).total.dtype == torch.float32


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"\(N, C\)"):
        error_energy(torch.randn(4, 3), torch.zeros(5, dtype=torch.long))


def test_ignored_labels_are_left_out():
    logits = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([0, -100, 2, -1])
    assert error_energy(logits, labels) == error_energy(logits[[0, 2]], labels[[0, 2]])


@pytest.mark.parametrize("label", [3, 7])
def test_labels_out_of_range_are_refused(label):
    with pytest.raises(ValueError, match=f"Label {label} is none of the head's 3 classes"):
        error_energy(torch.randn(2, 3), torch.tensor([0, label]))
