"""Feature statistics belong to the weights beside them, in every training of a process."""

import copy
import multiprocessing

import pytest
import torch
from conftest import RandomImages
from safetensors.torch import load_file
from torch.utils.data import random_split
from transformers import TrainerCallback

from entame_hf import EntameConfig, EntameTrainer, EntameTrainingArguments
from entame_hf.patch import normalised_heads

pytestmark = pytest.mark.runs


def arguments(folder, **options):
    known = {"save_strategy": "no", "num_train_epochs": 1, "disable_tqdm": True, "learning_rate": 1e-3, **options}
    return EntameTrainingArguments(str(folder), use_cpu=True, per_device_train_batch_size=16, **known)


def statistics(model):
    ((_, leaf),) = normalised_heads(model)
    return torch.cat([leaf.znorm.mean, leaf.znorm.var]).clone()


def test_every_training_of_a_trainer_ends_alike(tmp_path, tiny_vit):
    # The last batch holds 4 images.
    data, held = RandomImages(68), RandomImages(16)
    made = EntameTrainer(
        None,
        arguments(tmp_path),
        train_dataset=data,
        eval_dataset=held,
        model_init=lambda: copy.deepcopy(tiny_vit),
    )
    found = []
    for _ in range(3):
        made.train()
        found.append((made.evaluate()["eval_loss"], statistics(made.model)))
    for loss, values in found[1:]:
        assert loss == found[0][0]
        torch.testing.assert_close(values, found[0][1], rtol=0, atol=0)


class Averages(TrainerCallback):
    """Evaluate other weights than those that train, as averages of weights are."""

    def exchange(self, model):
        for parameter in model.parameters():
            # Unseen by autograd's counter of versions.
            parameter.data.mul_(self.factor)
        self.factor = 1 / self.factor

    def on_train_begin(self, args, state, control, **kwargs):
        self.factor, self.evaluated = 2.0, []

    def on_epoch_end(self, args, state, control, model, **kwargs):
        self.exchange(model)

    def on_evaluate(self, args, state, control, model, **kwargs):
        self.evaluated.append(statistics(model))
        self.exchange(model)


@pytest.mark.parametrize("save", ["epoch", "no"])
def test_exchanged_weights_have_their_own_statistics(tmp_path, tiny_vit, save):
    data, averages = RandomImages(64), Averages()

    def train(folder, **options):
        known = {"save_strategy": save, "eval_strategy": "epoch", "num_train_epochs": 2, **options}
        return EntameTrainer(
            copy.deepcopy(tiny_vit), arguments(folder, **known), train_dataset=data, eval_dataset=RandomImages(16)
        )

    plain, exchanged = train(tmp_path / "a"), train(tmp_path / "b")
    plain.train()
    exchanged.add_callback(averages)
    exchanged.train()
    torch.testing.assert_close(statistics(exchanged.model), statistics(plain.model), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(averages.evaluated[-1], statistics(plain.model), rtol=0.1)
    if save == "epoch":
        saved = [load_file(tmp_path / name / "checkpoint-8" / "model.safetensors") for name in "ab"]
        torch.testing.assert_close(saved[1], saved[0], rtol=1e-3, atol=1e-4)


def test_evaluations_leave_no_processes(tmp_path, tiny_vit):
    counts = []

    class Count(TrainerCallback):
        def on_evaluate(self, args, state, control, **kwargs):
            counts.append(len(multiprocessing.active_children()))

    whole = RandomImages(64)
    made = EntameTrainer(
        tiny_vit,
        arguments(
            tmp_path,
            max_steps=8,
            eval_strategy="steps",
            eval_steps=2,
            dataloader_num_workers=1,
            dataloader_persistent_workers=True,
        ),
        train_dataset=whole,
        eval_dataset=random_split(whole, [16, 48])[0],
        callbacks=[Count()],
    )
    made.train()
    assert len(counts) == 4
    assert len(set(counts)) == 1, counts


class Wrapped(torch.nn.Module):
    """A model of the user's own, with tied weights and a convolution of more than one pixel."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Conv2d(3, 8, 3, stride=4)
        self.one, self.other = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        self.other.weight = self.one.weight
        self.fc = torch.nn.Linear(8, 4)

    def forward(self, pixel_values, labels=None):
        logits = self.fc(self.other(self.one(self.first(pixel_values).relu().mean((2, 3)))))
        return {
            "loss": None if labels is None else torch.nn.functional.cross_entropy(logits, labels),
            "logits": logits,
        }


@pytest.mark.parametrize("last", [False, True])
def test_a_model_of_ones_own_is_saved_whatever_its_layout(tmp_path, last):
    torch.manual_seed(0)
    model, data = Wrapped(), RandomImages(64, classes=4)
    if last:
        model = model.to(memory_format=torch.channels_last)
    options = {"save_strategy": "epoch", "entame_method": "mei"}
    made = EntameTrainer(
        model, arguments(tmp_path, **options), train_dataset=data, entame=EntameConfig.for_method("mei", head="fc")
    )
    made.train()
    loaded = Wrapped()
    loaded.load_state_dict(load_file(tmp_path / "checkpoint-4" / "model.safetensors"))
    images = torch.stack([data[i]["pixel_values"] for i in range(8)])
    torch.testing.assert_close(loaded(images)["logits"], made.model.eval()(images)["logits"])
