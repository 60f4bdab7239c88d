import copy
import math

import pytest
import torch
from conftest import RandomImages
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import TrainerState, TrainingArguments

from entame_hf import EntameConfig, EntameTrainer, EntameTrainingArguments, ZNormLinear, error_energy, find_heads
from entame_hf.config import first_step_bound, noise_to_signal_ratio
from entame_hf.layers import merge
from entame_hf.trainer.energies import BASE_NOISE_SHARE as BASE_NOISE
from entame_hf.trainer.energies import is_measured
from entame_hf.trainer.start import start_heads

CLASSES = 10


def arguments(folder, kind=EntameTrainingArguments, **changes):
    defaults = {
        "max_steps": 1,
        "per_device_train_batch_size": 16,
        "logging_steps": 1000,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return kind(str(folder), **{**defaults, **changes})


def train(model, args, **options):
    options.setdefault("train_dataset", RandomImages(16))
    trainer = EntameTrainer(model, args, **options)
    trainer.train()
    return trainer


def energies(trainer, step=1):
    """What the recorder logged after a step; an entry that is not of a whole step is another's."""
    entries = [entry for entry in trainer.state.log_history if entry["step"] == step and BASE_NOISE not in entry]
    return {k.removeprefix("energy/"): v for entry in entries for k, v in entry.items() if k.startswith("energy/")}


def measured_steps(trainer):
    return [entry["step"] for entry in trainer.state.log_history if "energy/total" in entry]


def assert_agree(actual, expected, rel=1e-3):
    """Relatively, for some are of the order of 1e-12; but the mean of layer-normalised features is zero."""
    assert expected.keys() <= actual.keys()
    for name, value in expected.items():
        assert actual[name] == pytest.approx(value, rel=rel, abs=1e-6 if name == "feature_mean" else 0), name


class Scaler:
    """A `GradScaler` for a CPU."""

    def __init__(self, factor):
        self.factor = factor

    def scale(self, loss):
        return loss * self.factor

    def get_scale(self):
        return self.factor

    def step(self, optimizer, closure=None):
        optimizer.step(closure)

    def update(self):
        pass


class Patches(nn.Module):
    """A classifier whose head may be a convolution, one of several, or fed by tokens."""

    def __init__(self, form="conv"):
        super().__init__()
        self.backbone = nn.Conv2d(3, 12, kernel_size=16, stride=16)
        self.form = form
        self.head = nn.Conv2d(12, CLASSES, 1) if form == "conv" else nn.Linear(12, CLASSES)
        self.second = nn.Linear(12, CLASSES)

    def forward(self, pixel_values, labels):
        x = self.backbone(pixel_values)
        if self.form == "conv":
            logits = self.head(x).mean((2, 3))
        elif self.form == "tokens":
            logits = self.head(x.flatten(2).mT).mean(1)
        elif self.form == "shared":
            pooled = x.mean((2, 3))
            logits = (self.head(pooled) + self.second(pooled)) / 2
        else:
            logits = (self.head(x[..., 0, 0]) + self.second(x[..., 1, 1])) / 2
        return {"loss": cross_entropy(logits, labels), "logits": logits}


def reference(model, config, batch, classes=CLASSES):
    """The same quantities by autograd in float64, from the model as it stands before the first step."""
    model = copy.deepcopy(model).double().train()
    heads, inputs = find_heads(model, config.head), []
    for head in heads:
        head.module.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    images, labels = batch["pixel_values"].double(), batch["labels"]
    outputs = model(pixel_values=images, labels=labels)
    distinct = list({id(x): x for x in inputs}.values())
    gradients = torch.autograd.grad(outputs["loss"] * len(labels), distinct, retain_graph=True)
    outputs["loss"].backward()
    estimates = outputs["logits"].softmax(-1)
    of_heads = {id(p) for head in heads for p in head.module.parameters()}

    def norm(of_head):
        chosen = [p.grad.square().sum() for p in model.parameters() if (id(p) in of_heads) == of_head]
        return math.sqrt(sum(chosen))

    rows = [
        x.movedim(1 if x.ndim == 4 else -1, -1).flatten(0, -2) if x.ndim > 2 else x for x in map(torch.detach, inputs)
    ]
    total = (estimates - nn.functional.one_hot(labels, classes)).square().sum(-1).mean()
    features = sum(g.square().sum() for g in gradients) / len(labels)
    return {
        "total": total.item(),
        "features": features.item(),
        "features_share": (features / total).item(),
        "feature_mean": torch.cat([x.mean(0) for x in rows]).mean().item(),
        "feature_var": torch.cat([x.var(0, unbiased=False) for x in rows]).mean().item(),
        "grad_norm_backbone": norm(False),
        "grad_norm_head": norm(True),
    }


def whole(data):
    return {"pixel_values": data.images, "labels": data.labels}


class TestAgainstAutograd:
    """The batch is the whole dataset, whose order does not matter."""

    @pytest.mark.parametrize("method", ["base", "mei", "fn", "entame"])
    def test_a_linear_head(self, tmp_path, tiny_vit, method):
        config = EntameConfig.for_method(method)
        started = copy.deepcopy(tiny_vit)
        start_heads(started, config, learning_rate=1e-4, seed=42, batch_size=16)
        assert isinstance(started.classifier, ZNormLinear) == config.feature_norm
        expected = reference(started, config, whole(RandomImages(16)))
        logged = energies(train(tiny_vit, arguments(tmp_path, entame_method=method)))
        assert_agree(logged, expected)

    @pytest.mark.parametrize("method", ["base", "fn"])
    @pytest.mark.parametrize("form", ["conv", "tokens", "shared", "apart"])
    def test_other_heads(self, tmp_path, form, method):
        torch.manual_seed(0)
        model = Patches(form)
        paths = ["head", "second"] if form in ("shared", "apart") else "head"
        config = EntameConfig.for_method(method, head=paths)
        if form in ("conv", "tokens"):
            del model.second
        started = copy.deepcopy(model)
        start_heads(started, config, learning_rate=1e-4, seed=42, batch_size=16)
        expected = reference(started, config, whole(RandomImages(16)))
        logged = energies(train(model, arguments(tmp_path), entame=config))
        assert_agree(logged, expected)

    def test_soft_labels_and_a_loss_of_the_users_own(self, tmp_path, tiny_vit):
        torch.manual_seed(0)
        images, rows = torch.randn(16, 3, 32, 32), torch.rand(16, CLASSES).softmax(-1)
        data = [{"pixel_values": image, "labels": row} for image, row in zip(images, rows, strict=True)]

        def soft_loss(outputs, labels, num_items_in_batch=None):
            return cross_entropy(outputs["logits"], labels)

        started = copy.deepcopy(tiny_vit).train()
        start_heads(started, EntameConfig.for_method("base"), learning_rate=1e-4, seed=42, batch_size=16)
        logits = started(images).logits
        deltas = (logits.softmax(-1) - rows) @ started.classifier.weight
        args = arguments(tmp_path, entame_method="base")
        logged = energies(train(tiny_vit, args, train_dataset=data, compute_loss_func=soft_loss))
        assert logged["features"] == pytest.approx(deltas.square().sum(-1).mean().item(), rel=1e-4)
        assert logged["total"] == pytest.approx(float(error_energy(logits, rows).total), rel=1e-4)
        assert logged["labels"] == pytest.approx(rows.square().sum(-1).mean().item(), rel=1e-4)

    def test_label_smoothing(self, tmp_path, tiny_vit):
        data = RandomImages(16)
        smooth = 0.8 * nn.functional.one_hot(data.labels, CLASSES) + 0.2 / CLASSES
        started = copy.deepcopy(tiny_vit).train()
        start_heads(started, EntameConfig.for_method("base"), learning_rate=1e-4, seed=42, batch_size=16)
        logits = started(data.images).logits
        deltas = (logits.softmax(-1) - smooth) @ started.classifier.weight
        args = arguments(tmp_path, entame_method="base", label_smoothing_factor=0.2)
        logged = energies(train(tiny_vit, args))
        assert logged["labels"] == pytest.approx(smooth.square().sum(-1).mean().item(), rel=1e-4)
        assert logged["total"] == pytest.approx(float(error_energy(logits, smooth).total), rel=1e-4)
        assert logged["features"] == pytest.approx(deltas.square().sum(-1).mean().item(), rel=1e-4)

    def test_label_smoothing_of_soft_labels(self, tmp_path, tiny_vit):
        torch.manual_seed(0)
        images, rows = torch.randn(16, 3, 32, 32), torch.rand(16, CLASSES).softmax(-1)
        data = [{"pixel_values": image, "labels": row} for image, row in zip(images, rows, strict=True)]
        smooth = 0.8 * rows + 0.2 / CLASSES
        args = arguments(tmp_path, entame_method="mei", label_smoothing_factor=0.2)
        logged = energies(train(tiny_vit, args, train_dataset=data))
        assert logged["labels"] == pytest.approx(smooth.square().sum(-1).mean().item(), rel=1e-4)
        assert logged["total"] == pytest.approx(float(error_energy(torch.zeros_like(rows), smooth).total), rel=1e-4)


class TestWholeSteps:
    @pytest.mark.parametrize("count", [32, 27], ids=["even", "ragged"])
    def test_accumulation(self, tmp_path, tiny_vit, count):
        logs = []
        for batch, accumulation in ((16, 1), (4, 4)):
            args = arguments(
                tmp_path,
                entame_method="base",
                max_steps=2,
                per_device_train_batch_size=batch,
                gradient_accumulation_steps=accumulation,
            )
            trainer = train(copy.deepcopy(tiny_vit), args, train_dataset=RandomImages(count))
            logs.append([energies(trainer, step) for step in (1, 2)])
        for one, several in zip(*logs, strict=True):
            assert_agree(several, one)

    def test_loss_scaling_is_taken_out(self, tmp_path, tiny_vit):
        def log(scale):
            args = arguments(tmp_path, entame_method="base")
            trainer = EntameTrainer(copy.deepcopy(tiny_vit), args, train_dataset=RandomImages(16))
            if scale is not None:
                trainer.accelerator.scaler = Scaler(scale)
            trainer.train()
            return energies(trainer)

        plain = log(None)
        # Nothing here unscales the gradients of the optimizer.
        del plain["head_weights"]
        assert_agree(log(1024.0), plain)

    def test_gradients_are_those_before_clipping(self, tmp_path, tiny_vit):
        logs = [
            energies(train(copy.deepcopy(tiny_vit), arguments(tmp_path, entame_method="base", max_grad_norm=bound)))
            for bound in (1e-3, 1e3)
        ]
        assert logs[0]["grad_norm_head"] == pytest.approx(logs[1]["grad_norm_head"])
        trainer = train(tiny_vit, arguments(tmp_path, entame_method="base", logging_steps=1, max_grad_norm=1e-3))
        (norm,) = (entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry)
        logged = energies(trainer)
        assert math.hypot(logged["grad_norm_head"], logged["grad_norm_backbone"]) == pytest.approx(norm, rel=1e-4)

    def test_gradient_checkpointing(self, tmp_path, tiny_vit):
        logs = [
            energies(
                train(copy.deepcopy(tiny_vit), arguments(tmp_path, entame_method="base", gradient_checkpointing=on))
            )
            for on in (False, True)
        ]
        assert "features" in logs[0]
        assert_agree(logs[1], logs[0])

    def test_bfloat16(self, tmp_path, tiny_vit):
        full, half = (
            energies(train(copy.deepcopy(tiny_vit), arguments(tmp_path, entame_method="base", bf16=bf16)))
            for bf16 in (False, True)
        )
        del full["feature_mean"]
        assert_agree(half, full, rel=0.05)

    def test_plain_training_arguments(self, tmp_path, tiny_vit):
        logged = energies(train(tiny_vit, arguments(tmp_path, TrainingArguments)))
        assert logged["noise_share"] == pytest.approx(1 / 9, abs=1e-4)
        assert logged["entropy_share"] == pytest.approx(1, abs=1e-5)


class TestTheHeadsWeights:
    def test_what_they_are_and_may_be_after_the_first_step(self, tmp_path, tiny_vit):
        config = EntameConfig()
        args = arguments(tmp_path, optim="sgd", learning_rate=1e-4, max_steps=2)
        trainer = train(tiny_vit, args, train_dataset=RandomImages(32))
        first, second = energies(trainer, 1), energies(trainer, 2)
        assert second["head_weights"] == pytest.approx(tiny_vit.classifier.weight.square().mean().item(), rel=1e-5)
        assert first["phi_w"] == 1e-12
        assert first["noise_after_first_step"] == noise_to_signal_ratio(config, CLASSES, 1e-4, 16)
        assert first["head_weights_bound"] == first_step_bound(config, CLASSES, 1e-4, 16)
        assert {"phi_w", "head_weights_bound", "noise_after_first_step"}.isdisjoint(second)

    @pytest.mark.parametrize("classes", [2, 10, 100])
    def test_the_papers_bound(self, classes):
        """One step of plain gradient descent on features that are not correlated."""
        torch.manual_seed(0)
        count, features, rate = 64, 4096, 0.1
        config = EntameConfig(phi_w=1e-8)
        x, labels = torch.randn(count, features), torch.randint(classes, (count,))
        leaf = ZNormLinear(features, classes)
        nn.init.normal_(leaf.weight, std=1e-4)
        nn.init.zeros_(leaf.bias)
        cross_entropy(leaf(x), labels).backward()
        after = (leaf.weight - rate * leaf.weight.grad).square().mean().item()
        factor = (rate / classes) ** 2
        lambda_squared = config.phi_w / factor
        papers = factor * (lambda_squared + 1 / count + classes * (classes - 2) / count)
        bound = first_step_bound(config, classes, rate, count)
        assert bound == pytest.approx(papers)
        # z-normalisation correlates the examples a little: each feature's mean is zero.
        assert factor * (lambda_squared + 1 / count) * 0.9 <= after <= bound * 1.1

    def test_another_head_has_no_bound(self, tmp_path, tiny_vit):
        assert "head_weights_bound" not in energies(train(tiny_vit, arguments(tmp_path, entame_method="base")))


class TestWhen:
    @pytest.mark.parametrize(
        ("changes", "expected"),
        [
            ({"energy_logging_steps": 2, "logging_steps": 3}, [1, 2, 3, 6]),
            ({"energy_logging_steps": 1, "logging_steps": 0.5}, [1, 4, 8]),
            ({"energy_logging_steps": 3, "logging_strategy": "no"}, [1, 2, 3]),
            ({"energy_logging_steps": 1, "logging_strategy": "epoch"}, [1, 3, 6, 8]),
            ({"energy_logging_steps": 0, "logging_steps": 1}, []),
        ],
        ids=["steps", "fraction", "no", "epoch", "off"],
    )
    def test_steps(self, tmp_path, tiny_vit, changes, expected):
        """48 images give 3 steps an epoch: two micro-batches of 8 each."""
        args = arguments(
            tmp_path, max_steps=8, per_device_train_batch_size=8, gradient_accumulation_steps=2, **changes
        )
        trainer = train(tiny_vit, args, train_dataset=RandomImages(48))
        assert measured_steps(trainer) == expected
        losses = [entry["step"] for entry in trainer.state.log_history if "loss" in entry]
        assert set(losses) <= set(expected) or not expected

    def test_an_epoch_of_unknown_length(self, tmp_path):
        state = TrainerState(global_step=6, max_steps=8)
        args = arguments(tmp_path, logging_strategy="epoch")
        assert not is_measured(args, state, 5, iter(()))
        state.global_step = 7
        assert is_measured(args, state, 5, iter(()))

    def test_the_steps_own_loss_is_still_logged(self, tmp_path, tiny_vit):
        trainer = train(tiny_vit, arguments(tmp_path, logging_steps=1, max_steps=3), train_dataset=RandomImages(48))
        assert [entry["step"] for entry in trainer.state.log_history if "loss" in entry] == [1, 2, 3]


@settings(max_examples=50, deadline=None)
@given(sizes=st.lists(st.integers(0, 9), min_size=1, max_size=6), shift=st.floats(-1e3, 1e3), seed=st.integers(0, 99))
def test_statistics_of_parts_are_those_of_the_whole(sizes, shift, seed):
    rows = shift + torch.randn(sum(sizes), 4, generator=torch.Generator().manual_seed(seed))
    parts = [
        torch.stack([torch.full((4,), float(len(x))), x.mean(0).nan_to_num(), (x - x.mean(0)).square().sum(0)])
        for x in rows.split(sizes)
    ]
    count, mean, squares = merge(torch.stack(parts))
    assert torch.equal(count, torch.full((4,), float(len(rows))))
    if len(rows):
        torch.testing.assert_close(mean, rows.double().mean(0).float(), rtol=1e-5, atol=1e-4)
        expected = (rows.double() - rows.double().mean(0)).square().sum(0).float()
        torch.testing.assert_close(squares, expected, rtol=1e-3, atol=1e-3)
