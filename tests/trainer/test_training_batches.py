"""The last batch of an epoch, and batches of one image before a BatchNorm."""

import pytest
import torch
from conftest import RandomImages
from test_streaming import rows, stream
from torch import nn
from torch.utils.data import IterableDataset
from transformers import Trainer

from entame_hf import EntameConfig, EntameTrainer, EntameTrainingArguments, InputError


class Classifier(nn.Module):
    """BatchNorm over features, of which one image has one value a channel."""

    def __init__(self):
        super().__init__()
        self.norm, self.fc = nn.BatchNorm1d(3), nn.Linear(3, 10)
        self.sizes = []

    def forward(self, pixel_values, labels=None):
        if self.training:
            self.sizes.append(len(pixel_values))
        logits = self.fc(self.norm(pixel_values.mean((2, 3))))
        return {"loss": None if labels is None else nn.functional.cross_entropy(logits, labels), "logits": logits}


class Stream(IterableDataset):
    def __init__(self, rows):
        self.rows = [RandomImages(rows)[i] for i in range(rows)]

    def __iter__(self):
        return iter(self.rows)


def train(tmp_path, data, kind=EntameTrainer, method="entame", **options):
    defaults = {"per_device_train_batch_size": 4, "num_train_epochs": 2, "report_to": "none", "save_strategy": "no"}
    args = EntameTrainingArguments(str(tmp_path), use_cpu=True, **{**defaults, **options})
    model, config = Classifier(), EntameConfig.for_method(method, head="fc")
    kind(model, args, train_dataset=data, **({} if kind is Trainer else {"entame": config})).train()
    return model.sizes


def test_trainer_fails_at_the_end_of_an_epoch(tmp_path):
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        train(tmp_path, RandomImages(9), kind=Trainer)


@pytest.mark.parametrize("accumulation", [1, 2, 3])
@pytest.mark.parametrize("rows", [5, 9])
def test_the_last_image_joins_the_batch_before_it(tmp_path, rows, accumulation):
    sizes = train(tmp_path, RandomImages(rows), gradient_accumulation_steps=accumulation)
    assert sizes == [*[4] * (rows // 4 - 1), 5] * 2


def test_the_last_image_is_dropped_if_the_arguments_say_so(tmp_path):
    assert train(tmp_path, RandomImages(9), dataloader_drop_last=True) == [4, 4] * 2


def test_the_last_image_of_a_stream_is_normalised_by_running_statistics(tmp_path, caplog):
    sizes = train(tmp_path, Stream(9), max_steps=6)
    assert sizes == [4, 4, 1] * 2
    assert "The last batch of the stream has one image" in caplog.text
    assert "dataloader_drop_last" not in caplog.text


@pytest.mark.parametrize("processes", [0, 2])
def test_a_stream_drops_its_last_batch_if_the_arguments_say_so(tmp_path, processes):
    options = {"max_steps": 4, "dataloader_drop_last": True, "dataloader_num_workers": processes}
    assert train(tmp_path, stream(rows(10)), **options) == [4] * 4
    with pytest.raises(InputError, match=r"The stream fills no batch of 4\. Set a smaller `per_device_train_batch"):
        train(tmp_path, stream(rows(3)), **options)


def test_dropping_the_last_batch_of_a_stream_of_ones_own_is_said_to_have_no_effect(tmp_path, caplog):
    assert train(tmp_path, Stream(10), max_steps=3, dataloader_drop_last=True) == [4, 4, 2]
    assert "`dataloader_drop_last=True` has no effect: Trainer keeps the last batch of a stream" in caplog.text


@pytest.mark.parametrize("options", [{"per_device_train_batch_size": 1}, {}], ids=["batch-size", "dataset"])
def test_batches_of_one_image_are_refused_with_what_to_set(tmp_path, options):
    with pytest.raises(InputError, match=r"too small for BatchNorm.*`per_device_train_batch_size=2` or more"):
        train(tmp_path, RandomImages(3 if options else 1), **options)


@pytest.mark.parametrize("method", ["mei", "informed"])
def test_frozen_statistics_take_batches_of_one_image(tmp_path, method):
    options = {"per_device_train_batch_size": 1, "freeze_statistics": True, "method": method}
    # The informed start reads all images first.
    assert train(tmp_path, RandomImages(3), **options)[-6:] == [1] * 6


@pytest.mark.parametrize("method", ["entame", "fn"])
def test_a_first_step_that_normalises_nothing_is_refused(tmp_path, method):
    options = {"per_device_train_batch_size": 1, "freeze_statistics": True, "method": method}
    with pytest.raises(InputError, match=r"normalised nothing.*`per_device_train_batch_size` or `entame_method=mei`"):
        train(tmp_path, RandomImages(3), gradient_accumulation_steps=2, **options)


def test_losses_of_joined_batches_count_for_their_images(tmp_path):
    """A joined batch counts for its five images in a step of two batches."""
    states = []
    for batch, accumulation in ((9, 1), (4, 2)):
        torch.manual_seed(0)
        model = Classifier()
        model.norm.eval()
        args = EntameTrainingArguments(
            str(tmp_path), use_cpu=True, report_to="none", save_strategy="no", per_device_train_batch_size=batch,
            gradient_accumulation_steps=accumulation, max_steps=1, optim="sgd", learning_rate=1.0, max_grad_norm=0,
            freeze_statistics=True,
        )  # fmt: skip
        config = EntameConfig.for_method("keep", head="fc")
        EntameTrainer(model, args, train_dataset=RandomImages(9), entame=config).train()
        states.append(model.fc.weight.detach().double())
    torch.testing.assert_close(*states, rtol=1e-5, atol=1e-7)


def test_pairs_of_torchvision_train_as_examples_by_name_do(tmp_path):
    """Trainer itself ends in a TypeError about `vars`."""
    examples = RandomImages(8)
    pairs = [(examples[i]["pixel_values"], examples[i]["labels"]) for i in range(8)]
    states = []
    for data in (examples, pairs):
        torch.manual_seed(0)
        args = EntameTrainingArguments(str(tmp_path), max_steps=2, use_cpu=True, report_to="none", save_strategy="no")
        model = Classifier()
        trainer = EntameTrainer(model, args, train_dataset=data, eval_dataset=data, entame=EntameConfig(head="fc"))
        trainer.train()
        states.append((model.state_dict(), trainer.evaluate()["eval_loss"]))
    (first, loss), (second, other) = states
    assert loss == other
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


class Named(RandomImages):
    def __getitem__(self, index):
        return {**super().__getitem__(index), "index": index}


@pytest.mark.parametrize("rows", [8, 9])
def test_inputs_that_a_model_does_not_take_are_named(tmp_path, rows):
    with pytest.raises(InputError, match=r"have `index`, which this Classifier does not take.*remove_unused_columns"):
        train(tmp_path, Named(rows))
    assert sum(train(tmp_path, Named(rows), remove_unused_columns=True)) == 2 * rows


def test_an_error_of_the_models_own_stays(tmp_path, monkeypatch):
    def fail(self, pixel_values, labels=None):
        raise TypeError("unexpected keyword argument 'other'")

    monkeypatch.setattr(Classifier, "forward", fail)
    with pytest.raises(TypeError, match="other"):
        train(tmp_path, RandomImages(8))
