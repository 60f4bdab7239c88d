"""Items become batches; images that can't be read are skipped, told once, and counted across workers."""

import logging
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, Features
from datasets import Image as ImageFeature
from PIL import Image
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader
from transformers import ViTImageProcessor

import entame_hf.data.pipeline as pipeline_module
from entame_hf.data import (
    ClassificationDataset,
    Preparation,
    channel_statistics,
    find_duplicates,
    set_image_size,
    set_normalization,
)
from entame_hf.errors import InputError

PLAIN = set_normalization(set_image_size(ViTImageProcessor(), 4), [0.0] * 3, [1.0] * 3)

VIEWS = {"front": 0, "back": 10}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def png(seed: int) -> bytes:
    buffer = BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def dataset(
    size: int = 300, broken=(), paths=None, label=lambda i: i % 2, first: int = 0, image=lambda i: i, **kwargs
) -> ClassificationDataset:
    images = [
        {"bytes": b"<html>" if i in broken else png(first + image(i)), "path": (paths or {}).get(i)}
        for i in range(size)
    ]
    features = Features({"image": ImageFeature(decode=False), "label": ClassLabel(names=["a", "b"])})
    rows = Dataset.from_dict({"image": images, "label": [label(i) for i in range(size)]}, features=features)
    return ClassificationDataset(rows, "image", "label", Preparation(PLAIN), **kwargs)


def test_an_item_is_an_image_and_its_label():
    item = dataset(5)[3]
    assert item.keys() == {"pixel_values", "labels"}
    assert item["pixel_values"].shape == (3, 4, 4)
    assert item["labels"] == 1


def test_items_are_counted_from_the_end_as_well():
    data = dataset(5)
    torch.testing.assert_close(data[-1], data[4])
    assert data[4]["labels"] == 0
    assert data.start_copying([4], 0, torch.device("cpu")) is not None
    with pytest.raises(IndexError):
        data[5]
    assert len(list(data)) == 5


def test_rows_in_memory_are_taken_as_datasets_makes_them():
    images = [Image.open(BytesIO(png(i))) for i in range(6)]
    rows = Dataset.from_dict({"image": images, "label": [i % 3 for i in range(6)]})
    with pytest.raises(InputError, match="num_classes=10"):
        ClassificationDataset(rows, "image", "label", Preparation(PLAIN))
    data = ClassificationDataset(rows, "image", "label", Preparation(PLAIN), num_classes=3)
    assert data.pipeline.num_classes == 3
    with pytest.raises(InputError, match="the label 2, but 2 classes are numbered 0 to 1"):
        ClassificationDataset(rows, "image", "label", Preparation(PLAIN), num_classes=2)
    torch.testing.assert_close(data[2]["pixel_values"], dataset(6)[2]["pixel_values"])


def test_columns_of_one_table_are_kept_apart():
    columns = {name: [{"bytes": png(i + shift), "path": None} for i in range(4)] for name, shift in VIEWS.items()}
    feature = ImageFeature(decode=False)
    features = Features({"front": feature, "back": feature, "label": ClassLabel(names=["a", "b"])})
    rows = Dataset.from_dict({**columns, "label": [0, 1, 0, 1]}, features=features)
    for name, shift in VIEWS.items():
        data = ClassificationDataset(rows, name, "label", Preparation(PLAIN))
        torch.testing.assert_close(data[1]["pixel_values"], dataset(20)[1 + shift]["pixel_values"])


def test_the_next_readable_image_stands_in():
    data = dataset(400, broken={1, 2, 399})
    torch.testing.assert_close(data[1], data[3])
    torch.testing.assert_close(data[399], data[0])


def test_in_evaluation_stand_ins_are_not_counted():
    data = dataset(200, broken={1}, evaluation=True)
    assert [data[i]["labels"] for i in range(4)] == [0, -100, 0, 1]


def test_nothing_readable_is_refused():
    data = dataset(3)
    data.unreadable.flags[:] = True
    with pytest.raises(InputError, match="3 of 3 images"):
        data[1]


@pytest.mark.parametrize(("context", "workers"), [("fork", 2), ("spawn", 1)])
@pytest.mark.runs
def test_workers_report_to_the_main_process(context, workers):
    broken = {5, 250}
    data = dataset(broken=broken)
    loader = DataLoader(data, 50, num_workers=workers, multiprocessing_context=context)
    assert sum(len(batch["labels"]) for batch in loader) == 300
    assert set(data.unreadable.flags.nonzero().flatten().tolist()) == broken
    assert data.summary() == "2 of 300 images could not be read and were skipped: row 5 of train, row 250 of train"


def test_each_unreadable_image_is_decoded_and_named_once(caplog, monkeypatch):
    decoded = []
    original = pipeline_module.decode_image
    monkeypatch.setattr(pipeline_module, "decode_image", lambda value: decoded.append(value) or original(value))
    data = dataset(200, broken={7, 9}, paths={9: "pets/b.jpg"}, name="validation")
    for _ in range(3):
        data[7], data[9]
    # 7, then 8 for it, and 9, then 10; afterwards all is known.
    assert len(decoded) == 4
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 2
    assert "row 7 of validation" in warnings[0]
    assert "pets/b.jpg" in warnings[1]


def test_files_are_named_by_their_path(tmp_path: Path):
    (tmp_path / "cut.png").write_bytes(png(0)[:-40])
    features = Features({"image": ImageFeature(decode=False), "label": ClassLabel(names=["a"])})
    paths = [str(tmp_path / "cut.png"), str(tmp_path / "gone.png")]
    rows = Dataset.from_dict({"image": [*paths, *paths], "label": [0] * 4}, features=features)
    data = ClassificationDataset(rows, "image", "label", Preparation(PLAIN))
    with pytest.raises(
        InputError, match=rf"3 of 4 images of class 'a' .* {tmp_path}/cut.png \(OSError: image file is"
    ):
        data[0]
    assert data.summary() == f"3 of 4 images could not be read and were skipped: {', '.join(paths)}, {paths[0]}"


@pytest.mark.parametrize(("count", "allowed"), [(200, 5), (700, 7)])
def test_a_few_or_one_percent_may_be_unreadable(count, allowed):
    data = dataset(count, broken={*range(allowed), allowed + 1})
    data.unreadable.flags[: allowed - 1] = True
    data[allowed - 1]
    with pytest.raises(
        InputError, match=rf"{allowed + 1} of {count} images .* row 0 of train, row 1 of train, .* At most 1%, or 5"
    ):
        data[allowed + 1]


@pytest.mark.parametrize("evaluation", [False, True])
@pytest.mark.parametrize(
    ("broken", "kept"), [({1, 3, 5}, False), ({1, 3}, True), ({0, 2, 4}, True)], ids=["most", "half", "of_a_large_one"]
)
def test_a_class_that_loses_most_of_its_images_stops_the_run(broken, kept, evaluation):
    # Four images of class b, and 396 of class a.
    data = dataset(400, broken, label=lambda i: int(i in (1, 3, 5, 7)), evaluation=evaluation)
    if kept:
        assert len([data[i] for i in sorted(broken)]) == len(broken)
        return
    with pytest.raises(InputError, match=r"^3 of 4 images of class 'b' cannot be read, such as row 5 .*repair them"):
        [data[i] for i in sorted(broken)]


def test_the_only_image_of_a_class_is_most_of_it():
    with pytest.raises(InputError, match=r"^1 of 1 images of class 'b' cannot be read, such as row 9 of train"):
        dataset(300, {9}, label=lambda i: int(i == 9))[9]


def test_skipped_images_have_a_reason():
    data = dataset(300, {5, 250}, paths={250: "pets/b.jpg"})
    # A worker of a DataLoader found one, the reason of which the main process doesn't know.
    assert sum(1 for _ in DataLoader(torch.utils.data.Subset(data, range(10)), 10, num_workers=1)) == 1
    data[250]
    reason = "not an image, or of an unknown format"
    assert data.skipped() == [("row 5 of train", "train", reason), ("pets/b.jpg", "train", reason)]


def test_skipped_images_of_all_processes_are_gathered(monkeypatch):
    data = dataset(300, {5})
    data[5]
    found = [(5, "not an image"), (7, "out of memory")]
    monkeypatch.setattr("entame_hf.data.unreadable.gather_object", lambda own: [*own, *found])
    data.gather_unreadable()
    assert [(image, reason) for image, _, reason in data.skipped()] == [
        ("row 5 of train", "not an image, or of an unknown format"),
        ("row 7 of train", "out of memory"),
    ]


def test_images_that_other_ranks_could_not_read_count_for_the_job(monkeypatch, caplog):
    # Four images of class b, of which this rank and another lose two each: no rank loses most of them.
    data = dataset(400, {1, 3}, label=lambda i: int(i in (1, 3, 5, 7)))
    data[1], data[3]
    monkeypatch.setattr("entame_hf.data.unreadable.gather_object", lambda own: [*own, (5, "empty"), (7, "empty")])
    with pytest.raises(InputError, match=r"^4 of 4 images of class 'b' cannot be read"):
        data.gather_unreadable()
    assert sum("row 5 of train (empty)" in message for message in caplog.messages) == 1


def test_an_image_that_a_processor_fails_on_is_skipped():
    class Odd(ViTImageProcessor):
        def preprocess(self, images, **kwargs):
            if isinstance(images, Image.Image) and images.size == (5, 4):
                raise ValueError("mean must have 5 elements")
            return super().preprocess(images, **kwargs)

    buffer = BytesIO()
    Image.new("RGB", (5, 4)).save(buffer, "PNG")
    images = [{"bytes": buffer.getvalue() if i == 3 else png(i), "path": None} for i in range(8)]
    features = Features({"image": ImageFeature(decode=False), "label": ClassLabel(names=["a"])})
    rows = Dataset.from_dict({"image": images, "label": [0] * 8}, features=features)
    data = ClassificationDataset(rows, "image", "label", Preparation(Odd.from_dict(PLAIN.to_dict())))
    assert len(list(data)) == 8
    assert data.skipped() == [("row 3 of train", "train", "ValueError: mean must have 5 elements")]


def test_duplicates_of_another_split_are_counted():
    train, validation = dataset(20), dataset(6, first=17, name="validation", evaluation=True)
    assert find_duplicates(validation, train) == (0, 0, None)
    for data in (train, validation):
        assert len(list(data)) == len(data)
    # Images 17, 18 and 19 are in both; their place decides the label.
    assert find_duplicates(validation, train) == (3, 3, ("row 0 of validation", "row 17 of train"))
    again = dataset(20)
    assert find_duplicates(validation, again).images == 3
    # Within a split, those count that are there with another label.
    assert find_duplicates(again, again).images == 0
    pairs = dataset(8, image=lambda i: i // 2)
    assert len(list(pairs)) == 8
    assert find_duplicates(pairs, pairs) == (4, 4, ("row 1 of train", "row 0 of train"))
    assert find_duplicates(dataset(20, cache_gb=0), train).images == 0


def test_many_unreadable_images_are_not_all_listed():
    data = dataset(10)
    data.unreadable.flags[:] = True
    assert data.summary().endswith("row 3 of train, row 4 of train, ...")
    assert dataset(10).summary() is None


def test_a_workers_error_is_one_line():
    data = dataset(broken=range(10))
    # What a worker does with an error and the main process with what it gets.
    with pytest.raises(InputError) as original:
        [data[i] for i in range(10)]
    wrapped = ExceptionWrapper(original._excinfo, where="in DataLoader worker process 0")
    with pytest.raises(InputError, match=r"^6 of 300 images could not be read") as error:
        wrapped.reraise()
    assert "\n" not in str(error.value)


def test_another_processor_shares_the_flags():
    data = dataset(200, broken={4})
    other = data.with_processor(set_normalization(PLAIN, [0.5] * 3, [0.25] * 3))
    other[4]
    assert data.unreadable.flags[4]
    torch.testing.assert_close(other[0]["pixel_values"], data[0]["pixel_values"] * 4 - 2)


def test_channel_statistics_are_those_of_all_readable_pixels():
    data = dataset(200, broken={3})
    mean, std = channel_statistics(data, set_image_size(ViTImageProcessor(), 4))
    pixels = torch.stack([data[i]["pixel_values"] for i in range(200) if i != 3]).double()
    np.testing.assert_allclose(mean, pixels.mean((0, 2, 3)), atol=1e-6)
    np.testing.assert_allclose(std, pixels.std((0, 2, 3), correction=0), atol=1e-6)


def test_a_dataset_is_standardised_by_its_own_statistics():
    processor = set_image_size(ViTImageProcessor(), 6)
    data = dataset(100).with_processor(processor)
    normalized = data.with_processor(set_normalization(processor, *channel_statistics(data, processor)))
    values = torch.stack([item["pixel_values"] for item in (normalized[i] for i in range(100))])
    torch.testing.assert_close(values.mean((0, 2, 3)), torch.zeros(3), atol=1e-4, rtol=0)
    torch.testing.assert_close(values.std((0, 2, 3), correction=0), torch.ones(3), atol=1e-4, rtol=0)


def test_a_channel_without_contrast_is_divided_by_one():
    buffer = BytesIO()
    Image.new("RGB", (4, 4), (255, 0, 51)).save(buffer, "PNG")
    features = Features({"image": ImageFeature(decode=False), "label": ClassLabel(names=["a"])})
    rows = Dataset.from_dict({"image": [buffer.getvalue()] * 3, "label": [0] * 3}, features=features)
    data = ClassificationDataset(rows, "image", "label", Preparation(PLAIN))
    mean, std = channel_statistics(data, set_image_size(ViTImageProcessor(), 4))
    np.testing.assert_allclose(mean, [1.0, 0.0, 0.2], atol=1e-6)
    assert std == [1.0, 1.0, 1.0]
