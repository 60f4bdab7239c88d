"""Labels of -100 count nowhere, however a step is split into micro-batches."""

import copy

import pytest
import torch
from torch.utils.data import Dataset, SequentialSampler
from transformers import Trainer, TrainingArguments

from entame_hf import EntameTrainer, EntameTrainingArguments

pytestmark = pytest.mark.runs

# The first half of a batch has one label, and one micro-batch of four has none.
LABELS = [0, -100, -100, -100, -100, -100, -100, -100, 1, 2, 3, 4, 0, 1, 2, 3]


class Images(Dataset):
    def __len__(self):
        return len(LABELS)

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return {"pixel_values": torch.randn(3, 32, 32, generator=generator), "labels": LABELS[index]}


def gradients(folder, model, trainer_class, arguments, size, **options):
    found = {}

    class Watched(trainer_class):
        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs)
            found.update({name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None})
            return loss

        def _get_train_sampler(self, train_dataset=None):
            return SequentialSampler(self.train_dataset)

    args = arguments(
        str(folder),
        use_cpu=True,
        per_device_train_batch_size=size,
        gradient_accumulation_steps=16 // size,
        max_steps=1,
        learning_rate=1e-9,
        max_grad_norm=0,
        save_strategy="no",
        disable_tqdm=True,
        report_to="none",
        logging_steps=1,
        **options,
    )
    trainer = Watched(copy.deepcopy(model), args, train_dataset=Images())
    trainer.train()
    losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
    return torch.cat([each.flatten() for each in found.values()]), losses[0]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("size", [8, 4, 2])
def test_a_step_is_the_same_however_it_is_split(tmp_path, tiny_vit, size, smoothing):
    options = {"entame_method": "keep", "label_smoothing_factor": smoothing}
    whole, loss = gradients(tmp_path / "a", tiny_vit, EntameTrainer, EntameTrainingArguments, 16, **options)
    split, parts = gradients(tmp_path / "b", tiny_vit, EntameTrainer, EntameTrainingArguments, size, **options)
    torch.testing.assert_close(split, whole, rtol=1e-4, atol=1e-6)
    assert parts == pytest.approx(loss, rel=1e-4)
    if not smoothing:
        stock, known = gradients(tmp_path / "c", tiny_vit, Trainer, TrainingArguments, 16)
        torch.testing.assert_close(whole, stock, rtol=1e-4, atol=1e-6)
        assert loss == pytest.approx(known, rel=1e-4)
