"""Labels of a user's own dataset: converted, or refused before the first step."""

import datasets
import numpy as np
import pytest
import torch
from conftest import RandomImages
from PIL import Image
from torch.nn.functional import one_hot
from torch.utils.data import Subset
from transformers import ViTImageProcessor

from entame_hf import EntameTrainer, EntameTrainingArguments, InputError
from entame_hf.data import ClassificationDataset, Preparation
from entame_hf.trainer.labels import LabelReader, check_labels


class Labelled(RandomImages):
    """Images whose labels a function makes of the class."""

    def __init__(self, label, size=24):
        super().__init__(size)
        self.label = label

    def __getitem__(self, index):
        item = super().__getitem__(index)
        return {**item, "labels": self.label(int(item["labels"]))}


def hot(*others):
    return lambda label: one_hot(torch.tensor([label, *others]), 10).sum(0).clamp(max=1)


def run(model, data, tmp_path, **options):
    defaults = {"max_steps": 3, "logging_steps": 1, "per_device_train_batch_size": 8, "report_to": "none"}
    args = EntameTrainingArguments(str(tmp_path), use_cpu=True, save_strategy="no", **{**defaults, **options})
    trainer = EntameTrainer(model, args, train_dataset=data, eval_dataset=data)
    trainer.train()
    return trainer


CLASSES = {
    "int": int,
    "np.int32": np.int32,
    "np.uint8": np.uint8,
    "np.int64": np.int64,
    "int16": lambda label: torch.tensor(label, dtype=torch.int16),
    "int32": lambda label: torch.tensor(label, dtype=torch.int32),
    "uint8": lambda label: torch.tensor(label, dtype=torch.uint8),
    "float": float,
    "multi-hot-int": hot(),
    "multi-hot-bool": lambda label: hot()(label).bool(),
    "shares": lambda label: hot()(label).float(),
}


@pytest.mark.parametrize("label", CLASSES.values(), ids=CLASSES)
def test_labels_of_every_dtype_train_and_evaluate_alike(tiny_vit, tmp_path, label):
    trainer = run(tiny_vit, Labelled(label), tmp_path)
    expected = torch.tensor(10.0).log().item()
    assert trainer.state.log_history[0].get("loss", expected) == pytest.approx(expected, rel=1e-4)
    first = next(entry for entry in trainer.state.log_history if "energy/labels" in entry)
    assert first["energy/labels"] == pytest.approx(1)
    trainer.model.eval()
    data = trainer.eval_dataset
    with torch.no_grad():
        logits = trainer.model(data.images).logits
    known = torch.nn.functional.cross_entropy(logits, data.labels).item()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(known, rel=1e-4)


@pytest.mark.parametrize("label", [hot(3), lambda label: hot(3, 4)(label).float()], ids=["int", "float"])
def test_rows_that_do_not_sum_to_1_are_refused_before_the_first_step(tiny_vit, tmp_path, label):
    with pytest.raises(InputError, match=r'by up to .*set model\.config\.problem_type = "multi_label'):
        run(tiny_vit, Labelled(label), tmp_path)


def test_rows_that_do_not_sum_to_1_are_refused_in_later_batches(tiny_vit):
    reader, one, two = LabelReader(), hot()(1).float()[None], hot(2)(1).float()[None]
    for _ in range(2):
        reader({"labels": one}, tiny_vit)
    with pytest.raises(InputError, match="differs from 1 by up to 1,"):
        reader({"labels": two}, tiny_vit)
    reader({"labels": one}, tiny_vit)


@pytest.mark.parametrize(
    ("label", "message"),
    [
        (lambda label: label + label // 9, r"go up to 10, and the model has 10 classes .*num_labels=11"),
        (lambda label: label * 100, r"go up to \d00, and the model has 10"),
        (lambda label: -1 if label == 7 else label, r"have -1, and classes are counted from 0 to 9"),
    ],
    ids=["one-too-many", "far", "negative"],
)
def test_indices_that_are_no_class_are_refused_in_any_batch(tiny_vit, tmp_path, label, message):
    with pytest.raises(InputError, match=message):
        run(tiny_vit, Labelled(label), tmp_path, per_device_train_batch_size=1, max_steps=24, entame_method="mei")


def test_ignored_labels_and_those_of_a_loss_of_ones_own_are_no_classes(tiny_vit):
    LabelReader()({"labels": torch.tensor([0, -100])}, tiny_vit)
    LabelReader(has_own_loss=True)({"labels": torch.tensor([0, -1])}, tiny_vit)


def test_labels_that_collating_drops_are_named(tiny_vit, tmp_path):
    with pytest.raises(InputError, match="no labels, only pixel_values"):
        run(tiny_vit, Labelled(str), tmp_path)


@pytest.mark.parametrize("method", ["entame", "mei", "keep"])
def test_a_head_swapped_by_hand_that_takes_other_features_is_refused(tiny_vit, tmp_path, method):
    tiny_vit.classifier = torch.nn.Linear(16, 10)
    with pytest.raises(InputError, match=r"`classifier` takes 16 features, .* gives it 32.*Linear\(32, 10\)"):
        run(tiny_vit, Labelled(int), tmp_path, entame_method=method)


@pytest.mark.parametrize("label", [hot(3), lambda label: hot(3)(label).float()], ids=["int", "float"])
def test_several_labels_an_image_train_without_energies(tiny_vit, tmp_path, label):
    tiny_vit.config.problem_type = "multi_label_classification"
    trainer = run(tiny_vit, Labelled(label), tmp_path)
    history = trainer.state.log_history
    assert history[0]["loss"] == pytest.approx(torch.tensor(2.0).log().item(), rel=1e-3)
    assert not any(key.startswith("energy/") for entry in history for key in entry)


def test_numbers_are_evaluated_as_the_model_does(tiny_vit, tmp_path):
    tiny_vit.config.problem_type = "regression"
    images, numbers = torch.randn(8, 3, 32, 32), torch.randn(8, 10)
    data = [{"pixel_values": image, "labels": row} for image, row in zip(images, numbers, strict=True)]
    trainer = EntameTrainer(tiny_vit, EntameTrainingArguments(tmp_path, report_to=[]), eval_dataset=data)
    expected = torch.nn.functional.mse_loss(tiny_vit.eval()(images).logits, numbers)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_shares_in_half_precision_sum_to_1(tiny_vit, dtype):
    rows = torch.rand(64, 10).softmax(1).to(dtype)
    assert LabelReader()({"labels": rows}, tiny_vit)["labels"] is rows


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (torch.tensor([0.0, 1.5]), "are fractions, such as 1.5"),
        (torch.full((2, 7), 1 / 7), "rows of 7 values, and the model has 10 classes"),
    ],
    ids=["fractions", "width"],
)
def test_labels_that_are_nothing_are_refused(tiny_vit, labels, message):
    with pytest.raises(InputError, match=message):
        LabelReader()({"labels": labels}, tiny_vit)


@pytest.mark.parametrize(
    "labels", [torch.tensor([1, 2]), torch.tensor([[1, 2, -100]]), torch.tensor([[3], [4]])], ids=["N", "NxP", "Nx1"]
)
def test_indices_stay_as_they_are(tiny_vit, labels):
    inputs = {"labels": labels}
    assert LabelReader()(inputs, tiny_vit) is inputs


def named(kind, names):
    """Data of a few classes, in a dataset that names them."""
    if kind in ("torchvision", "subset"):
        data = RandomImages(24, classes=len(names))
        data.classes = names
        return Subset(data, range(12)) if kind == "subset" else data
    images = [Image.new("RGB", (32, 32), (index, 0, 0)) for index in range(12)]
    labels = [index % len(names) for index in range(12)]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=names)})
    rows = datasets.Dataset.from_dict({"image": images, "label": labels}, features=features)
    preparation = Preparation(ViTImageProcessor(size={"height": 32, "width": 32})) if kind == "package" else None
    if preparation is not None:
        return ClassificationDataset(rows, "image", "label", preparation)
    black = torch.zeros(3, 32, 32)
    return rows.with_transform(lambda batch: {"label": batch["label"], "pixel_values": [black] * len(batch["label"])})


TEN = [f"class {index}" for index in range(10)]


class TestNamesOfClasses:
    @pytest.fixture(params=["torchvision", "subset", "datasets", "package"])
    def trainer(self, request, tiny_vit, tmp_path):
        def build(names, known=None):
            if known is not None:
                tiny_vit.config.id2label = dict(enumerate(known))
            args = EntameTrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
            return EntameTrainer(tiny_vit, args, train_dataset=named(request.param, names))

        return build

    def test_a_model_with_more_classes_than_the_data_is_refused(self, trainer):
        with pytest.raises(InputError, match=r"has 10 classes, and the train dataset 2 \(no, yes\).*num_labels=2"):
            trainer(["no", "yes"]).train()

    def test_the_same_classes_in_another_order_are_refused(self, trainer):
        with pytest.raises(InputError, match=r"otherwise: 0 is class 9 in the model, and class 0 in the dataset"):
            check_labels(trainer(TEN, TEN[::-1]))

    def test_other_names_are_warned_about(self, trainer, caplog):
        check_labels(trainer(TEN, [f"n{index}" for index in range(10)]))
        assert "calls its classes n0, n1" in caplog.text

    def test_a_collator_may_take_other_labels(self, tiny_vit, tmp_path):
        def collate(items):
            images = torch.randn(len(items), 3, 32, 32)
            return {"pixel_values": images, "labels": torch.tensor([9 - item["label"] for item in items])}

        args = EntameTrainingArguments(str(tmp_path), use_cpu=True, report_to="none", max_steps=1)
        EntameTrainer(tiny_vit, args, collate, train_dataset=named("datasets", ["no", "yes"])).train()

    @pytest.mark.parametrize("known", [None, TEN], ids=["unnamed", "named"])
    def test_the_same_names_and_none_pass(self, trainer, caplog, known):
        check_labels(trainer(TEN, known))
        check_labels(trainer([str(index) for index in range(10)], known))
        assert not caplog.records
