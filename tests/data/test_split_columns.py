"""A column that names splits is followed in every table, or refused."""

import pytest
from datasets import ClassLabel, Dataset, Features, Image, Value

from entame_hf.data import load_splits, split_dataset
from entame_hf.errors import InputError


def table(values: list[str | None], column: str = "split") -> Dataset:
    count = len(values)
    features = {"image": Image(decode=False), "label": ClassLabel(names=["a", "b"]), column: Value("string")}
    rows = {"image": [{"bytes": b"%d" % i, "path": None} for i in range(count)], "label": [0, 1] * (count // 2)}
    return Dataset.from_dict({**rows, column: values}, features=Features(features))


HALVES = ["train"] * 8 + ["validation"] * 8


def sizes(splits) -> tuple[int, int, int | None]:
    return len(splits.train), len(splits.validation), None if splits.test is None else len(splits.test)


@pytest.mark.parametrize("column", ["split", "subset", "fold"])
def test_a_column_is_followed_beside_another_split(column):
    tables = {"train": table(HALVES, column), "test": table(["test"] * 6, column)}
    splits = split_dataset(tables)
    assert sizes(splits) == (8, 8, 6)
    assert f"split by column '{column}'" in splits.describe()
    # The other one may say nothing.
    assert sizes(split_dataset({**tables, "test": tables["test"].remove_columns(column)})) == (8, 8, 6)


@pytest.mark.parametrize("other", ["validation", "val", "dev"])
def test_a_column_that_contradicts_another_split_is_refused(other):
    tables = {"train": table(HALVES), other: table(["validation"] * 6)}
    with pytest.raises(InputError, match=f"holds rows of 'validation', and there is a split '{other}' beside it"):
        split_dataset(tables)
    splits = split_dataset(tables, train_split="train", eval_split=other)
    assert sizes(splits) == (16, 6, None)
    assert "column 'split' of train is not followed: splits were named" in splits.describe()


@pytest.mark.parametrize("column", ["split", "subset"])
@pytest.mark.parametrize("odd", ["none", "other", None, ""])
def test_a_column_of_splits_and_other_values_is_refused(column, odd):
    values = [*HALVES, odd, odd]
    with pytest.raises(InputError, match=f"Column '{column}' holds .*no split is called .*`train_split=train`"):
        split_dataset(table(values, column))
    assert sizes(split_dataset(table(values, column), train_split="train", eval_split="validation")) == (8, 8, None)


@pytest.mark.parametrize("values", [["train", "car"], ["train", "bus", "test", "web"], ["exam", "train", "test"]])
@pytest.mark.parametrize("column", ["kind", "source", "activity"])
def test_a_column_of_another_name_with_other_values_is_none(values, column):
    rows = table((values * 16)[:16], column)
    assert sum(sizes(split_dataset(rows))[:2]) == 16
    assert sum(sizes(split_dataset(rows, train_split="train"))[:2]) == 16


@pytest.mark.parametrize("column", ["Usage", "data_set", "partition"])
def test_splits_of_a_usage_are_named(column):
    rows = table(["Training"] * 8 + ["PublicTest"] * 4 + ["PrivateTest"] * 4, column)
    with pytest.raises(InputError, match=f"Column '{column}' holds .*`train_split=Training` `eval_split=P"):
        split_dataset(rows)
    assert sizes(split_dataset(rows, train_split="Training", eval_split="PublicTest")) == (8, 4, 4)


def test_a_stream_says_that_it_follows_no_column(tmp_path):
    for name, values in {"train": HALVES, "test": ["test"] * 6}.items():
        table(values).to_parquet(tmp_path / f"{name}.parquet")
    splits = load_splits(dataset_name=str(tmp_path), streaming=True)
    assert "column 'split' of train is not followed in a stream" in splits.describe()
