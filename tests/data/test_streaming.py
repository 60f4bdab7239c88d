"""A stream gives the batches that its rows would give from disk, each epoch in another order."""

import copy
import tarfile
from io import BytesIO
from multiprocessing import active_children

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, Features, IterableDataset, Value
from datasets import Image as ImageFeature
from PIL import Image
from transformers import ViTImageProcessor

from entame_hf import EntameTrainer, EntameTrainingArguments
from entame_hf.data import (
    Augmentation,
    ClassificationDataset,
    Preparation,
    StreamingDataset,
    build_datasets,
    load_splits,
    set_image_size,
    split_dataset,
)
from entame_hf.data.batches import batch_loader
from entame_hf.data.board import Files
from entame_hf.data.stream_rows import StreamRows
from entame_hf.errors import InputError

PREPARATION = Preparation(set_image_size(ViTImageProcessor(), 32), exact=False)
CPU = torch.device("cpu")


def rows(count: int = 50, broken=(), label=None) -> Dataset:
    def jpeg(i: int) -> bytes:
        buffer = BytesIO()
        pixels = np.random.default_rng(i).normal(25 * (i % 10), 20, (40, 50, 3)).clip(0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(buffer, "JPEG")
        return buffer.getvalue()

    images = [{"bytes": b"<html>" if i in broken else jpeg(i), "path": None} for i in range(count)]
    label = label or ClassLabel(names=[str(i) for i in range(10)])
    features = Features({"image": ImageFeature(), "label": label, "other": Value("string")})
    columns = {"image": images, "label": [i % 10 for i in range(count)], "other": ["x"] * count}
    return Dataset.from_dict(columns, features=features)


def stream(table: Dataset, **kwargs) -> StreamingDataset:
    return StreamingDataset(table.to_iterable_dataset(num_shards=2), "image", "label", PREPARATION, **kwargs)


def batches(data, size: int = 16) -> list[dict[str, torch.Tensor]]:
    return [batch.to(CPU) for batch in batch_loader(data, size, CPU)]


def test_evaluation_is_that_of_the_table():
    table = rows()
    undecoded = table.cast_column("image", ImageFeature(decode=False))
    expected = batches(ClassificationDataset(undecoded, "image", "label", PREPARATION, cache_gb=0))
    given = batches(stream(table, evaluation=True))
    for one, other in zip(given, expected, strict=True):
        assert torch.equal(one["labels"], other["labels"])
        assert torch.equal(one["pixel_values"], other["pixel_values"])


def test_epochs_are_shuffled_by_the_seed():
    data = stream(rows(), augmentation=Augmentation("flip"))
    orders = []
    for epoch in (0, 0, 1):
        data.set_epoch(epoch)
        orders.append(torch.cat([batch["pixel_values"] for batch in batches(data)]))
    assert torch.equal(orders[0], orders[1])
    assert not torch.equal(orders[0], orders[2])


def test_the_next_of_the_batch_stands_in():
    data = stream(rows(broken={15}), evaluation=True)
    given = batches(data)
    assert given[0]["labels"].tolist() == [*(i % 10 for i in range(15)), -100]
    assert torch.equal(given[0]["pixel_values"][15], given[0]["pixel_values"][0])
    assert data.summary() == "1 images could not be read and were skipped: row 15 of train"
    batches(data)
    assert data.summary().startswith("1 images")
    reason = "not an image, or of an unknown format"
    assert data.skipped() == [("row 15 of train", "train", reason)]
    with pytest.raises(InputError, match=r"21 images could not be read .* At most 1%"):
        batches(stream(rows(broken=range(10, 31))))


def test_a_class_that_loses_most_of_its_images_stops_the_run():
    broken = [3 + 10 * i for i in range(6)]
    with pytest.raises(InputError, match=r"^6 of 10 images of class '3' cannot be read, such as row 53 of train"):
        batches(stream(rows(100, broken=broken), evaluation=True), 10)
    assert len(batches(stream(rows(100, broken=broken[:5]), evaluation=True), 10)) == 10


def test_a_batch_without_an_image_takes_one_of_those_before():
    given = batches(stream(rows(20, broken={19}), evaluation=True), 1)
    assert given[19]["labels"].tolist() == [-100]
    assert torch.equal(given[19]["pixel_values"], given[18]["pixel_values"])
    with pytest.raises(InputError, match="No image of the first batch can be read"):
        batches(stream(rows(20, broken={0, 1}), evaluation=True), 2)


def test_labels_without_names_need_their_number():
    table = rows(label=Value("int64"))
    with pytest.raises(InputError, match="num_classes=10"):
        stream(table)
    assert stream(table, num_classes=10).pipeline.num_classes == 10


@pytest.mark.parametrize("names", ["0 1 2 3 4 5 6 7 8 9", "9 8 7 6 5 4 3 2 1 0"])
@pytest.mark.parametrize(("missing", "message"), [(None, "no label in column 'label'"), (-1, "the label -1")])
def test_a_row_without_a_label_is_named(missing, message, names):
    table = rows(20)
    labels = [missing, *table["label"][1:]]
    table = table.remove_columns("label").add_column("label", labels, feature=table.features["label"])
    first = rows(20, label=ClassLabel(names=names.split()))
    parts = {"train": first.to_iterable_dataset(), "validation": table.to_iterable_dataset()}
    held = build_datasets(split_dataset(parts), set_image_size(ViTImageProcessor(), 32)).validation
    with pytest.raises(InputError, match=message):
        batches(held)


def test_a_stream_need_not_know_its_columns():
    table = rows(8)
    undecoded = table.cast_column("image", ImageFeature(decode=False))
    generated = IterableDataset.from_generator(lambda: iter(undecoded))
    assert generated.features is None
    data = StreamingDataset(generated, "image", "label", PREPARATION, evaluation=True, num_classes=10)
    assert torch.equal(batches(data)[0]["pixel_values"], batches(stream(table, evaluation=True))[0]["pixel_values"])


def test_the_archives_of_webdataset_are_streamed(tmp_path):
    for split, count in (("train", 12), ("test", 6)):
        table = rows(count).cast_column("image", ImageFeature(decode=False))
        (tmp_path / "data").mkdir(exist_ok=True)
        with tarfile.open(tmp_path / "data" / f"{split}-0.tar", "w") as archive:
            for i, row in enumerate(table):
                for name, content in ((f"{i:03}.jpg", row["image"]["bytes"]), (f"{i:03}.cls", b"%d" % row["label"])):
                    entry = tarfile.TarInfo(name)
                    entry.size = len(content)
                    archive.addfile(entry, BytesIO(content))
    where = {"dataset_name": str(tmp_path / "data"), "image_column_name": "jpg", "label_column_name": "cls"}
    with pytest.raises(InputError, match="`num_labels=1000`"):
        load_splits(streaming=True, **where)
    splits = load_splits(streaming=True, **where, num_labels=10)
    assert splits.class_names == [str(i) for i in range(10)]
    _, evaluation, _, _ = build_datasets(splits, set_image_size(ViTImageProcessor(), 32))
    assert batches(evaluation)[0]["labels"].tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.runs
def test_splits_of_a_folder_are_streamed(tmp_path):
    for split, count in (("train", 30), ("test", 20)):
        rows(count).to_parquet(tmp_path / "data" / f"{split}.parquet")
    splits = load_splits(streaming=True, dataset_name=str(tmp_path / "data"), max_eval_samples=10)
    assert (splits.image_column, splits.label_column) == ("image", "label")
    assert splits.class_names == [str(i) for i in range(10)]
    assert len(list(splits.validation)) == 10
    train, evaluation, _, _ = build_datasets(splits, set_image_size(ViTImageProcessor(), 32))
    assert [len(batch["labels"]) for batch in batches(train)] == [16, 14]
    assert len(set(batches(evaluation)[0]["labels"].tolist())) > 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dataset_name": None}, "Give either `dataset_name`"),
        ({"data_dir": "photos", "dataset_name": None}, "`streaming` reads `dataset_name` alone"),
        ({"eval_split": "nothing"}, "`eval_split=nothing`: no such split"),
        ({"eval_split": "train"}, None),
    ],
    ids=str,
)
def test_streams_that_cannot_be_are_named(tmp_path, options, message):
    rows(10).to_parquet(tmp_path / "data" / "train.parquet")
    with pytest.raises(InputError, match=message or "same split|can't be split"):
        load_splits(streaming=True, **{"dataset_name": str(tmp_path / "data"), **options})


def test_a_trainer_goes_round_a_stream(tiny_vit, tmp_path):
    args = EntameTrainingArguments(
        str(tmp_path), max_steps=8, per_device_train_batch_size=16, report_to="none", save_strategy="no",
        learning_rate=1e-3, disable_tqdm=True,
    )  # fmt: skip
    seen = []

    class Recording(EntameTrainer):
        def compute_loss(self, model, inputs, *arguments, **kwargs):
            seen.append(inputs["pixel_values"].mean((1, 2, 3)))
            return super().compute_loss(model, inputs, *arguments, **kwargs)

    data = stream(rows(), augmentation=Augmentation("none"))
    trainer = Recording(tiny_vit, args, train_dataset=data, eval_dataset=stream(rows(), evaluation=True))
    trainer.train()
    first, second = torch.cat(seen[:4]), torch.cat(seen[4:8])
    assert not torch.equal(first, second)
    torch.testing.assert_close(first.sort().values, second.sort().values)
    prediction = trainer.predict(trainer.eval_dataset)
    assert prediction.label_ids.tolist() == [i % 10 for i in range(50)]
    # Streams of others are read by the first process, as ever.
    assert trainer.accelerator.dispatch_batches is None


def test_processes_change_no_batch():
    table, expected, summaries = rows(broken=(3, 20)), [], []
    for processes in (0, 2):
        data, found = stream(table, augmentation=Augmentation("flip")), []
        for epoch in range(3):
            data.set_epoch(epoch)
            loader = batch_loader(data, 16, CPU, num_workers=processes)
            found += [batch.to(CPU) for batch in loader]
        expected = expected or found
        summaries.append(data.summary())
    assert len(found) == len(expected) == 12
    assert summaries[0] == summaries[1] is not None
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one["pixel_values"], other["pixel_values"])
        assert torch.equal(one["labels"], other["labels"])


@pytest.mark.parametrize(("count", "room"), [(200, 2**23), (200, 9000), (0, 2**23)])
@pytest.mark.parametrize("keeps", [True, False])
def test_a_process_gives_the_rows_as_they_are(count, room, keeps, tmp_path, monkeypatch):
    # All files fit in the memory that is shared, or some.
    monkeypatch.setattr("entame_hf.data.board._SLOT_BYTES", room)
    monkeypatch.setattr("entame_hf.data.board._SLOTS", 2)
    monkeypatch.setattr("entame_hf.data.stream_rows._ROWS", 7)
    odd = [{"bytes": b"", "path": "empty.jpg"}, None, {"bytes": None, "path": str(tmp_path / "on_disk.jpg")}]
    table = rows(count).cast_column("image", ImageFeature(decode=False)).remove_columns("other")
    listed = [*table, *({"image": image, "label": 1} for image in odd if count)]
    source = IterableDataset.from_generator(lambda: iter(listed), features=table.features)
    data = StreamingDataset(source, "image", "label", PREPARATION, evaluation=True)

    def plain(row):
        image = row["image"]
        file = image and image["bytes"] is not None and bytes(image["bytes"])
        return row | {"image": image and image | {"bytes": file}}

    # Those that are kept leave no free memory for later ones.
    given = [*map(plain, [*StreamRows(data)] if keeps else StreamRows(data))]
    assert given == [*map(plain, data)]
    assert len(given) == (203 if count else 0)


def test_shared_memory_is_free_once_nobody_refers_to_it(monkeypatch):
    monkeypatch.setattr("entame_hf.data.board._SLOTS", 1)
    files = Files()
    with files.lend() as slots:
        sent = slots.write([b"ab", b"c"])
        assert sent == 0
        shown = slots.read(sent)
        part = shown[1:3]
        del shown
        assert slots.write([b"x"]) == b"x"
        assert bytes(part) == b"bc"
        del part
        assert slots.write([b"x"]) == 0
        # What the other process has written and this one has not read yet is lost at the end of a pass.
    with files.lend() as slots:
        part = slots.read(slots.write([b"abc"]))[:3]
    with files.lend() as slots:
        assert slots.write([b"x"]) == b"x"
        assert bytes(part) == b"abc"
    del part
    with files.lend() as slots:
        assert slots.write([b"x"]) == 0


def test_passes_over_a_stream_share_its_memory_and_give_it_back():
    data = stream(rows(64))
    passes = [iter(StreamRows(data)) for _ in range(3)]
    # The third finds no slot.
    read = [[next(one) for one in passes] for _ in range(20)]
    for several in read:
        files = [bytes(row["image"]["bytes"]) for row in several]
        assert files[0] == files[1] == files[2]
    passes[1].close()
    left = [sum(1 for _ in passes[n]) for n in (0, 2)]
    assert left == [44, 44]
    del read, several, passes
    assert sorted(data.files._free) == [*range(64)]


@pytest.mark.parametrize("count", [50, 2])
def test_the_next_pass_is_read_while_this_one_is_used(count):
    data, expected = stream(rows(count)), []
    for epoch in (0, 1, 2, 2, 5):
        data.set_epoch(epoch)
        expected.append([(row["label"], row["row"], row["epoch"]) for row in data])
    others = {process.pid for process in active_children()}
    read, processes, given = StreamRows(data), set(), []
    for epoch in (0, 1, 2, 2, 5):
        read.set_epoch(epoch)
        given.append([(row["label"], row["row"], row["epoch"]) for row in read])
        processes |= {process.pid for process in active_children()} - others
    assert given == expected
    # One for the first three passes, one for the repeated pass and one for the last.
    assert len(processes) == 3
    # A pass that was left begins anew.
    read.set_epoch(6)
    rest = iter(read)
    assert [next(rest)["row"] for _ in range(min(count, 3))] == [*range(min(count, 3))]
    rest.close()
    assert [row["row"] for row in read] == [*range(count)]


def test_evaluation_reads_one_pass_and_frees_its_memory():
    data = stream(rows(50), evaluation=True)
    read = StreamRows(data)
    for _ in range(2):
        assert [row["row"] for row in read] == [*range(50)]
        assert len(data.files._free) == 64


@pytest.mark.parametrize("lent", [32, 0])
def test_files_in_shared_memory_are_not_copied_to_the_processes(lent, monkeypatch):
    monkeypatch.setattr("entame_hf.data.board._SLOTS_OF_A_PASS", lent)
    data = stream(rows(64), evaluation=True)
    expected = torch.cat([batch.to(CPU)["pixel_values"] for batch in batch_loader(data, 16, CPU)])
    loader = batch_loader(data, 16, CPU, num_workers=2)
    assert torch.equal(torch.cat([batch.to(CPU)["pixel_values"] for batch in loader]), expected)
    assert bool(data._workers._board.inputs.any()) == (not lent)
    data._workers.stop()


class Lost(Exception):
    pass


@pytest.mark.parametrize("processes", [0, 2])
def test_the_error_that_ends_a_stream_is_its_own(processes):
    table = rows(33).remove_columns("other").cast_column("image", ImageFeature(decode=False))

    def given():
        yield from table
        raise Lost("The connection was lost.")

    source = IterableDataset.from_generator(given, features=table.features)
    data = StreamingDataset(source, "image", "label", PREPARATION, evaluation=True)
    read = []
    with pytest.raises(Lost, match=r"^The connection was lost\.$"):
        read.extend(batch_loader(data, 8, CPU, num_workers=processes))
    # Those that were requested ahead are not handed out.
    assert len(read) == 2


@pytest.mark.parametrize("processes", [0, 2])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("steps", [3, 5])
@pytest.mark.runs
def test_a_stream_goes_on_where_it_stopped(tiny_vit, tmp_path, steps, accumulation, processes):
    def train(max_steps=9, resume=None):
        args = EntameTrainingArguments(
            str(tmp_path), max_steps=max_steps, per_device_train_batch_size=16, report_to="none", save_steps=steps,
            gradient_accumulation_steps=accumulation, disable_tqdm=True, dataloader_num_workers=processes,
        )  # fmt: skip
        seen = []

        class Recording(EntameTrainer):
            def compute_loss(self, model, inputs, *arguments, **kwargs):
                # Before a checkpoint, the first images are read for the feature statistics.
                if model.training:
                    seen.append(inputs["pixel_values"])
                return super().compute_loss(model, inputs, *arguments, **kwargs)

        Recording(copy.deepcopy(tiny_vit), args, train_dataset=stream(rows(), augmentation=Augmentation())).train(
            resume
        )
        return seen

    whole = train()
    rest = train(resume=str(tmp_path / f"checkpoint-{steps}"))
    # Its own second checkpoint counts all batches of the pass.
    again = train(resume=str(tmp_path / f"checkpoint-{2 * steps}")) if steps == 3 else []
    for resumed in (rest, again):
        for one, other in zip(resumed, whole[len(whole) - len(resumed) :], strict=True):
            assert torch.equal(one, other)
    assert len(rest) == (9 - steps) * accumulation
