"""A measured rate of the heads: how far it moves logits, and that it is measured once, whatever the training does."""

import copy
import dataclasses
import json
import math
import shutil
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from conftest import TINY_VIT, OutOfMemoryTrainer, RandomImages, search_learning_rate
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset
from transformers import TrainerCallback, TrainingArguments, ViTConfig, ViTForImageClassification
from transformers.utils import logging

from entame_hf import (
    EntameConfig,
    EntameTrainer,
    EntameTrainingArguments,
    InputError,
    apply_entame,
    head_learning_rate,
)
from entame_hf.patch import applied_config
from entame_hf.trainer.checkpoint import saved_record
from entame_hf.trainer.head_lr import LOGIT_STEP, MARK, _share_of_gradient, feature_norms
from entame_hf.trainer.parallel import check_sharding

AUTO = {"head_lr": "auto", "entame_method": "mei"}


def arguments(folder, **changes):
    defaults = {
        "max_steps": 3,
        "per_device_train_batch_size": 16,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "energy_logging_steps": 0,
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return EntameTrainingArguments(str(folder), **{**defaults, **AUTO, **changes})


def train(model, args, kind=EntameTrainer, data=None, resume=None, **kwargs):
    trainer = kind(model, args, train_dataset=data or RandomImages(64), **kwargs)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def logged(trainer):
    return [entry["head_lr"] for entry in trainer.state.log_history if "head_lr" in entry]


def norm_of(model, images):
    """E‖x‖₁ of what a ViT's classifier reads, by a forward of one's own."""
    seen = []
    hook = model.classifier.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model.eval()(images)
    hook.remove()
    return seen[0].abs().sum(1).mean().item()


class Rows(Dataset):
    """Features, in the place of images."""

    def __init__(self, features, labels):
        self.features, self.labels = features, labels

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return {"pixel_values": self.features[index], "labels": self.labels[index]}


class Probe(nn.Module):
    """A classifier of ready features."""

    def __init__(self, width, classes, bias=True):
        super().__init__()
        self.head = nn.Linear(width, classes, bias=bias)

    def forward(self, pixel_values, labels=None):
        logits = self.head(pixel_values)
        return {"loss": cross_entropy(logits, labels), "logits": logits}


def first_step(folder, data, classes, method="mei", **changes):
    """Take one step, on all of the data; give the mean of how far logits of each class moved."""
    args = arguments(folder, max_steps=1, per_device_train_batch_size=len(data), max_grad_norm=0.0, **changes)
    config = EntameConfig.for_method(method, head="head")
    model = Probe(data.features.shape[1], classes, bias=method != "mei")
    trainer = train(model, args, data=data, entame=config)
    with torch.no_grad():
        logits = model.train()(data.features, data.labels)["logits"]
    return logits.abs().mean(0), trainer


def two_clusters(width, scale=1.0, count=64):
    torch.manual_seed(0)
    labels = torch.arange(count) % 2
    centre = (0.5 + torch.rand(width)) * torch.randn(width).sign()
    return Rows(scale * ((2 * labels[:, None] - 1) * centre + 0.1 * torch.randn(count, width)), labels)


OPTIMIZERS = {
    "adam": {"optim": "adamw_torch"},
    "adam-decayed": {"optim": "adamw_torch", "weight_decay": 0.1},
    "sgd": {"optim": "sgd"},
    "sgd-momentum": {"optim": "sgd", "optim_args": "momentum=0.9"},
    "sgd-nesterov": {"optim": "sgd", "optim_args": "momentum=0.9,nesterov=True"},
}
# What the first step is of one that a gradient that stays comes to.
FIRST = {"sgd-momentum": 0.1, "sgd-nesterov": 0.19}


class TestHowFarAStepMovesALogit:
    @pytest.mark.parametrize(("scale", "width"), [(0.1, 512), (1.0, 32), (10.0, 2048)])
    @pytest.mark.parametrize("optimizer", OPTIMIZERS)
    def test_by_delta_where_features_tell_classes_apart(self, tmp_path, optimizer, scale, width):
        moved, _ = first_step(tmp_path, two_clusters(width, scale), 2, **OPTIMIZERS[optimizer])
        assert moved.mean().item() == pytest.approx(LOGIT_STEP * FIRST.get(optimizer, 1), rel=0.1)

    @pytest.mark.parametrize("optimizer", ["adam", "sgd"])
    def test_by_delta_over_normalised_features(self, tmp_path, optimizer):
        data = two_clusters(512, 30.0)
        moved, _ = first_step(tmp_path, data, 2, method="entame", **OPTIMIZERS[optimizer])
        assert moved.mean().item() == pytest.approx(LOGIT_STEP, rel=0.1)

    @pytest.mark.parametrize(
        ("kind", "classes"), [("gaussian", 2), ("positive", 10), ("sparse", 100), ("off-centre", 10)]
    )
    @pytest.mark.parametrize("optimizer", ["adam", "sgd"])
    def test_by_no_more_than_delta_whatever_the_features(self, tmp_path, optimizer, kind, classes):
        torch.manual_seed(1)
        labels = torch.randint(classes, (64,))
        features = torch.randn(64, 200) + torch.randn(classes, 200)[labels]
        if kind != "gaussian":
            features = {
                "positive": features.relu(),
                "sparse": features * (torch.rand(64, 200) < 0.05),
                "off-centre": features + 5,
            }[kind]
        moved, _ = first_step(tmp_path, Rows(features, labels), classes, **OPTIMIZERS[optimizer])
        if optimizer == "sgd":
            # Measured, where Adam's reach is bounded.
            assert moved.mean().item() == pytest.approx(LOGIT_STEP, rel=1e-3)
        assert 0 < moved.mean().item() <= LOGIT_STEP * 1.001

    def test_the_rate_follows_the_features_alone(self, tmp_path):
        """Not the base rate, and as the inverse of their size."""

        def rate(scale=1.0, **changes):
            return logged(first_step(tmp_path, two_clusters(64, scale), 2, **changes)[1])[0]

        assert rate(10.0) == pytest.approx(rate() / 10)
        assert rate(10.0, optim="sgd") == pytest.approx(rate(optim="sgd") / 100, rel=1e-3)
        assert rate(learning_rate=1e-5) == rate(learning_rate=1e-2)


class TestRule:
    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"momentum": 0.9},
            {"momentum": 0.9, "nesterov": True},
            {"momentum": 0.9, "dampening": 0.5},
            {"momentum": 0.9, "dampening": 0.9},
        ],
        ids=["plain", "momentum", "nesterov", "dampened", "averaged"],
    )
    def test_what_sgd_makes_of_a_gradient_that_stays(self, options):
        weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
        optimizer = torch.optim.SGD([weight], lr=1.0, **options)
        steps = []
        for _ in range(300):
            before = weight.item()
            weight.grad = torch.ones_like(weight)
            optimizer.step()
            steps.append(before - weight.item())
        assert _share_of_gradient(optimizer) == pytest.approx(max(steps))

    def test_adam(self):
        features = torch.tensor([[1.0, -2.0], [0.0, 5.0]])
        assert feature_norms(features).tolist() == [3, 5]
        assert head_learning_rate(features) == LOGIT_STEP / 4

    def test_the_mean_is_taken_over_positions(self):
        x = torch.randn(3, 7, 2, 2)
        by_position = torch.stack([x[..., i, j].norm(1, dim=1) for i in (0, 1) for j in (0, 1)]).mean(0)
        torch.testing.assert_close(feature_norms(x, -3), by_position)
        torch.testing.assert_close(feature_norms(x.flatten(2).mT), by_position)

    def test_half_precision(self):
        features = torch.full((4, 4096), 300.0, dtype=torch.float16)
        assert head_learning_rate(features) == pytest.approx(LOGIT_STEP / (300 * 4096))


class Rates(TrainerCallback):
    """Note each group's rate when a step has been taken with it."""

    def __init__(self):
        self.steps = []

    def on_optimizer_step(self, args, state, control, **kwargs):
        groups = kwargs["optimizer"].param_groups
        (head,) = {group["lr"] for group in groups if MARK in group}
        (base,) = {group["lr"] for group in groups if MARK not in group}
        self.steps.append((base, head))


SCHEDULES = {
    "constant": {},
    "constant-with-warmup": {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 2},
    "cosine-with-warmup": {"lr_scheduler_type": "cosine", "warmup_steps": 2},
    "linear": {"lr_scheduler_type": "linear"},
    "polynomial": {"lr_scheduler_type": "polynomial"},
    "cosine-with-min-lr": {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-5}},
    "decay-of-a-share": {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": {"num_decay_steps": 0.5}},
    "plateau": {
        "lr_scheduler_type": "reduce_lr_on_plateau",
        "lr_scheduler_kwargs": {"patience": 0, "threshold": 1e9, "factor": 0.5},
        "eval_strategy": "steps",
        "eval_steps": 1,
        "metric_for_best_model": "loss",
    },
}


class TestInATraining:
    @pytest.mark.parametrize("schedule", SCHEDULES)
    def test_the_heads_share_the_schedule(self, tmp_path, tiny_vit, schedule):
        rates, unhurried = Rates(), Rates()
        changes = {"max_steps": 6, **SCHEDULES[schedule]}
        trainer = train(
            copy.deepcopy(tiny_vit),
            arguments(tmp_path, **changes),
            callbacks=[rates],
            eval_dataset=RandomImages(16, seed=1),
        )
        (peak,) = logged(trainer)
        assert peak != pytest.approx(1e-4, rel=0.5)
        # The same schedule under a rate that was known before.
        given = arguments(tmp_path, **{**changes, "head_lr": peak})
        train(tiny_vit, given, callbacks=[unhurried], eval_dataset=RandomImages(16, seed=1))
        assert len(rates.steps) == 6
        for (base, head), (expected_base, expected_head) in zip(rates.steps, unhurried.steps, strict=True):
            assert base == expected_base
            assert head == pytest.approx(expected_head)
            assert head == pytest.approx(base * peak / 1e-4)
        assert len({base for base, _ in rates.steps}) > 1 or schedule == "constant"

    def test_it_is_measured_over_all_of_the_first_step(self, tmp_path, tiny_vit):
        """However that is split; the data are one batch, so that their order does not matter."""
        data = RandomImages(16)
        expected = LOGIT_STEP / norm_of(copy.deepcopy(tiny_vit), data.images)
        of_sgd = []
        for batch, accumulation in [(16, 1), (8, 2), (5, 4)]:
            changes = {
                "per_device_train_batch_size": batch,
                "gradient_accumulation_steps": accumulation,
                "max_steps": 1,
            }
            trainer = train(copy.deepcopy(tiny_vit), arguments(tmp_path, **changes), data=data)
            assert logged(trainer) == [pytest.approx(expected, rel=1e-5)]
            of_sgd += logged(train(copy.deepcopy(tiny_vit), arguments(tmp_path, optim="sgd", **changes), data=data))
        assert of_sgd == pytest.approx(of_sgd[:1] * 3, rel=1e-4)

    def test_normalised_features_are_measured_as_such(self, tmp_path, tiny_vit):
        trainer = train(tiny_vit, arguments(tmp_path, entame_method="entame"))
        # E|x| of a standardised feature lies below 1; layer-normalised ones stay away from 0.
        assert 0.6 * 32 < LOGIT_STEP / logged(trainer)[0] < 32

    def test_every_head_has_its_own(self, tmp_path):
        class TwoHeads(nn.Module):
            def __init__(self):
                super().__init__()
                self.head, self.second, self.idle = nn.Linear(48, 10), nn.Conv2d(3, 10, 1), nn.Linear(48, 10)

            def forward(self, pixel_values, labels):
                x = pixel_values[:, :, ::8, ::8]
                logits = self.head(x[:, :, :4, :4].flatten(1)) + self.second(10 * x).mean((2, 3))
                return {"loss": cross_entropy(logits, labels), "logits": logits}

        data = RandomImages(16)
        config = EntameConfig.for_method("mei", head=["head", "second", "idle"])
        trainer = train(TwoHeads(), arguments(tmp_path), data=data, entame=config)
        x = data.images[:, :, ::8, ::8]
        expected = {"head": x.flatten(1).abs().sum(1).mean(), "second": 10 * x.abs().sum(1).mean()}
        log = {key: value for entry in trainer.state.log_history for key, value in entry.items() if "head_lr" in key}
        assert log == {f"head_lr/{path}": pytest.approx(LOGIT_STEP / norm.item()) for path, norm in expected.items()}
        peaks = {group[MARK]: group["lr"] for group in trainer.optimizer.param_groups if MARK in group}
        assert peaks == {**{path: log[f"head_lr/{path}"] for path in expected}, "idle": 1e-4}

    @pytest.mark.parametrize("optimizer", ["adam", "sgd"])
    def test_a_step_that_the_scaler_skips_leaves_it_to_the_next(self, tmp_path, optimizer):
        class Overflowing(EntameTrainer):
            def compute_loss(self, model, inputs, *args, **kwargs):
                if self.state.global_step == 0:
                    inputs["pixel_values"] = inputs["pixel_values"] * math.inf
                return super().compute_loss(model, inputs, *args, **kwargs)

            def create_optimizer(self, *args):
                self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
                return super().create_optimizer(*args)

        data, config = two_clusters(32), EntameConfig.for_method("mei", head="head")
        args = arguments(tmp_path, per_device_train_batch_size=64, max_grad_norm=0.0, **OPTIMIZERS[optimizer])
        skipping = train(Probe(32, 2), args, Overflowing, data=data, entame=config)
        assert logged(skipping) == pytest.approx(logged(train(Probe(32, 2), args, data=data, entame=config)), rel=1e-3)
        assert [entry["step"] for entry in skipping.state.log_history if "head_lr" in entry] == [1]

    def test_a_frozen_backbone_and_warm_up(self, tmp_path, tiny_vit):
        plain = logged(train(copy.deepcopy(tiny_vit), arguments(tmp_path)))
        for changes in ({"freeze_backbone": True}, {"head_warmup_steps": 2}):
            assert logged(train(copy.deepcopy(tiny_vit), arguments(tmp_path, **changes))) == pytest.approx(plain)

    def test_adapters(self, tmp_path):
        base = ViTForImageClassification(ViTConfig(num_labels=10, **TINY_VIT))
        lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], modules_to_save=["classifier"])
        trainer = train(get_peft_model(base, lora), arguments(tmp_path))
        (peak,) = logged(trainer)
        (group, _) = groups = [group for group in trainer.optimizer.param_groups if MARK in group]
        assert {group["lr"] for group in groups} == {peak}
        assert group["params"] == [trainer.heads()[0].module.weight]

    def test_a_given_rate_is_the_heads_peak(self, tmp_path, tiny_vit):
        trainer = train(tiny_vit, arguments(tmp_path, head_lr=2e-3, lr_scheduler_type="linear"))
        peaks = {MARK in group: group["initial_lr"] for group in trainer.optimizer.param_groups}
        assert peaks == {True: 2e-3, False: 1e-4}
        assert logged(trainer) == []

    def test_recomputing_counts_nothing_twice(self, tmp_path, tiny_vit):
        again = arguments(tmp_path, gradient_checkpointing=True)
        expected = logged(train(copy.deepcopy(tiny_vit), arguments(tmp_path)))
        assert logged(train(tiny_vit, again)) == pytest.approx(expected)

    def test_a_compiled_graph_is_left_alone(self, tmp_path, tiny_vit):
        def run(head_lr):
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
            compiled = {"torch_compile": True, "torch_compile_backend": "eager", "max_steps": 6}
            trainer = train(copy.deepcopy(tiny_vit), arguments(tmp_path, head_lr=head_lr, **compiled))
            counters = torch._dynamo.utils.counters
            return trainer, counters["stats"]["unique_graphs"], dict(counters["graph_break"])

        _, graphs, breaks = run(1e-3)
        trainer, graphs_measured, breaks_measured = run("auto")
        assert graphs >= 1
        assert graphs_measured <= graphs
        assert breaks_measured == breaks
        assert logged(trainer) == pytest.approx(logged(train(tiny_vit, arguments(tmp_path))), rel=1e-5)

    def test_one_value_in_a_training_travels_to_the_host(self, tmp_path, tiny_vit, calls_to_host):
        def transfers(**changes):
            calls_to_host.clear()
            train(copy.deepcopy(tiny_vit), arguments(tmp_path, max_steps=4, **changes))
            return Counter(calls_to_host)

        off = transfers(head_lr=None)
        assert off, "Trainer reads its loss: the counters count nothing"
        assert transfers() - off == Counter(tolist=1)

    def test_evaluating_before_the_first_step_measures_nothing(self, tmp_path, tiny_vit):
        bright = RandomImages(16)
        bright.images *= 100
        args = arguments(tmp_path, eval_on_start=True, eval_strategy="steps", eval_steps=100)
        trainer = train(copy.deepcopy(tiny_vit), args, eval_dataset=bright)
        assert logged(trainer) == logged(train(tiny_vit, arguments(tmp_path)))


class TestAgain:
    """What is measured once, and what is measured anew."""

    @pytest.mark.parametrize("schedule", ["constant", "cosine-with-warmup", "plateau"])
    def test_resuming_is_exact_and_measures_nothing(self, tmp_path, tiny_vit, schedule):
        changes = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2, "learning_rate": 1e-3}
        args = arguments(tmp_path, **changes, **SCHEDULES[schedule])
        evaluation = {"eval_dataset": RandomImages(16, seed=1)}
        whole = train(copy.deepcopy(tiny_vit), args, **evaluation)
        for step in (4, 6):
            shutil.rmtree(tmp_path / f"checkpoint-{step}")
        resumed = train(copy.deepcopy(tiny_vit), args, resume=True, **evaluation)
        assert len(logged(whole)) == 1
        assert logged(resumed) == logged(whole)
        assert resumed.head_rates.record() == whole.head_rates.record()
        torch.testing.assert_close(resumed.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)
        for after, before in zip(resumed.optimizer.param_groups, whole.optimizer.param_groups, strict=True):
            assert (after["lr"], after.get("initial_lr")) == (before["lr"], before.get("initial_lr"))

    def test_a_checkpoint_without_its_optimizer_keeps_the_rate(self, tmp_path, tiny_vit):
        args = arguments(tmp_path, save_strategy="steps", save_steps=2, max_steps=2)
        first = train(copy.deepcopy(tiny_vit), args)
        for name in ("optimizer.pt", "scheduler.pt"):
            (tmp_path / "checkpoint-2" / name).unlink()
        rates = Rates()
        resumed = train(tiny_vit, dataclasses.replace(args, max_steps=4), resume=True, callbacks=[rates])
        assert [head for _, head in rates.steps] == logged(first) * 2
        assert logged(resumed) == logged(first)

    @pytest.mark.parametrize(
        ("before", "after", "said"), [("auto", None, "had a .* have none"), (None, 1e-3, "had no")]
    )
    def test_switching_it_on_or_off_is_refused(self, tmp_path, tiny_vit, before, after, said):
        args = arguments(tmp_path, save_strategy="steps", save_steps=2, max_steps=2, head_lr=before)
        train(copy.deepcopy(tiny_vit), args)
        with pytest.raises(InputError, match=f"{said}.*Resume with the same head_lr"):
            train(copy.deepcopy(tiny_vit), dataclasses.replace(args, max_steps=4, head_lr=after), resume=True)

    def test_out_of_memory_is_tried_again_from_a_new_measurement(self, tmp_path, tiny_vit):
        """With a batch half as large, whose images are other ones."""
        rates = Rates()

        args = arguments(tmp_path, auto_find_batch_size=True, lr_scheduler_type="cosine")
        trainer = train(tiny_vit, args, OutOfMemoryTrainer, callbacks=[rates])
        before, after = rates.steps[:2], rates.steps[2:]
        assert len(before) == 2
        assert len(after) == 3
        assert after[0] == (1e-4, pytest.approx(logged(trainer)[0]))
        assert len(logged(trainer)) == 1
        assert after[0][1] != before[0][1]
        assert after[0][1] == pytest.approx(before[0][1], rel=0.1)

    def test_what_the_head_read_before_memory_ran_out_does_not_count(self, tmp_path, tiny_vit):
        args = arguments(tmp_path, auto_find_batch_size=True, optim="sgd", gradient_accumulation_steps=4, max_steps=1)
        again = train(copy.deepcopy(tiny_vit), args, OutOfMemoryTrainer)
        args.per_device_train_batch_size = again._train_batch_size
        assert logged(again) == pytest.approx(logged(train(tiny_vit, args)), rel=1e-6)

    def test_every_trial_of_a_search_measures_its_own(self, tmp_path, tiny_vit):
        pytest.importorskip("optuna")
        seen = []

        class Watched(EntameTrainer):
            def log(self, logs, *args, **kwargs):
                if "head_lr" in logs:
                    seen.append((self.args.learning_rate, logs["head_lr"]))
                super().log(logs, *args, **kwargs)

        search_learning_rate(Watched, arguments(tmp_path, eval_strategy="epoch"), tiny_vit)
        assert len({base for base, _ in seen}) == 3
        assert len({head for _, head in seen}) == 1

    def test_training_on_measures_anew(self, tmp_path, tiny_vit):
        args = arguments(tmp_path, head_lr="auto")
        trainer = train(tiny_vit, args, entame=EntameConfig.for_method("keep"))
        (first,) = logged(trainer)
        trainer.train_dataset.images *= 3
        trainer.train()
        (second,) = logged(trainer)
        assert second != first
        groups = [group for group in trainer.optimizer.param_groups if MARK in group]
        assert {group["lr"] for group in groups} == {second}


class TestWhatIsTold:
    def test_the_config_and_the_card_tell_it(self, tmp_path, tiny_vit):
        trainer = train(tiny_vit, arguments(tmp_path))
        trainer.save_model()
        trainer.create_model_card()
        (peak,) = logged(trainer)
        record = json.loads((tmp_path / "config.json").read_text())["entame"]
        assert record["head_lr"] == {"asked": "auto", "peak": {"classifier": peak}}
        card = (tmp_path / "README.md").read_text()
        assert f"| learning rate of the head | {peak:.4g}, measured in the first step |" in card
        assert "| `head_lr` | auto |" in card
        # Somebody else's card, of a model that says it of itself.
        loaded = ViTForImageClassification.from_pretrained(tmp_path)
        again = EntameTrainer(loaded, TrainingArguments(str(tmp_path / "again"), report_to="none", use_cpu=True))
        again.create_model_card()
        assert "measured in the first step" in (tmp_path / "again" / "README.md").read_text()

    @pytest.mark.parametrize(
        ("change", "row"),
        [
            ({"head_lr": 2e-3}, "| learning rate of the head | 0.002 |"),
            ({"head_lr": None, "head_lr_multiplier": 10.0}, "| learning rate of the head | 0.001 |"),
        ],
        ids=["given", "multiplied"],
    )
    def test_a_rate_that_was_not_measured(self, tmp_path, tiny_vit, change, row):
        train(tiny_vit, arguments(tmp_path, **change)).create_model_card()
        assert row in (tmp_path / "README.md").read_text()

    def test_a_head_at_the_base_rate_has_none_of_its_own(self, tmp_path, tiny_vit):
        trainer = train(tiny_vit, arguments(tmp_path, head_lr=None))
        trainer.save_model()
        trainer.create_model_card()
        assert json.loads((tmp_path / "config.json").read_text())["entame"]["head_lr"] is None
        assert "learning rate of the head" not in (tmp_path / "README.md").read_text()
        assert not any(MARK in group for group in trainer.optimizer.param_groups)


class TestRefusals:
    @pytest.mark.parametrize("optimizer", ["rmsprop", "adafactor"])
    def test_an_optimizer_whose_steps_are_not_known(self, tmp_path, tiny_vit, optimizer):
        with pytest.raises(InputError, match=r'not those of \w+\. Give the rate, .* optim="adamw_torch"'):
            train(copy.deepcopy(tiny_vit), arguments(tmp_path, optim=optimizer))
        train(tiny_vit, arguments(tmp_path, optim=optimizer, head_lr=1e-3))

    def test_a_momentum_that_forgets_nothing(self, tmp_path, tiny_vit):
        with pytest.raises(InputError, match=r"momentum=1, with which steps grow for ever\. Give less, such as 0\.9"):
            train(tiny_vit, arguments(tmp_path, optim="sgd", optim_args="momentum=1.0"))

    @pytest.mark.parametrize(("factor", "norm"), [(0, "0.0"), (math.nan, "nan"), (math.inf, "inf")])
    def test_features_from_which_no_rate_follows(self, tmp_path, factor, norm):
        data = two_clusters(32)
        data.features = torch.ones_like(data.features) * factor
        model = Probe(32, 2)
        with pytest.raises(InputError, match=rf"What head reads in the first step is zero or not finite \({norm}\)"):
            train(model, arguments(tmp_path), data=data, entame=EntameConfig.for_method("mei", head="head"))
        assert model.head.weight.isfinite().all()

    def test_a_loss_that_passes_the_measurement_by(self, tmp_path, tiny_vit):
        class Own(EntameTrainer):
            def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
                outputs = model(**inputs)
                return (outputs.loss, outputs) if return_outputs else outputs.loss

        with pytest.raises(InputError, match=r"super\(\)\.compute_loss"):
            train(tiny_vit, arguments(tmp_path), Own)

    @pytest.mark.parametrize("option", [{"head_lr": "auto"}, {"head_lr": 1e-2}, {"head_lr_multiplier": 10.0}])
    def test_an_optimizer_of_the_users_own_is_left_alone(self, tmp_path, tiny_vit, monkeypatch, caplog, option):
        monkeypatch.setattr(logging.get_logger("transformers"), "propagate", True)
        optimizer = torch.optim.Adam(tiny_vit.parameters(), lr=1e-3)
        args = arguments(tmp_path, **{"head_lr": None, **option})
        trainer = train(tiny_vit, args, optimizers=(optimizer, None))
        assert f"{next(iter(option))} is ignored: the optimizer was built by you" in caplog.text
        assert [group["lr"] for group in optimizer.param_groups] == [1e-3]
        assert trainer.head_rates.record() is None
        assert logged(trainer) == []

    def test_deepspeed_steps_before_a_measured_rate_could_be_set(self):
        accelerator = SimpleNamespace(state=SimpleNamespace(fsdp_plugin=None, deepspeed_plugin=object()))
        config = EntameConfig.for_method("mei")
        check_sharding(accelerator, config, 0)
        with pytest.raises(InputError, match=r"head_lr=1e-3"):
            check_sharding(accelerator, config, 0, measures_head_lr=True)


def test_the_recommended_recipe_measures_beside_a_config_that_was_applied(tmp_path, tiny_vit):
    applied = EntameConfig(phi_w=1e-8, feature_norm=False)
    args = EntameTrainingArguments(str(tmp_path), recipe="recommended", max_steps=2, report_to="none", use_cpu=True)
    trainer = train(apply_entame(tiny_vit, applied), args)
    assert applied_config(tiny_vit) == trainer.entame_config() == applied
    assert len(logged(trainer)) == 1
    trainer.save_model()
    assert saved_record(tmp_path)["method"] == "mei"
