"""What is logged before a run's first step, and that measuring it stops none."""

import copy

import pytest
import torch
from conftest import RandomImages
from test_trainer import arguments, history

from entame_hf import EntameConfig, EntameTrainer


class TestEnergyLogNeverStopsATraining:
    @pytest.mark.parametrize(
        "labels", [torch.tensor([0, 1, -100, 2] * 4), torch.arange(16).view(16, 1) % 10], ids=["ignored", "column"]
    )
    def test_labels(self, tmp_path, tiny_vit, labels):
        data = [{"pixel_values": torch.randn(3, 32, 32), "labels": label} for label in labels]
        trainer = EntameTrainer(tiny_vit, arguments(tmp_path, max_steps=1), train_dataset=data)
        trainer.train()
        assert history(trainer, "energy/noise_share") == pytest.approx([1 / 9], abs=1e-4)

    @pytest.mark.parametrize("form", ["loss-alone", "hidden", "scores"])
    def test_outputs(self, tmp_path, form):
        class Classifier(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.head = torch.nn.Linear(12, 10)

            def forward(self, pixel_values, labels):
                logits = self.head(pixel_values[:, :, ::16, ::16].flatten(1))
                loss = torch.nn.functional.cross_entropy(logits, labels)
                if form == "scores":
                    return {"loss": loss, "scores": logits}
                return (loss,) if form == "loss-alone" else (loss, logits, 50 * pixel_values.flatten(1)[:, :10])

        config = EntameConfig(head="head")
        trainer = EntameTrainer(Classifier(), arguments(tmp_path), train_dataset=RandomImages(64), entame=config)
        trainer.train()
        shares = history(trainer, "energy/noise_share")
        assert shares[:1] == (pytest.approx([1 / 9], abs=1e-4) if form == "hidden" else [])


@pytest.mark.parametrize(
    ("options", "samples"),
    [
        ({}, 1000),
        ({"znorm_refresh_samples": 32}, 32),
        ({"znorm_refresh_samples": 0}, 0),
        ({"per_device_train_batch_size": 128}, 0),
        ({"znorm_momentum": 0.1}, 0),
        ({"entame_method": "mei"}, 0),
    ],
    ids=str,
)
def test_small_batches_are_not_evaluated_with(tmp_path, tiny_vit, monkeypatch, options, samples):
    data, messages = RandomImages(64), []
    monkeypatch.setattr("entame_hf.trainer.informed.logger.info", messages.append)
    trainer = EntameTrainer(copy.deepcopy(tiny_vit), arguments(tmp_path, **options), train_dataset=data)
    trainer.train()
    said = [text for text in messages if "too noisy to evaluate with" in text]
    assert len(said) == (not options)
    assert trainer.head_fitter.refresh_samples() == samples
    if not options:
        assert "are re-estimated on 1,000 training images" in said[0]
        features = trainer.model.vit(data.images).last_hidden_state[:, 0].double()
        torch.testing.assert_close(trainer.model.classifier.znorm.mean, features.mean(0).float(), rtol=1e-4, atol=1e-5)


def test_deepspeed_keeps_the_last_batchs_statistics(tmp_path, tiny_vit, caplog):
    trainer = EntameTrainer(tiny_vit, arguments(tmp_path), train_dataset=RandomImages(64))
    trainer.is_deepspeed_enabled = True
    trainer.head_fitter.explain_refreshing()
    assert trainer.head_fitter.refresh_samples() == 0
    assert "Batches of 16 are too noisy to evaluate with" in caplog.text
    assert "Use batches of 128 or more." in caplog.text


def test_a_stream_of_your_own_is_read_once(tmp_path, tiny_vit, caplog):
    class Once(torch.utils.data.IterableDataset):
        rows = iter(RandomImages(64))

        def __iter__(self):
            return self.rows

    options = {"max_steps": 4, "eval_strategy": "steps", "eval_steps": 1}
    data = RandomImages(16)
    trainer = EntameTrainer(tiny_vit, arguments(tmp_path, **options), train_dataset=Once(), eval_dataset=data)
    trainer.train()
    assert trainer.state.global_step == 4
    assert "a stream of your own may not begin anew. If it can, pass `znorm_refresh_samples=1000`." in caplog.text


@pytest.mark.parametrize(("batch", "accumulation"), [(16, 1), (4, 4)])
def test_noise_left_after_the_first_update_is_warned_about(tmp_path, tiny_vit, monkeypatch, batch, accumulation):
    messages = []
    monkeypatch.setattr("entame_hf.trainer.start.logger.warning", messages.append)
    args = arguments(
        tmp_path,
        noise_lambda=1.0,
        znorm_momentum=0.1,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
    )
    EntameTrainer(tiny_vit, args, train_dataset=RandomImages(64)).train()
    assert any(message.startswith("Nλ² = 16") for message in messages)


def with_several_layers(model):
    model.classifier = torch.nn.Sequential(torch.nn.Dropout(0.1), torch.nn.Linear(32, 10))


def with_another_norm(model):
    model.vit.layernorm = torch.nn.LayerNorm(32, bias=False)


@pytest.mark.parametrize(
    ("exchange", "effects"),
    [
        (with_several_layers, "draw `classifier.weight` at random and drop `classifier.1.weight`"),
        (with_another_norm, "draw `vit.layernorm.bias` at random"),
        (lambda model: model.add_module("extra", torch.nn.Linear(2, 2)), "drop `extra.weight`"),
        (lambda model: None, None),
    ],
    ids=["head", "backbone", "extra", "nothing"],
)
def test_a_checkpoint_that_from_pretrained_could_not_load_is_warned_about(
    tmp_path, tiny_vit, caplog, exchange, effects
):
    exchange(tiny_vit)
    EntameTrainer(tiny_vit, arguments(tmp_path, max_steps=1), train_dataset=RandomImages(16)).train()
    said = [record.message for record in caplog.records if "from_pretrained would" in record.message]
    assert len(said) == (effects is not None)
    assert effects is None or effects in said[0]
