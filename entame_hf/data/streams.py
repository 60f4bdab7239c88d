"""Draw a number of rows of a stream, from many places of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
from datasets import IterableDataset

from ..errors import InputError
from .source import count_of

# Rows are drawn from at most so many files or row groups: opening each one takes a request.
_PLACES = 200

# At least so many rows are read to draw from.
_BUFFER = 1000

# Labels of so many rows show whether a stream is mixed.
_LOOKED_AT = 10_000


def limit_stream(
    stream: IterableDataset, limit: int, label_column: str, classes: int, seed: int, parameter: str
) -> tuple[IterableDataset, str | None]:
    """Draw a number of rows of a stream.

    A stream is often sorted by class, and its first rows are of one class. Rows are drawn from buffers that are filled
    at many places: files, or row groups of Parquet files.

    Args:
        stream (`datasets.IterableDataset`): the rows, undecoded.
        limit (`int`): how many.
        label_column (`str`): the column of class indices.
        classes (`int`): the number of classes.
        seed (`int`): decides the draw.
        parameter (`str`): what messages call the limit.

    Returns:
        `tuple[datasets.IterableDataset, str | None]`: the same rows in each pass, and how many classes are missing
        where they don't have all.

    Raises:
        InputError: If all rows are of one class.
    """
    # A generator is read as it is: epochs and processes would draw other rows of a shuffled stream.
    drawn = IterableDataset.from_generator(
        _draw, features=stream.features, gen_kwargs={"stream": stream.reshard(), "limit": limit, "seed": seed}
    )
    labels = {row[label_column] for row in itertools.islice(drawn, _LOOKED_AT)}
    if len(labels) < 2 <= classes:
        raise InputError(
            f"`{parameter}={limit}`: all images drawn from the stream are of one class, because it is sorted by "
            f"class. Leave `{parameter}` out, or shuffle the dataset once with `Dataset.shuffle` and write it again."
        )
    missing = classes - len(labels)
    note = f"no image of {missing:,} of {count_of(classes, 'class')} was drawn from the stream." if missing else None
    return drawn, note


def _draw(stream: IterableDataset, limit: int, seed: int) -> Iterator[dict[str, Any]]:
    generator = np.random.default_rng(seed)
    order = generator.permutation(stream.num_shards).tolist()
    places = min(stream.num_shards, _PLACES, max(10, limit // 5))
    each, buffer = -(-limit // places), -(-max(_BUFFER, 2 * limit) // places)
    drawn: dict[int, set[int]] = {}
    left = limit
    for place in order:
        rows = list(itertools.islice(_place(stream, place), buffer))
        chosen = generator.permutation(len(rows))[: min(each, left)].tolist()
        yield from (rows[i] for i in chosen)
        drawn[place] = set(chosen)
        left -= len(chosen)
        if not left:
            return
    # Places that hold less than the others leave room.
    for place in order:
        for i, row in enumerate(_place(stream, place)):
            if i not in drawn[place]:
                yield row
                left -= 1
                if not left:
                    return


def _place(stream: IterableDataset, place: int) -> IterableDataset:
    return stream.shard(num_shards=stream.num_shards, index=place)
