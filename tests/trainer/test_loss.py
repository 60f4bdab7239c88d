"""The loss is torch's cross-entropy where torch has it, and a mean over examples everywhere."""

import copy
import math

import pytest
import torch
from conftest import RandomImages
from torch.nn.functional import cross_entropy, log_softmax, nll_loss, one_hot
from transformers import PreTrainedConfig, ViTForImageClassification
from transformers.trainer_pt_utils import LabelSmoother

from entame_hf import EntameConfig, EntameTrainer, EntameTrainingArguments, InputError
from entame_hf.data.columns import balanced_class_weights
from entame_hf.metrics import metrics_of_predictions
from entame_hf.trainer.labels import are_shares
from entame_hf.trainer.loss import ClassificationLoss

torch.manual_seed(0)
LOGITS, LABELS, WEIGHTS = torch.randn(12, 5), torch.arange(12) % 5, torch.tensor([0.2, 1.0, 3.0, 0.5, 0.0])
OUTPUTS = {"logits": LOGITS}


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_without_weights_it_is_the_smoothers(smoothing):
    expected = LabelSmoother(epsilon=smoothing)(OUTPUTS, LABELS)
    torch.testing.assert_close(ClassificationLoss(smoothing)(OUTPUTS, LABELS), expected)
    ignored = torch.where(LABELS == 2, -100, LABELS)
    expected = LabelSmoother(epsilon=smoothing)(OUTPUTS, ignored)
    torch.testing.assert_close(ClassificationLoss(smoothing)(OUTPUTS, ignored), expected)


def test_positions_have_a_label_each():
    rows, labels = {"logits": LOGITS.view(3, 4, 5)}, torch.where(LABELS == 2, -100, LABELS).view(3, 4)
    torch.testing.assert_close(ClassificationLoss(0.1)(rows, labels), LabelSmoother(epsilon=0.1)(rows, labels))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_hard_labels_are_shares_of_one(smoothing):
    loss = ClassificationLoss(smoothing, WEIGHTS)
    torch.testing.assert_close(loss(OUTPUTS, one_hot(LABELS, 5).float()), loss((LOGITS,), LABELS))
    torch.testing.assert_close(
        ClassificationLoss()(OUTPUTS, LOGITS.softmax(1)), cross_entropy(LOGITS, LOGITS.softmax(1))
    )


def test_parts_of_a_batch_average_to_the_whole():
    loss = ClassificationLoss(0.1, WEIGHTS)
    parts = [loss({"logits": LOGITS[i : i + 4]}, LABELS[i : i + 4]) for i in (0, 4, 8)]
    torch.testing.assert_close(torch.stack(parts).mean(), loss(OUTPUTS, LABELS))


def test_balanced_classes_count_alike():
    labels = torch.tensor([0] * 6 + [1] * 3 + [3])
    weights = balanced_class_weights(labels, 4)
    torch.testing.assert_close(weights[labels].mean(), torch.tensor(1.0))
    torch.testing.assert_close(
        weights * torch.bincount(labels, minlength=4), torch.tensor([10 / 3, 10 / 3, 0, 10 / 3])
    )


def test_only_the_model_can_say_that_labels_are_several(tiny_vit):
    assert are_shares(LOGITS, tiny_vit)
    assert not are_shares(LABELS, tiny_vit)
    tiny_vit.config.problem_type = "multi_label_classification"
    assert not are_shares(LOGITS, tiny_vit)


class Soft(RandomImages):
    def __getitem__(self, index):
        item = super().__getitem__(index)
        return {**item, "labels": 0.7 * one_hot(item["labels"], 10) + 0.03}


def step(model, data, tmp_path, **kwargs):
    own = {name: kwargs.pop(name, None) for name in ("class_weights", "compute_loss_func")}
    args = EntameTrainingArguments(
        str(tmp_path), max_steps=1, per_device_train_batch_size=kwargs.pop("batch", 20), report_to="none",
        save_strategy="no", entame_method="keep", dataloader_pin_memory=False, disable_tqdm=True, **kwargs,
    )  # fmt: skip
    trainer = EntameTrainer(model, args, train_dataset=data, eval_dataset=RandomImages(20), **own)
    loss = trainer.train().training_loss
    return loss, trainer


def test_soft_labels_train_with_cross_entropy(tiny_vit, tmp_path):
    data = Soft(20)
    with torch.no_grad():
        expected = cross_entropy(tiny_vit(data.images).logits, torch.stack([data[i]["labels"] for i in range(20)]))
    loss, trainer = step(tiny_vit, data, tmp_path)
    assert loss == pytest.approx(expected.item(), rel=1e-4)
    assert trainer.evaluate()["eval_loss"] > 0


def test_class_weights_reach_the_loss_whatever_the_accumulation(tiny_vit, tmp_path):
    data, weights = RandomImages(20), torch.linspace(0, 2, 10)
    with torch.no_grad():
        losses = cross_entropy(tiny_vit(data.images).logits, data.labels, reduction="none")
        expected = (losses * weights[data.labels]).mean()
    before = {name: p.detach().clone() for name, p in tiny_vit.named_parameters()}
    changes = []
    for batch, accumulation in ((20, 1), (10, 2), (8, 3)):
        tiny_vit.load_state_dict(before)
        loss, _ = step(
            tiny_vit, data, tmp_path, class_weights=weights, batch=batch, gradient_accumulation_steps=accumulation,
            optim="sgd", max_grad_norm=0, learning_rate=1.0,
        )  # fmt: skip
        assert loss == pytest.approx(expected.item(), rel=1e-4)
        changes.append(torch.cat([(p.detach() - before[n]).flatten() for n, p in tiny_vit.named_parameters()]))
    for change in changes[1:]:
        torch.testing.assert_close(change, changes[0], rtol=1e-3, atol=1e-5)


def test_class_weights_are_not_for_several_labels_an_image(tiny_vit, tmp_path):
    tiny_vit.config.problem_type = "multi_label_classification"
    with pytest.raises(InputError, match="give compute_loss_func"):
        step(tiny_vit, RandomImages(20), tmp_path, class_weights=torch.ones(10))


@pytest.mark.parametrize("later", [False, True], ids=["before", "later"])
def test_smoothing_is_not_for_several_labels_an_image(tiny_vit, tmp_path, later):
    args = EntameTrainingArguments(str(tmp_path), max_steps=1, label_smoothing_factor=0.1, report_to="none")
    if not later:
        tiny_vit.config.problem_type = "multi_label_classification"
    with pytest.raises(InputError, match=r"`label_smoothing_factor=0\.1` is about images of one class"):  # noqa: PT012
        trainer = EntameTrainer(tiny_vit, args, train_dataset=RandomImages(16))
        tiny_vit.config.problem_type = "multi_label_classification"
        trainer.train()


def test_class_weights_are_not_for_a_loss_of_ones_own(tiny_vit, tmp_path):
    with pytest.raises(InputError, match="class_weights have no effect"):
        step(tiny_vit, RandomImages(20), tmp_path, class_weights=torch.ones(10), compute_loss_func=a_mean)


def test_a_loss_of_ones_own_is_not_smoothed_and_says_so(tiny_vit, tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr("entame_hf.trainer.loss.logger.warning", said.append)
    smoothed, _ = step(
        copy.deepcopy(tiny_vit), RandomImages(20), tmp_path, compute_loss_func=a_mean, label_smoothing_factor=0.1
    )
    assert len(said) == 1
    assert smoothed == step(tiny_vit, RandomImages(20), tmp_path, compute_loss_func=a_mean)[0]


class Tuples(torch.nn.Module):
    """A model that returns a tuple, with the loss in front if it gets labels."""

    config = PreTrainedConfig(num_labels=10)

    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(3 * 32 * 32, 10)

    def forward(self, pixel_values, labels=None):
        logits = self.head(pixel_values.flatten(1))
        return (logits,) if labels is None else (cross_entropy(logits, labels), logits)


@pytest.mark.parametrize("whose", ["the model's", "smoothed", "weighted", "the user's"])
def test_tuples_are_evaluated_whoever_computes_the_loss(tmp_path, whose):
    args = EntameTrainingArguments(
        str(tmp_path), max_steps=1, report_to="none", save_strategy="no", use_cpu=True, disable_tqdm=True,
        label_smoothing_factor=0.1 if whose == "smoothed" else 0.0,
    )  # fmt: skip
    data = RandomImages(20)
    trainer = EntameTrainer(
        Tuples(), args, train_dataset=data, eval_dataset=data, entame=EntameConfig(head="head"),
        class_weights=torch.ones(10) if whose == "weighted" else None,
        compute_loss_func=(lambda out, y, **_: cross_entropy(out[0], y)) if whose == "the user's" else None,
        compute_metrics=metrics_of_predictions(),
    )  # fmt: skip
    trainer.train()
    assert "eval_accuracy" in trainer.evaluate()
    assert any("energy/noise_share" in entry for entry in trainer.state.log_history)


def a_mean(outputs, labels, num_items_in_batch=None):
    return cross_entropy(outputs["logits"], labels)


def a_sum_over_the_number(outputs, labels, num_items_in_batch=None):
    loss = cross_entropy(outputs["logits"], labels, reduction="sum")
    return loss / (len(labels) if num_items_in_batch is None else num_items_in_batch)


def a_mean_of_shares(outputs, labels, num_items_in_batch=None):
    return cross_entropy(outputs["logits"], one_hot(labels, 10).float())


@pytest.mark.parametrize("loss", [a_mean, a_sum_over_the_number, a_mean_of_shares])
def test_a_loss_of_the_users_own_does_not_depend_on_accumulation(tiny_vit, tmp_path, loss):
    data = RandomImages(20)
    before = {name: p.detach().clone() for name, p in tiny_vit.named_parameters()}
    changes, logged = [], []
    for batch, accumulation in ((20, 1), (10, 2), (8, 3), (3, 7)):
        tiny_vit.load_state_dict(before)
        _, trainer = step(
            tiny_vit, data, tmp_path, batch=batch, gradient_accumulation_steps=accumulation, optim="sgd",
            max_grad_norm=0, learning_rate=1.0, logging_steps=1, compute_loss_func=loss,
        )  # fmt: skip
        logged.append(next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry))
        changes.append(torch.cat([(p.detach() - before[n]).flatten() for n, p in tiny_vit.named_parameters()]))
    assert logged == pytest.approx([logged[0]] * 4, rel=1e-4)
    for change in changes[1:]:
        torch.testing.assert_close(change, changes[0], rtol=1e-3, atol=1e-5)
    assert trainer.evaluate()["eval_loss"] > 0


def test_a_loss_that_is_divided_in_part_is_refused_before_the_first_step(tiny_vit, tmp_path):
    def both(outputs, labels, num_items_in_batch):
        return a_mean(outputs, labels) + a_sum_over_the_number(outputs, labels, num_items_in_batch)

    with pytest.raises(InputError, match=r"Return a mean over the examples, or the sum divided by num_items_in_batch"):
        step(tiny_vit, RandomImages(20), tmp_path, batch=10, gradient_accumulation_steps=2, compute_loss_func=both)


class DoubledForImageClassification(ViTForImageClassification):
    def forward(self, *args, **kwargs):
        outputs = super().forward(*args, **kwargs)
        outputs.loss = 2 * outputs.loss
        return outputs


class TestLowPrecision:
    def first_loss(self, folder, model, **options):
        args = EntameTrainingArguments(
            str(folder), max_steps=1, per_device_train_batch_size=16, report_to="none", use_cpu=True, **options
        )
        return EntameTrainer(model, args, train_dataset=RandomImages(16)).train().training_loss

    @pytest.mark.parametrize("smoothing", [0.0, 0.1])
    @pytest.mark.parametrize("handed_over", [False, True], ids=["computed", "handed-over"])
    def test_the_first_loss_is_the_entropy_of_the_classes(self, tmp_path, tiny_vit, handed_over, smoothing):
        """In bfloat16, as DeepSpeed computes, and as FSDP2 hands over what a model returns."""
        if handed_over:
            tiny_vit.register_forward_hook(
                lambda *hooked: type(hooked[2])({k: v.to(torch.bfloat16) for k, v in hooked[2].items()})
            )
        else:
            tiny_vit.to(torch.bfloat16)
        loss = self.first_loss(tmp_path, tiny_vit, label_smoothing_factor=smoothing)
        assert loss == pytest.approx(math.log(10), abs=1e-5)

    @pytest.mark.parametrize("smoothing", [0.0, 0.1])
    def test_autocast_that_rounds_logarithms(self, tmp_path, tiny_vit, monkeypatch, smoothing):
        """As on GPUs, where it leaves log_softmax in the precision of the logits."""

        def rounded(logits, target, *_, **__):
            return nll_loss(log_softmax(logits.bfloat16(), -1).float(), target)

        # By its name in torch, as transformers calls it.
        monkeypatch.setattr(torch.nn.functional, "cross_entropy", rounded)
        loss = self.first_loss(tmp_path, tiny_vit, bf16=True, label_smoothing_factor=smoothing)
        assert loss == pytest.approx(math.log(10), abs=1e-5)

    def test_smoothed_labels_stay_so(self, tmp_path, tiny_vit):
        options = {"label_smoothing_factor": 0.9, "entame_method": "base"}
        losses = [self.first_loss(tmp_path, copy.deepcopy(tiny_vit), bf16=bf16, **options) for bf16 in (False, True)]
        assert losses[1] == pytest.approx(losses[0], rel=0.005)
        unsmoothed = self.first_loss(tmp_path, copy.deepcopy(tiny_vit), bf16=True, entame_method="base")
        assert abs(unsmoothed - losses[0]) > 0.03 * losses[0]

    @pytest.mark.parametrize("given", [False, True], ids=["written", "given"])
    def test_a_loss_of_the_models_own_stays(self, tmp_path, tiny_vit, given):
        model = DoubledForImageClassification(tiny_vit.config)
        if given:
            model = tiny_vit
            model.loss_function = lambda labels, logits, config: 2 * cross_entropy(logits, labels)
        model.to(torch.bfloat16)
        assert self.first_loss(tmp_path, model) == pytest.approx(2 * math.log(10), rel=0.01)
