"""A run with the method informed fits its head once, on the training images as evaluation sees them."""

from __future__ import annotations

import copy
from collections import Counter

import numpy as np
import pytest
import timm
import torch
from conftest import RandomImages
from datasets import ClassLabel, Dataset, Features, Image
from peft import LoraConfig, get_peft_model
from PIL import Image as PILImage
from torch.utils.data import IterableDataset
from transformers import TrainerCallback

from entame_hf import EntameConfig, EntameTrainer, EntameTrainingArguments, apply_entame, find_heads, fit_head
from entame_hf.data import Augmentation, ClassificationDataset, Preparation, evaluation_transform, stratified_rows
from entame_hf.patch import as_transformers, timm_processor
from entame_hf.trainer import informed

INFORMED = EntameConfig.for_method("informed")


def arguments(folder, **options):
    defaults = {"max_steps": 1, "per_device_train_batch_size": 8, "entame_method": "informed", "use_cpu": True}
    defaults |= {"save_strategy": "no", "report_to": "none", "disable_tqdm": True, "learning_rate": 0.0}
    return EntameTrainingArguments(str(folder), **{**defaults, **options})


def build(seed=0, **options):
    torch.manual_seed(seed)
    return as_transformers(timm.create_model("test_resnet", num_classes=4, **options))


def head_of(model):
    (head,) = find_heads(model)
    return head.module.weight.detach().clone()


def expected(model, data, **options):
    model = apply_entame(copy.deepcopy(model), INFORMED)
    batch = {name: torch.stack([row[name] for row in data]) for name in ("pixel_values", "labels")}
    (fit,) = fit_head(model, [batch], **options)
    return head_of(model), fit


@pytest.fixture
def passes(monkeypatch):
    """Counts the passes over images."""
    count = Counter()
    original = informed.collect_head_features

    def counted(*args):
        count["passes"] += 1
        return original(*args)

    monkeypatch.setattr(informed, "collect_head_features", counted)
    return count


def test_train_fits_the_head_and_logs_what_to_expect(tmp_path):
    data, model = RandomImages(44, classes=4), build()
    weight, fit = expected(model, data)
    trainer = EntameTrainer(model, arguments(tmp_path), train_dataset=data)
    trainer.train()
    torch.testing.assert_close(head_of(model), weight, rtol=1e-4, atol=1e-6)
    (entry,) = [entry for entry in trainer.state.log_history if "probe_accuracy" in entry]
    assert (entry["step"], entry["probe_samples"]) == (0, 44)
    assert entry["probe_accuracy"] == fit.accuracy


def test_class_weights_of_the_loss_weigh_the_fit(tmp_path):
    data, model, weights = RandomImages(40, classes=4), build(), torch.tensor([1.0, 2.0, 4.0, 1.0])
    weight, _ = expected(model, data, class_weights=weights)
    EntameTrainer(model, arguments(tmp_path), train_dataset=data, class_weights=weights).train()
    torch.testing.assert_close(head_of(model), weight, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"recipe": "recommended", "learning_rate": 1e-4},
        {"gradient_accumulation_steps": 2, "learning_rate": 1e-4},
        {"freeze_backbone": True, "learning_rate": 1e-4},
    ],
    ids=["recommended", "accumulation", "frozen backbone"],
)
def test_options_combine_with_the_method(tmp_path, options):
    trainer = EntameTrainer(build(), arguments(tmp_path, **options), train_dataset=RandomImages(40, classes=4))
    trainer.train()
    assert trainer.entame_config().init == "ridge"
    assert any("probe_accuracy" in entry for entry in trainer.state.log_history)


def test_resuming_takes_the_head_from_the_checkpoint_and_makes_no_pass(tmp_path, passes):
    data = RandomImages(40, classes=4)
    options = {"learning_rate": 1e-3, "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    straight = build()
    EntameTrainer(straight, arguments(tmp_path, **options), train_dataset=data).train()
    assert passes["passes"] == 1
    resumed = build()
    trainer = EntameTrainer(resumed, arguments(tmp_path, **options), train_dataset=data)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert passes["passes"] == 1
    torch.testing.assert_close(head_of(resumed), head_of(straight), rtol=1e-5, atol=1e-7)
    # The card still knows.
    assert any("probe_accuracy" in entry for entry in trainer.state.log_history)


def test_trials_share_one_pass_until_the_backbone_differs(tmp_path, passes):
    # The first is built with the trainer.
    data, seeds = RandomImages(40, classes=4), iter([0, 0, 0, 1])
    trainer = EntameTrainer(args=arguments(tmp_path), model_init=lambda: build(next(seeds)), train_dataset=data)
    weights = []
    for known in (1, 1, 2):
        trainer.train()
        weights.append(head_of(trainer.model))
        assert passes["passes"] == known
    torch.testing.assert_close(weights[0], weights[1])
    assert not torch.equal(weights[1], weights[2])


class Stream(IterableDataset):
    def __init__(self, data):
        self.data, self.read = data, 0

    def __iter__(self):
        for row in self.data:
            self.read += 1
            yield row


def test_a_stream_gives_its_first_samples_and_all_of_them_in_training(tmp_path):
    data, model = RandomImages(64, classes=4), build()
    weight, _ = expected(model, torch.utils.data.Subset(data, range(20)))
    stream = Stream(data)
    trainer = EntameTrainer(model, arguments(tmp_path, informed_samples=20), train_dataset=stream)

    class LoaderCheck(TrainerCallback):
        # accelerate would read the end of an epoch from it.
        def on_train_begin(self, *args, **kwargs):
            assert trainer.accelerator.gradient_state.active_dataloader is None

    trainer.add_callback(LoaderCheck())
    trainer.train()
    (entry,) = [entry for entry in trainer.state.log_history if "probe_accuracy" in entry]
    assert entry["probe_samples"] == 20
    torch.testing.assert_close(head_of(model), weight, rtol=1e-4, atol=1e-6)


def folder_of_images(count=24, width=48):
    generator = np.random.default_rng(0)
    images = [PILImage.fromarray(generator.integers(0, 255, (32, width, 3), dtype=np.uint8)) for _ in range(count)]
    features = Features({"image": Image(), "label": ClassLabel(names=list("abcd"))})
    return Dataset.from_dict({"image": images, "label": [i % 4 for i in range(count)]}, features=features)


@pytest.mark.parametrize("augmentation", ["flip", "random_resized_crop"])
def test_the_pass_sees_the_evaluations_view_and_fills_the_cache_of_the_training(tmp_path, augmentation):
    model, rows = build(), folder_of_images()
    processor = timm_processor(model)
    augment = Augmentation(augmentation)
    data = ClassificationDataset(
        rows, "image", "label", Preparation(processor, exact=False, whole=augment.crops), augment, cache_gb=1
    )
    with data.evaluation_view() as view:
        seen = view.finish(view.read(list(range(24))))["pixel_values"]
    transform = evaluation_transform(processor)
    wanted = torch.stack([transform(row["image"]) for row in rows])
    # Crops are taken of an image that was resized before.
    assert (seen - wanted).abs().mean() < (0.15 if augment.crops else 0.02)
    trainer = EntameTrainer(model, arguments(tmp_path), train_dataset=data)
    decoded = []
    original = data.pipeline.decode
    data.pipeline.decode = lambda value: decoded.append(1) or original(value)
    trainer.train()
    assert not decoded


def test_the_pass_computes_in_the_precision_of_the_training(tmp_path):
    model, seen = build(), []
    args = arguments(tmp_path, bf16=True, znorm_refresh_samples=0)
    trainer = EntameTrainer(model, args, train_dataset=RandomImages(40, classes=4))
    find_heads(model)[0].module.register_forward_pre_hook(lambda module, args: seen.append((module.training, args[0])))
    trainer.train()
    assert [(training, values.dtype) for training, values in seen] == [
        *[(False, torch.bfloat16)] * 5,
        (True, torch.bfloat16),
    ]


@pytest.mark.parametrize(("train", "evaluation", "expected"), [(12, 8, [24, 16]), (8, 20, [20, 20]), (64, 8, [40])])
def test_the_pass_takes_large_batches(tmp_path, train, evaluation, expected):
    features = Features({"image": Image(), "label": ClassLabel(num_classes=4)})
    pictures = [PILImage.new("RGB", (64, 64), (5 * i, 255 - 5 * i, 9)) for i in range(40)]
    rows = Dataset.from_dict({"image": pictures, "label": [i % 4 for i in range(40)]}, features=features)
    model = build()
    data = ClassificationDataset(rows, "image", "label", Preparation(timm_processor(model)), cache_gb=0)
    sizes = []
    options = {"per_device_train_batch_size": train, "per_device_eval_batch_size": evaluation}
    trainer = EntameTrainer(model, arguments(tmp_path, **options), train_dataset=data)
    find_heads(model)[0].module.register_forward_pre_hook(lambda _, args: sizes.append(len(args[0])))
    trainer.head_fitter.fit()
    assert sizes == expected


def test_rows_are_sampled_with_the_classes_proportions():
    labels = torch.tensor([0] * 600 + [1] * 300 + [2] * 100)
    rows = stratified_rows(labels, 100, seed=3)
    assert len(set(rows)) == 100
    assert torch.bincount(labels[rows]).tolist() == [60, 30, 10]
    assert rows == stratified_rows(labels, 100, seed=3) != stratified_rows(labels, 100, seed=4)
    assert stratified_rows(labels, 5000, seed=3) == list(range(1000))


def test_the_training_draws_what_it_would_without_a_pass(tmp_path):
    orders = []

    class Watched(RandomImages):
        def __getitem__(self, index):
            seen.append(index)
            return super().__getitem__(index)

    for method in ("informed", "entame"):
        seen: list[int] = []
        data = Watched(40, classes=4)
        trainer = EntameTrainer(build(), arguments(tmp_path, entame_method=method, max_steps=3), train_dataset=data)
        trainer.train()
        orders.append(seen[40:] if method == "informed" else seen)
    assert orders[0][:24] == orders[1][:24]


def test_feature_statistics_are_refreshed_with_current_weights(tmp_path):
    data, evaluated = RandomImages(40, classes=4), []
    options = {
        "learning_rate": 1e-2,
        "max_steps": 3,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "entame_method": "entame",
    }

    class Statistics(TrainerCallback):
        def on_evaluate(self, args, state, control, model=None, **kwargs):
            evaluated.append(find_heads(model)[0].module.znorm.mean.clone())

    def train(**more):
        trainer = EntameTrainer(
            build(),
            arguments(tmp_path, **options, **more),
            train_dataset=data,
            eval_dataset=data,
            callbacks=[Statistics()],
        )
        trainer.train()
        return trainer

    def means(trainer):
        read = []
        hook = find_heads(trainer.model)[0].module.register_forward_pre_hook(lambda _, args: read.append(args[0]))
        with torch.no_grad():
            trainer.model.eval()(data.images)
        hook.remove()
        return read[0].mean(0)

    refreshed, usual = train(znorm_refresh_samples=1000), train(znorm_refresh_samples=0)
    znorm, last = (find_heads(trainer.model)[0].module.znorm for trainer in (refreshed, usual))
    torch.testing.assert_close(znorm.mean, means(refreshed), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(last.mean, means(usual), rtol=1e-2)
    # Training itself is the same.
    torch.testing.assert_close(head_of(refreshed.model), head_of(usual.model))
    assert not torch.allclose(evaluated[0], evaluated[1], rtol=1e-2)


def test_a_model_that_is_only_evaluated_keeps_its_statistics(tmp_path):
    data, model = RandomImages(24, classes=4), apply_entame(build())
    trainer = EntameTrainer(
        model, arguments(tmp_path, entame_method=None, znorm_refresh_samples=8), train_dataset=data, eval_dataset=data
    )
    trainer.evaluate()
    assert not find_heads(model)[0].module.znorm.mean.any()


def test_peft_trains_the_copy_of_the_head_that_was_fitted(tmp_path):
    model = as_transformers(timm.create_model("test_vit", num_classes=4, img_size=32))
    model = get_peft_model(model, LoraConfig(target_modules=["qkv"], modules_to_save=["head"]))
    original = model.base_model.model.timm_model.head.original_module.weight.clone()
    EntameTrainer(model, arguments(tmp_path), train_dataset=RandomImages(40, classes=4)).train()
    head = model.base_model.model.timm_model.head
    assert torch.equal(head.original_module.weight, original)
    assert head.modules_to_save["default"].weight.abs().max() > 1e-3


def test_a_head_without_bias_reads_raw_features(tmp_path):
    data, model = RandomImages(40, classes=4), build()
    model.timm_model.fc.bias = None
    trainer = EntameTrainer(model, arguments(tmp_path, freeze_statistics=True), train_dataset=data)
    trainer.train()
    assert type(model.timm_model.fc) is torch.nn.Linear
    assert not trainer.entame_config().feature_norm
    with torch.no_grad():
        logits = model.eval()(data.images).logits
    torch.testing.assert_close(logits.mean(0), torch.zeros(4), rtol=0, atol=1e-4)


def test_a_compiled_run_is_fitted(tmp_path):
    options = {"torch_compile": True, "torch_compile_backend": "eager"}
    trainer = EntameTrainer(build(), arguments(tmp_path, **options), train_dataset=RandomImages(40, classes=4))
    trainer.train()
    assert any("probe_accuracy" in entry for entry in trainer.state.log_history)
