"""Options are checked before anything is read, and what is built fits the processor."""

import pytest
from datasets import ClassLabel, Dataset, Features, Image
from transformers import DINOv3ViTImageProcessor

from entame_hf.cli.data_arguments import DataArguments
from entame_hf.data import Splits, build_datasets, set_image_size
from entame_hf.errors import InputError


@pytest.mark.parametrize("size", [float("nan"), float("inf"), -1.0])
def test_room_for_images_is_a_size(size):
    with pytest.raises(InputError, match=f"`image_cache_gb={size}` must be 0, .* or more"):
        DataArguments(image_cache_gb=size)


@pytest.mark.parametrize("streaming", [False, True], ids=["table", "stream"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_eval_samples": 0}, "`max_eval_samples=0` leaves no image"),
        ({"max_train_samples": -3}, "`max_train_samples=-3` leaves no image"),
        ({"data_dir": "photos"}, "data_dir"),
    ],
    ids=["max_eval_samples", "max_train_samples", "data_dir"],
)
def test_streams_refuse_what_tables_refuse(tmp_path, streaming, options, message):
    rows = {"image": [{"bytes": b"x", "path": None}] * 4, "label": [0, 1] * 2}
    features = Features({"image": Image(), "label": ClassLabel(names=["a", "b"])})
    for name in ("train", "test"):
        Dataset.from_dict(rows, features=features).to_parquet(tmp_path / f"{name}.parquet")
    with pytest.raises(InputError, match=message):
        DataArguments(dataset_name=str(tmp_path), streaming=streaming, **options).load(seed=0)


@pytest.mark.parametrize("streaming", [False, True], ids=["table", "stream"])
def test_randaugment_is_refused_where_a_processor_resizes_no_bytes(streaming):
    features = Features({"image": Image(decode=False), "label": ClassLabel(names=["a", "b"])})
    part = Dataset.from_dict({"image": [{"bytes": b"x", "path": None}] * 2, "label": [0, 1]}, features=features)
    part = part.to_iterable_dataset() if streaming else part
    processor = set_image_size(DINOv3ViTImageProcessor(), 32)
    with pytest.raises(InputError, match=r"`augmentation=randaugment` needs .* use `augmentation=flip`"):
        build_datasets(
            Splits(part, part, ["a", "b"], "image", "label"),
            processor,
            augmentation="randaugment",
        )
