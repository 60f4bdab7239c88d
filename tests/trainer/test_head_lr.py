"""The measured head learning rate: how far it moves logits, and that each run measures it once."""

import copy
import math
from collections import Counter

import pytest
import torch
from conftest import TINY_VIT, RandomImages
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset
from transformers import TrainerCallback, ViTConfig, ViTForImageClassification

from entame_hf import EntameConfig, EntameTrainer, EntameTrainingArguments, InputError, head_learning_rate
from entame_hf.trainer.head_lr import LOGIT_STEP, MARK, _share_of_gradient, feature_norms

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
    def test_a_step_moves_logits_by_delta_where_features_separate_classes(self, tmp_path, optimizer, scale, width):
        moved, _ = first_step(tmp_path, two_clusters(width, scale), 2, **OPTIMIZERS[optimizer])
        assert moved.mean().item() == pytest.approx(LOGIT_STEP * FIRST.get(optimizer, 1), rel=0.1)

    @pytest.mark.parametrize("optimizer", ["adam", "sgd"])
    def test_a_step_moves_logits_by_delta_over_normalised_features(self, tmp_path, optimizer):
        data = two_clusters(512, 30.0)
        moved, _ = first_step(tmp_path, data, 2, method="entame", **OPTIMIZERS[optimizer])
        assert moved.mean().item() == pytest.approx(LOGIT_STEP, rel=0.1)

    @pytest.mark.parametrize(
        ("kind", "classes"), [("gaussian", 2), ("positive", 10), ("sparse", 100), ("off-centre", 10)]
    )
    @pytest.mark.parametrize("optimizer", ["adam", "sgd"])
    def test_a_step_moves_logits_by_at_most_delta(self, tmp_path, optimizer, kind, classes):
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
    def test_sgd_sums_a_constant_gradient(self, options):
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

    @pytest.mark.parametrize("features", [torch.zeros(2, 3), torch.full((2, 3), torch.nan), torch.zeros(0, 3)])
    def test_features_without_a_rate_are_refused(self, features):
        with pytest.raises(InputError, match="zero or not finite"):
            head_learning_rate(features)


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

    def test_all_micro_batches_of_the_first_step_are_measured(self, tmp_path, tiny_vit):
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

    def test_each_head_has_a_learning_rate(self, tmp_path):
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

    def test_a_given_head_learning_rate_is_the_peak(self, tmp_path, tiny_vit):
        trainer = train(tiny_vit, arguments(tmp_path, head_lr=2e-3, lr_scheduler_type="linear"))
        peaks = {MARK in group: group["initial_lr"] for group in trainer.optimizer.param_groups}
        assert peaks == {True: 2e-3, False: 1e-4}
        assert logged(trainer) == []

    def test_recomputing_counts_nothing_twice(self, tmp_path, tiny_vit):
        again = arguments(tmp_path, gradient_checkpointing=True)
        expected = logged(train(copy.deepcopy(tiny_vit), arguments(tmp_path)))
        assert logged(train(tiny_vit, again)) == pytest.approx(expected)

    @pytest.mark.runs
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

    def test_a_run_synchronises_once(self, tmp_path, tiny_vit, calls_to_host):
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
