"""Limit streams without training on one class alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from datasets import IterableDataset

from ..errors import InputError
from .source import count_of
from .subsets import check_limit

# Undecoded rows that are mixed, from so many places of a stream at once.
_BUFFER, _PLACES = 1000, 100

# Labels of so many rows show whether a stream is mixed.
_LOOKED_AT = 10_000


def limit_stream(
    stream: IterableDataset, limit: int, label_column: str, classes: int, seed: int, parameter: str
) -> tuple[IterableDataset, str | None]:
    """Take a number of rows of a stream, drawn from many places of it.

    Args:
        stream (`datasets.IterableDataset`): the rows, undecoded.
        limit (`int`): how many.
        label_column (`str`): the column of class indices.
        classes (`int`): the number of classes.
        seed (`int`): decides the draw.
        parameter (`str`): what messages call the limit.

    Returns:
        `tuple[datasets.IterableDataset, str | None]`: the same rows in each pass, and how many classes they have where
        they don't have all.

    Raises:
        InputError: If there are more classes than rows, or all rows are of one class.
    """
    check_limit(limit, classes, parameter)
    places = stream.reshard()
    taken = places.shuffle(seed=seed, buffer_size=_BUFFER, max_buffer_input_shards=_PLACES).take(limit)
    labels = {row[label_column] for row in itertools.islice(taken.select_columns([label_column]), _LOOKED_AT)}
    if len(labels) < 2 <= classes:
        raise InputError(
            f"`{parameter}={limit}`: all images drawn from the stream are of one class, because it is sorted by "
            "class. "
            f"Leave `{parameter}` out, or shuffle the dataset once with `Dataset.shuffle` and write it again."
        )
    missing = classes - len(labels)
    # Epochs and processes would draw other rows of a shuffled stream; a generator is read as it is.
    fixed = IterableDataset.from_generator(_rows, features=taken.features, gen_kwargs={"stream": taken})
    return fixed, f"{missing:,} of {count_of(classes, 'class')} drawn no image of the stream." if missing else None


def _rows(stream: IterableDataset) -> Iterator[dict[str, Any]]:
    yield from stream
