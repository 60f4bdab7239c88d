"""What a subclass, a callback or a search leaves without effect is refused or said, and what it sets has one."""

import pytest
import timm
import torch
from conftest import RandomImages
from test_trainer import arguments
from timm.optim import create_optimizer_v2
from torch.nn.functional import cross_entropy
from transformers import TrainerCallback

from entame_hf import EntameTrainer, InputError

pytestmark = pytest.mark.runs


class OwnLoss(EntameTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        outputs = model(**inputs)
        loss = cross_entropy(outputs.logits, inputs["labels"])
        return (loss, outputs) if return_outputs else loss


class SmoothingLoss(EntameTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = self.label_smoother(outputs, labels)
        return (loss, outputs) if return_outputs else loss


class AddedLoss(EntameTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        loss, outputs = super().compute_loss(model, inputs, True, **kwargs)
        loss = loss + outputs.logits.square().mean()
        return (loss, outputs) if return_outputs else loss


class OwnStep(EntameTrainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        model.train()
        loss = self.compute_loss(model, self._prepare_inputs(inputs))
        self.accelerator.backward(loss)
        return loss.detach()


class OwnOptimizer(EntameTrainer):
    def create_optimizer(self, model=None):
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-3)
        return self.optimizer


class OwnOptimizerAndScheduler(EntameTrainer):
    def create_optimizer_and_scheduler(self, num_training_steps):
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-3)
        self.lr_scheduler = torch.optim.lr_scheduler.ConstantLR(self.optimizer)


def train(kind, folder, model, callbacks=(), class_weights=None, **options):
    args = arguments(folder, max_steps=2, save_strategy="no", **options)
    data = RandomImages(64)
    trainer = kind(model, args, train_dataset=data, callbacks=list(callbacks), class_weights=class_weights)
    trainer.train()
    return trainer


class TestOwnMethods:
    def test_class_weights_that_a_loss_does_not_use_are_refused(self, tmp_path, tiny_vit):
        with pytest.raises(InputError, match="class_weights have no effect: compute_loss of your own"):
            train(OwnLoss, tmp_path, tiny_vit, class_weights=torch.ones(10))

    @pytest.mark.parametrize("kind", [SmoothingLoss, AddedLoss])
    def test_class_weights_that_it_uses_are_not(self, tmp_path, tiny_vit, kind):
        train(kind, tmp_path, tiny_vit, class_weights=torch.ones(10))

    def test_smoothing_that_a_loss_does_not_use_is_said(self, tmp_path, tiny_vit, caplog):
        train(OwnLoss, tmp_path, tiny_vit, label_smoothing_factor=0.1)
        assert caplog.text.count("`label_smoothing_factor=0.1` has no effect unless compute_loss of your own") == 1

    @pytest.mark.parametrize("kind", [EntameTrainer, SmoothingLoss, AddedLoss])
    def test_smoothing_that_it_uses_is_not(self, tmp_path, tiny_vit, kind, caplog):
        train(kind, tmp_path, tiny_vit, label_smoothing_factor=0.1)
        assert "label_smoothing_factor" not in caplog.text

    def test_a_head_warm_up_that_a_step_skips_is_refused(self, tmp_path, tiny_vit):
        with pytest.raises(InputError, match="`head_warmup_steps=1` has no effect: training_step of your own"):
            train(OwnStep, tmp_path, tiny_vit, entame_method="base_wu")

    def test_a_step_of_ones_own_trains_without_one(self, tmp_path, tiny_vit):
        assert train(OwnStep, tmp_path, tiny_vit).model.classifier.bias.any()

    @pytest.mark.parametrize(
        ("options", "name"),
        [
            ({"head_lr": 0.1}, "head_lr"),
            ({"head_lr_multiplier": 10.0}, "head_lr_multiplier"),
            ({"recipe": "recommended"}, "head_lr"),
            ({}, None),
        ],
        ids=["rate", "ratio", "recipe", "none"],
    )
    def test_a_head_rate_that_an_optimizer_does_not_get_is_said(self, tmp_path, tiny_vit, options, name, caplog):
        train(OwnOptimizer, tmp_path, tiny_vit, **options)
        assert (f"{name} is ignored: the optimizer was built by you" in caplog.text) == (name is not None)

    def test_a_method_that_trainer_never_calls_is_refused(self, tmp_path, tiny_vit):
        with pytest.raises(InputError, match="create_optimizer_and_scheduler of your own is never called"):
            train(OwnOptimizerAndScheduler, tmp_path, tiny_vit)


class TestLayerWiseRates:
    @pytest.mark.parametrize("applied", [False, True])
    def test_scales_that_no_scheduler_applies_are_refused(self, tmp_path, applied):
        model = timm.create_model("test_vit", num_classes=10, img_size=32)
        optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, layer_decay=0.5)
        for group in optimizer.param_groups if applied else []:
            group["lr"] *= group["lr_scale"]
        args = arguments(tmp_path, max_steps=1)
        trainer = EntameTrainer(model, args, train_dataset=RandomImages(16), optimizers=(optimizer, None))
        if applied:
            trainer.train()
            assert {group["lr"] for group in optimizer.param_groups} == {1e-3 * 0.5**i for i in range(8)}
        else:
            with pytest.raises(InputError, match="`lr_scale`, which timm's schedulers alone apply"):
                trainer.train()

    def test_one_scale_for_all_is_none(self, tmp_path, tiny_vit):
        optimizer = torch.optim.Adam([{"params": list(tiny_vit.parameters()), "lr_scale": 1.0}])
        args = arguments(tmp_path, max_steps=1)
        EntameTrainer(tiny_vit, args, train_dataset=RandomImages(16), optimizers=(optimizer, None)).train()


class At(TrainerCallback):
    """Do something with the model at an event, once."""

    def __init__(self, event, action):
        self.action = action
        setattr(self, event, self.act)

    def act(self, args, state, control, model=None, **kwargs):
        self.action(model)


def unfreeze(model):
    model.requires_grad_(True)


def freeze(model):
    model.vit.requires_grad_(False)


def replace_head(model):
    model.classifier = torch.nn.Linear(32, 10)


class TestUpdatedParameters:
    @pytest.mark.parametrize("event", ["on_train_begin", "on_epoch_begin", "on_step_begin", "on_step_end"])
    def test_a_backbone_that_is_unfrozen_too_late_is_refused(self, tmp_path, tiny_vit, event):
        freeze(tiny_vit)
        with pytest.raises(InputError, match=r"`vit\..*` was unfrozen or replaced after the optimizer was built"):
            train(EntameTrainer, tmp_path, tiny_vit, [At(event, unfreeze)])

    def test_a_model_that_is_frozen_as_a_whole_is_refused(self, tmp_path, tiny_vit):
        tiny_vit.requires_grad_(False)
        with pytest.raises(InputError, match="All parameters of the model are frozen"):
            train(EntameTrainer, tmp_path, tiny_vit, entame_method="keep")

    def test_a_head_that_is_replaced_too_late_is_refused(self, tmp_path, tiny_vit):
        with pytest.raises(InputError, match=r"`classifier\.weight` was unfrozen or replaced"):
            train(EntameTrainer, tmp_path, tiny_vit, [At("on_train_begin", replace_head)])

    def test_what_is_frozen_at_the_beginning_can_be_unfrozen(self, tmp_path, tiny_vit):
        before = tiny_vit.vit.layernorm.weight.detach().clone()
        train(EntameTrainer, tmp_path, tiny_vit, [At("on_train_begin", freeze)])
        assert torch.equal(tiny_vit.vit.layernorm.weight, before)
        tiny_vit.requires_grad_(True)
        events = [At("on_train_begin", freeze), At("on_step_end", unfreeze)]
        train(EntameTrainer, tmp_path, tiny_vit, events, entame_method="keep")
        assert not torch.equal(tiny_vit.vit.layernorm.weight, before)

    def test_a_second_training_updates_what_was_frozen_in_the_first(self, tmp_path, tiny_vit):
        before = tiny_vit.vit.layernorm.weight.detach().clone()
        freeze(tiny_vit)
        trainer = train(EntameTrainer, tmp_path, tiny_vit)
        assert torch.equal(tiny_vit.vit.layernorm.weight, before)
        unfreeze(tiny_vit)
        trainer.args.entame_method = "keep"
        trainer.train()
        assert not torch.equal(tiny_vit.vit.layernorm.weight, before)

    def test_an_optimizer_of_ones_own_may_leave_parameters_out(self, tmp_path, tiny_vit):
        optimizer = torch.optim.Adam(tiny_vit.classifier.parameters())
        args = arguments(tmp_path, max_steps=2)
        EntameTrainer(tiny_vit, args, train_dataset=RandomImages(64), optimizers=(optimizer, None)).train()


class TestChangedArguments:
    @pytest.mark.parametrize("before", [0.0, 0.2])
    def test_smoothing_that_is_set_later_counts(self, tmp_path, tiny_vit, before):
        args = arguments(tmp_path, max_steps=1, logging_steps=1, label_smoothing_factor=before)
        trainer = EntameTrainer(tiny_vit, args, train_dataset=RandomImages(64))
        trainer.args.label_smoothing_factor = 0.5
        trainer.train()
        assert trainer.label_smoother.epsilon == 0.5
        trainer.args.label_smoothing_factor = 0.0
        trainer.args.entame_method = "keep"
        trainer.train()
        assert getattr(trainer.label_smoother, "epsilon", 0) == 0

    @pytest.mark.parametrize(
        ("name", "value", "message"),
        [
            ("head_lr", -3.0, "head_lr=-3.0 must be"),
            ("znorm_momentum", 7.0, "`znorm_momentum=7.0` must be positive"),
            ("warmup_steps", -1, "`warmup_steps=-1` must be 0 or more"),
            ("recipe", "recommended", "`recipe=recommended` was set after the arguments were built"),
        ],
    )
    def test_values_that_the_constructor_would_refuse_are_refused(self, tmp_path, tiny_vit, name, value, message):
        trainer = EntameTrainer(tiny_vit, arguments(tmp_path, max_steps=1), train_dataset=RandomImages(64))
        setattr(trainer.args, name, value)
        with pytest.raises(InputError, match=message):
            trainer.train()

    def test_a_search_reaches_what_it_sets(self, tmp_path, tiny_vit):
        optuna = pytest.importorskip("optuna")
        seen = []

        class Watched(EntameTrainer):
            def log(self, logs, *args, **kwargs):
                if "learning_rate" in logs:
                    seen.append((self.args.warmup_steps, self.label_smoother.epsilon, logs["learning_rate"]))
                super().log(logs, *args, **kwargs)

        schedules = iter(["reduce_lr_on_plateau", "linear"])
        args = arguments(
            tmp_path, max_steps=4, logging_steps=1, weight_decay=0, warmup_steps=0, metric_for_best_model="accuracy"
        )
        trainer = Watched(
            args=args, model_init=lambda: tiny_vit, train_dataset=RandomImages(64), eval_dataset=RandomImages(8)
        )
        args.entame_method = "keep"
        values = iter([(0.0, 0.1), (0.5, 0.3)])

        def space(trial):
            warmup, smoothing = next(values)
            options = {"lr_scheduler_type": next(schedules), "warmup_steps": warmup}
            return {**options, "label_smoothing_factor": smoothing, "weight_decay": 0.1}

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        trainer.hyperparameter_search(space, n_trials=2, compute_objective=lambda metrics: metrics["eval_loss"])
        assert args.weight_decay == 0.1
        assert [row[:2] for row in seen] == [(0, 0.1)] * 4 + [(0.5, 0.3)] * 4
        assert [row[2] / 1e-4 for row in seen[4:]] == pytest.approx([0, 0.5, 1, 0.5])


def test_a_training_without_a_full_batch_is_refused(tmp_path, tiny_vit):
    args = arguments(tmp_path, dataloader_drop_last=True, per_device_train_batch_size=16)
    trainer = EntameTrainer(tiny_vit, args, train_dataset=RandomImages(5))
    with pytest.raises(InputError, match="5 examples fill no batch of 16, and `dataloader_drop_last=True` drops them"):
        trainer.train()


@pytest.mark.parametrize("order", ["group_by_length", "batch_rebalance"])
def test_an_order_by_the_length_of_texts_is_refused(tmp_path, tiny_vit, order):
    args = arguments(tmp_path, train_sampling_strategy=order)
    with pytest.raises(InputError, match=f"`train_sampling_strategy={order}` orders texts"):
        EntameTrainer(tiny_vit, args, eval_dataset=RandomImages(8))


def test_images_can_come_in_their_order(tmp_path, tiny_vit):
    data, seen = RandomImages(64), []

    class Recording(EntameTrainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            seen.extend(inputs["labels"].tolist())
            return super().training_step(model, inputs, num_items_in_batch)

    train(Recording, tmp_path, tiny_vit, train_sampling_strategy="sequential")
    assert seen == [int(data[i]["labels"]) for i in range(len(seen))]


@pytest.mark.parametrize("name", ["train", "eval", "b"])
def test_a_dataset_without_examples_is_refused(tmp_path, tiny_vit, name):
    train, held_out = RandomImages(0 if name == "train" else 32), RandomImages(0 if name == "eval" else 8)
    held_out = {"a": held_out, "b": RandomImages(0)} if name == "b" else held_out
    trainer = EntameTrainer(tiny_vit, arguments(tmp_path), train_dataset=train, eval_dataset=held_out)
    with pytest.raises(InputError, match=f"The {name} dataset has no examples"):
        trainer.train()
