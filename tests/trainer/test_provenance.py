"""A checkpoint knows what it was trained on: a run resumes the same training, or is refused in one line."""

from __future__ import annotations

import json
import re
import shutil

import datasets
import pytest
import timm
import torch
from conftest import RandomImages
from PIL import Image
from torch.utils.data import Subset, TensorDataset
from transformers import ViTImageProcessor
from transformers.utils import logging

from entame_hf import EntameTrainer, EntameTrainingArguments, InputError
from entame_hf.data import fingerprint, known_labels

DATA, HELD_OUT = RandomImages(48), RandomImages(20, seed=1)
NAMES = [f"class {index}" for index in range(10)]


def build(folder, model="test_resnet", names=NAMES, train=DATA, held_out=HELD_OUT, processor=None, **changes):
    torch.manual_seed(0)
    own = {name: changes.pop(name, None) for name in ("class_weights", "compute_loss_func")}
    defaults = {
        **{"max_steps": 4, "save_steps": 2, "logging_steps": 1, "energy_logging_steps": 0, "learning_rate": 1e-3},
        **{"per_device_train_batch_size": 16, "use_cpu": True, "disable_tqdm": True, "report_to": "none"},
    }
    args = EntameTrainingArguments(str(folder), **{**defaults, **changes})
    network = timm.create_model(model, num_classes=len(names))
    trainer = EntameTrainer(
        network, args, train_dataset=train, eval_dataset=held_out, processing_class=processor, **own
    )
    trainer.model.config.id2label = dict(enumerate(names))
    return trainer


def processor(side):
    return ViTImageProcessor(size={"height": side, "width": side})


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    build(folder, processor=processor(32)).train()
    return folder


@pytest.fixture
def warnings(monkeypatch, caplog):
    monkeypatch.setattr(logging.get_logger("transformers"), "propagate", True)
    return caplog


# ---- Another training ----


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"names": [*NAMES[:9], "renamed"]}, "classes: 9 is class 9 in the checkpoint, renamed in this run"),
        ({"names": [NAMES[1], NAMES[0], *NAMES[2:]]}, "classes: 0 is class 0 in the checkpoint, class 1 in this run"),
        ({"names": [*NAMES, "added"]}, r"classes: 10 in the checkpoint, 11 in this run \(such as added\)"),
        ({"model": "test_efficientnet"}, "model: test_resnet in the checkpoint, test_efficientnet in this run"),
        ({"optim": "sgd"}, "optimizer: AdamW in the checkpoint, SGD in this run"),
        ({"optim": "adafactor"}, "optimizer: AdamW in the checkpoint, Adafactor in this run"),
        ({"train": RandomImages(40)}, "training examples: 48 in the checkpoint, 40 in this run"),
        ({"train": Subset(DATA, range(47, -1, -1))}, "training examples: 48 in both, but others or in another order"),
        ({"held_out": RandomImages(20, classes=7)}, "evaluation examples: 20 in both, but others"),
        ({"processor": processor(24)}, "images: 32 × 32 px in the checkpoint, 24 × 24 px in this run"),
        ({"seed": 7}, "`seed`: 42 in the checkpoint, 7 in this run"),
        ({"recipe": "recommended"}, "`recipe`: paper in the checkpoint, recommended in this run"),
        ({"freeze_backbone": True}, "`freeze_backbone`: False in the checkpoint, True in this run"),
        ({"gradient_accumulation_steps": 2}, "examples per step: 16 in the checkpoint, 32 in this run"),
        ({"entame_method": "mei"}, "trained with another EntameConfig"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_resume_refuses_another_training_in_one_line(run, changes, message):
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with pytest.raises(InputError, match=message) as error:
        build(run, **{"processor": processor(32), **changes}).train(resume_from_checkpoint=True)
    assert "\n" not in str(error.value)
    assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}


def test_a_part_of_the_model_that_the_user_has_frozen_is_known(run):
    trainer = build(run)
    next(trainer.model.parameters()).requires_grad_(False)
    with pytest.raises(InputError, match="trained parameters"):
        trainer.train(resume_from_checkpoint=True)


def stream(names=("a", "b"), files=("x/0.parquet", "x/1.parquet"), root=None):
    for index, file in enumerate(files):
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=list(names))})
        image = Image.new("RGB", (8 + index, 8))
        datasets.Dataset.from_dict({"image": [image] * 2, "label": [0, 1]}, features=features).to_parquet(root / file)
    paths = [str(root / file) for file in files]
    return datasets.load_dataset("parquet", data_files=paths, split="train", streaming=True)


def test_streams_are_known_by_columns_and_files(tmp_path):
    here, moved = stream(root=tmp_path / "here"), stream(root=tmp_path / "there")
    assert fingerprint(here) == fingerprint(moved)
    assert fingerprint(here.shuffle(seed=1)) == fingerprint(here)
    others = [
        stream(files=["x/0.parquet"], root=tmp_path / "fewer"),
        stream(files=["x/0.parquet", "x/2.parquet"], root=tmp_path / "renamed"),
        stream(names=("a", "c"), root=tmp_path / "classes"),
        here.rename_column("label", "labels"),
    ]
    assert all(fingerprint(other) != fingerprint(here) for other in others)


def test_examples_that_nothing_tells_apart_are_named(tmp_path, caplog):
    generated = datasets.IterableDataset.from_generator(lambda: ({"a": 1} for _ in range(9)))
    assert "files" not in fingerprint(generated)
    build(tmp_path, train=Unlabelled(10), held_out=HELD_OUT).train()
    caplog.clear()
    build(tmp_path, train=Unlabelled(10), held_out=HELD_OUT, max_steps=5).train(resume_from_checkpoint=True)
    assert "The training examples have no labels, names or files that could be compared" in caplog.text


def test_several_differences_are_named_together(run):
    with pytest.raises(InputError, match=r"optimizer: .*; training examples: .*Resume with the same, or start a new"):
        build(run, optim="sgd", train=HELD_OUT).train(resume_from_checkpoint=True)


def test_the_same_training_split_over_other_processes_is_resumed(tmp_path, run):
    shutil.copytree(run, tmp_path, dirs_exist_ok=True)
    accumulated = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}
    done = build(tmp_path, processor=processor(32), **accumulated)
    assert done.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2")).global_step == 4


def test_a_checkpoint_that_does_not_say_is_resumed_with_one_warning(tmp_path, run, warnings):
    shutil.copytree(run, tmp_path, dirs_exist_ok=True)
    for name in ("checkpoint_files.json", "trained_on.json"):
        (tmp_path / "checkpoint-2" / name).unlink()
    build(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert warnings.text.count("does not say what it was trained on") == 1


@pytest.mark.parametrize("content", ["null", "[]", "{", '{"facts": 1, "options": {}}'])
def test_a_damaged_description_is_refused_in_one_line(tmp_path, run, content):
    shutil.copytree(run / "checkpoint-2", tmp_path / "checkpoint-2")
    (tmp_path / "checkpoint-2" / "checkpoint_files.json").unlink()
    (tmp_path / "checkpoint-2" / "trained_on.json").write_text(content)
    with pytest.raises(InputError, match=r"trained_on\.json is damaged"):
        build(tmp_path).train(resume_from_checkpoint=True)


# ---- Other options ----


def test_the_optimizers_options_are_the_checkpoints_and_are_recorded_as_used(tmp_path, run, warnings):
    shutil.copytree(run, tmp_path, dirs_exist_ok=True)
    others = {"learning_rate": 0.5, "weight_decay": 0.3, "adam_beta1": 0.5, "warmup_steps": 3}
    done = build(tmp_path, processor=processor(32), **others)
    done.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert "checkpoint's values count: `learning_rate=0.001` (not 0.5), `weight_decay=0.0` (not 0.3)" in warnings.text
    expected = torch.load(run / "checkpoint-4" / "optimizer.pt")["param_groups"]
    assert torch.load(tmp_path / "checkpoint-4" / "optimizer.pt")["param_groups"] == expected
    config = json.loads((tmp_path / "checkpoint-4" / "config.json").read_text())
    assert config["entame"]["learning_rate"] == 1e-3
    done.create_model_card()
    assert re.search(r"learning_rate\W+0\.001", (tmp_path / "README.md").read_text())


def test_a_resumed_schedule_is_the_checkpoints(tmp_path):
    build(tmp_path, lr_scheduler_type="linear").train()
    done = build(tmp_path, lr_scheduler_type="constant")
    done.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    rates = [entry["learning_rate"] for entry in done.state.log_history if "learning_rate" in entry]
    assert rates[-1] == pytest.approx(1e-3 / 4)


def test_when_to_save_evaluate_and_log_is_the_runs_own_choice(tmp_path, run, warnings):
    shutil.copytree(run, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "checkpoint-4")
    options = {"save_steps": 1, "eval_strategy": "steps", "eval_steps": 3, "logging_steps": 2}
    done = build(tmp_path, processor=processor(32), **options)
    done.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-3", "checkpoint-4"}
    assert [entry["step"] for entry in done.state.log_history if "eval_loss" in entry] == [3, 4]
    assert [entry["step"] for entry in done.state.log_history if "loss" in entry] == [1, 2, 4]
    assert "This run's values count from here on: " in warnings.text
    assert "`save_steps=1` (before: 2)" in warnings.text


def a_loss(outputs, labels, num_items_in_batch=None):
    return torch.nn.functional.cross_entropy(outputs["logits"], labels)


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        ({"class_weights": torch.arange(10) + 0.5}, r"`class_weights=\[0.5, 1.5, .*\]` \(before: None\)"),
        ({"compute_loss_func": a_loss}, r"`compute_loss_func=a_loss` \(before: None\)"),
        ({"label_smoothing_factor": 0.1}, r"`label_smoothing_factor=0.1` \(before: 0.0\)"),
        ({}, None),
    ],
    ids=["weights", "own", "smoothing", "same"],
)
def test_another_loss_is_said_when_a_run_is_resumed(tmp_path, run, warnings, loss, said):
    shutil.copytree(run, tmp_path, dirs_exist_ok=True)
    build(tmp_path, processor=processor(32), **loss).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert bool(re.search(said or "values count", warnings.text)) == bool(said)


# ---- Labels and classes ----


class Unlabelled(torch.utils.data.Dataset):
    """Labels that nobody knows before an example is read."""

    def __init__(self, count=20):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return {"pixel_values": torch.zeros(3, 32, 32), "labels": index}


@pytest.mark.parametrize(
    "changes",
    [{"train": RandomImages(20, classes=12)}, {"held_out": RandomImages(24, classes=12)}, {"train": Unlabelled()}],
    ids=["train", "eval", "unknown before they are read"],
)
def test_labels_beyond_the_models_classes_are_named_before_the_first_step(tmp_path, changes):
    trainer = build(tmp_path, **changes)
    with pytest.raises(InputError, match=r"(11|18).*10 classes.*apply_entame\(model, num_labels="):
        trainer.train()
    assert trainer.state.global_step == 0


class Shifted(RandomImages):
    """Labels that count from 1 where the dataset lists them, and from 0 in a batch."""

    def __getitem__(self, index):
        return {"pixel_values": self.images[index], "labels": self.labels[index] - 1}


class Pairs(Shifted):
    """Examples as torchvision gives them, which a collator of the user's own puts together."""

    def __getitem__(self, index):
        return self.images[index], int(self.labels[index]) - 1


def of_pairs(examples):
    images, labels = zip(*examples, strict=True)
    return {"pixel_values": torch.stack(images), "labels": torch.tensor(labels)}


def with_labels(dataset, change):
    dataset.labels = change(dataset.labels)
    return dataset


def in_a_table(labels):
    table = datasets.Dataset.from_dict({"image": [[0.0]] * len(labels), "label": labels})
    return table.with_transform(
        lambda rows: {"pixel_values": torch.zeros(len(rows["label"]), 3, 32, 32), "labels": rows["label"]}
    )


ONE_BELOW = with_labels(RandomImages(40), lambda labels: torch.where(torch.arange(40) == 39, -1, labels))


@pytest.mark.parametrize(
    ("train", "collator", "message"),
    [
        (in_a_table([*range(10), 10]), None, "train dataset go up to 10, and the model has 10 classes.*num_labels=11"),
        (with_labels(Shifted(40), lambda labels: labels + 2), None, r"go up to 10, and the model has 10 classes"),
        (with_labels(Pairs(40), lambda labels: labels + 2), of_pairs, r"go up to 10, and the model has 10 classes"),
        (ONE_BELOW, None, r"train dataset have -1, and classes .* 0 to 9\. Give -100"),
        (Subset(ONE_BELOW, range(30, 40)), None, r"train dataset have -1"),
    ],
    ids=["a column", "changed by the dataset", "changed for a collator", "negative", "in a subset"],
)  # fmt: skip
def test_labels_out_of_range_are_named_before_the_first_step(tmp_path, train, collator, message):
    trainer = build(tmp_path, train=train)
    trainer.data_collator = collator or trainer.data_collator
    trainer.training_step = lambda *_: pytest.fail("A step was taken.")
    with pytest.raises(InputError, match=message):
        trainer.train()


@pytest.mark.parametrize(
    ("train", "collator"),
    [
        (with_labels(Shifted(40), lambda labels: labels + 1), None),
        (with_labels(Pairs(40), lambda labels: labels + 1), of_pairs),
        (with_labels(RandomImages(40), lambda labels: torch.where(labels == 3, -100, labels)), None),
        (in_a_table([*range(10)] * 4), None),
    ],
    ids=["changed by the dataset", "changed for a collator", "ignored", "a column"],
)
def test_labels_that_are_in_range_as_a_batch_has_them_are_trained_on(tmp_path, train, collator):
    trainer = build(tmp_path, train=train, max_steps=1, save_strategy="no")
    trainer.data_collator = collator or trainer.data_collator
    assert trainer.train().global_step == 1


def test_a_loss_of_ones_own_may_give_negative_labels_a_meaning(tmp_path):
    trainer = build(tmp_path, train=ONE_BELOW, max_steps=1, save_strategy="no")
    trainer.compute_loss_func = lambda outputs, labels, **_: outputs["logits"].square().mean()
    trainer.read_labels.has_own_loss = True
    assert trainer.train().global_step == 1


@pytest.mark.parametrize("weights", [[1.0] * 9, torch.ones(11), [[1.0] * 10]], ids=["9", "11", "a row"])
def test_class_weights_of_another_number_are_refused(tmp_path, weights):
    args = EntameTrainingArguments(str(tmp_path), use_cpu=True)
    with pytest.raises(InputError, match=r"`class_weights` .*10 classes"):
        EntameTrainer(timm.create_model("test_resnet", num_classes=10), args, class_weights=weights)


@pytest.mark.parametrize("kind", [list, tuple, lambda v: torch.tensor(v).numpy()], ids=["list", "tuple", "array"])
def test_class_weights_are_converted(tmp_path, kind):
    args = EntameTrainingArguments(str(tmp_path), use_cpu=True)
    weights = [1.0 + index for index in range(10)]
    model = timm.create_model("test_resnet", num_classes=10)
    trainer = EntameTrainer(model, args, class_weights=kind(weights))
    assert trainer.label_smoother.class_weights.tolist() == weights


# ---- Fingerprints ----


def table(names, labels):
    features = datasets.Features({"image": datasets.Image(decode=False), "label": datasets.ClassLabel(num_classes=3)})
    return datasets.Dataset.from_dict({"image": names, "label": labels}, features=features)


def test_labels_are_read_without_reading_examples():
    labels = [0, 2, 1]
    hf = table(["a/1.png", "a/2.png", "b/1.png"], labels)
    tensors = TensorDataset(torch.zeros(3, 1), torch.tensor(labels))
    assert known_labels(hf).tolist() == known_labels(tensors).tolist() == labels
    assert known_labels(Subset(tensors, [2, 0])).tolist() == known_labels(hf.select([2, 0])).tolist() == [1, 0]
    assert known_labels(Unlabelled()) is None
    assert known_labels(TensorDataset(torch.zeros(3, 1))) is None


def test_examples_have_the_same_fingerprint_wherever_they_lie():
    here, there = (table([f"{root}/a/{i}.png" for i in range(3)], [0, 1, 2]) for root in ("/data", "/mnt/x"))
    assert fingerprint(here) == fingerprint(there)
    assert fingerprint(here.select([0, 1])) == fingerprint(there.select([0, 1]))


def test_other_examples_have_another_fingerprint():
    names = [f"/data/a/{i}.png" for i in range(4)]
    found = [table(names[:3], [0, 0, 0]), table(names[1:], [0, 0, 0]), table(names[:3], [0, 0, 1])]
    found += [table(names, [0] * 4).select(rows) for rows in ([0, 1, 3], [1, 0, 2], [0, 1, 2, 3])]
    hashes = [fingerprint(dataset)["hash"] for dataset in found]
    assert len(set(hashes)) == len(hashes)


def test_images_in_tables_are_told_apart_by_their_sizes(tmp_path):
    for side in (8, 9):
        Image.effect_noise((side, side), 50).save(tmp_path / f"{side}.png")
    small, large = ({"bytes": (tmp_path / f"{side}.png").read_bytes(), "path": None} for side in (8, 9))
    assert fingerprint(table([small, large], [0, 0])) != fingerprint(table([large, small], [0, 0]))
