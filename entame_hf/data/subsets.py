"""Set images aside and limit their number, by class, with splits whose labels are class indices."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from datasets import Dataset, IterableDataset
from numpy.typing import NDArray

from ..errors import InputError
from .columns import image_names, label_indices
from .source import Source, count_of, listed
from .splits import TEST, TRAIN, VALIDATION

# Rows are drawn from at most so many files or row groups: opening each one takes a request.
_PLACES = 200

# At least so many rows are read to draw from.
_BUFFER = 1000

# Labels of so many rows show whether a stream is mixed.
_LOOKED_AT = 10_000
Codes = NDArray[np.int64]
Limits = Mapping[str, int | None]


def hold_out(codes: Codes, fraction: float, seed: int) -> NDArray[np.bool_]:
    """Choose a fraction of each class to set aside: bool (N,), at least one image of a class, at most all but one."""
    # scikit-learn's stratified split refuses classes of one image and may leave small ones out of a split.
    generator = np.random.default_rng(seed)
    chosen = np.zeros(len(codes), dtype=bool)
    for code in np.unique(codes):
        rows = np.flatnonzero(codes == code)
        count = np.clip(round(len(rows) * fraction), 1, len(rows) - 1) if len(rows) > 1 else 0
        chosen[generator.permutation(rows)[:count]] = True
    return chosen


def draw(codes: Codes, limit: int, seed: int, parameter: str) -> NDArray[np.int64]:
    """Choose a number of rows in ascending order, of each class in proportion and at least one."""
    if limit >= len(codes):
        return np.arange(len(codes))
    classes, counts = np.unique(codes, return_counts=True)
    check_limit(limit, len(classes), parameter)
    # One a class first; the others by largest remainder.
    exact = (limit - len(classes)) * (counts - 1) / max(1, len(codes) - len(classes))
    quota = 1 + exact.astype(np.int64)
    rest = limit - int(quota.sum())
    quota[np.argsort(exact.astype(np.int64) - exact, kind="stable")[:rest]] += 1
    return _draw_each(codes, dict(zip(classes.tolist(), quota.tolist(), strict=True)), seed)


def few_of_each(codes: Codes, count: int, seed: int) -> NDArray[np.int64]:
    """Choose a number of rows of each class in ascending order, or all of a class that has no more."""
    return _draw_each(codes, dict.fromkeys(np.unique(codes).tolist(), count), seed)


def _draw_each(codes: Codes, counts: dict[int, int], seed: int) -> NDArray[np.int64]:
    generator = np.random.default_rng(seed)
    rows = [generator.permutation(np.flatnonzero(codes == code))[:count] for code, count in counts.items()]
    return np.sort(np.concatenate(rows))


def check_limit(limit: int, classes: int, parameter: str) -> None:
    """Refuse fewer images than classes."""
    if limit < classes:
        raise InputError(
            f"`{parameter}={limit}` is fewer than the {classes:,} classes, so that some have no image. Give "
            f"`{parameter}={classes}` or more, or leave it out."
        )


def limit_stream(
    stream: IterableDataset, limit: int, label_column: str, classes: int, seed: int, parameter: str
) -> tuple[IterableDataset, str | None]:
    """Draw a number of rows of a stream, the same in each pass; say how many classes are missing, if any.

    A stream is often sorted by class, and its first rows are of one class. Rows are drawn from buffers that are filled
    at many places: files, or row groups of Parquet files.

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


@dataclass
class EncodedSplits:
    """Choose rows of splits by role ("train", "validation" and "test"); `origins` are the user's names for them."""

    source: Source
    origins: dict[str, str]
    image_column: str
    label_column: str
    class_names: list[str]
    seed: int

    def check_classes(self, parts: dict[str, Dataset]) -> None:
        """Refuse one class to train on, and classes to evaluate on that have no image to train on."""
        trained = set(np.unique(self._codes(parts[TRAIN])))
        if len(trained) < 2:
            raise InputError(
                f"There is one class only to train on, {self.class_names[int(trained.pop())]!r}; a classifier needs "
                "two or more. Add images of another, or name another column with `label_column_name`."
            )
        for role, rows in parts.items():
            unknown = [repr(self.class_names[i]) for i in np.unique(self._codes(rows)) if i not in trained]
            if unknown:
                raise InputError(
                    f"{len(unknown):,} of the classes of split {self.origins[role]!r} have no image to train on: "
                    f"{listed(unknown)}. Add some, or name another `eval_split`."
                )

    def set_aside(self, parts: dict[str, Dataset], fraction: float) -> dict[str, Dataset]:
        """Set a fraction of each class aside where there is no split to validate on."""
        if VALIDATION in parts and self.origins[VALIDATION] != self.origins[TRAIN]:
            return parts
        train = parts[TRAIN]
        codes = self._codes(train)
        held = hold_out(codes, fraction, self.seed)
        if not held.any():
            raise InputError("Every class has a single image: none can be set aside. Name an `eval_split`.")
        if single := int((np.bincount(codes) == 1).sum()):
            self.source.notes.append(f"{count_of(single, 'class')} with a single image: trained on, not validated.")
        self.origins = {**self.origins, VALIDATION: f"{100 * fraction:.3g} % of {self.origins[TRAIN]}, set aside"}
        return {**parts, TRAIN: train.select(np.flatnonzero(~held)), VALIDATION: train.select(np.flatnonzero(held))}

    def limit_tables(self, parts: dict[str, Dataset], limits: Limits) -> dict[str, Dataset]:
        """Draw the images that limits leave, of all classes, and name the others."""
        return {role: self._limit(role, rows, limits) for role, rows in parts.items()}

    def _limit(self, role: str, rows: Dataset, limits: Limits) -> Dataset:
        parameter, limit = _limit_of(role, limits)
        few = limits["images_per_class"] if role == TRAIN else None
        if few is not None:
            parameter, limit = "images_per_class", few
            kept = few_of_each(self._codes(rows), few, self.seed)
        elif limit is not None:
            kept = draw(self._codes(rows), limit, self.seed, parameter)
        else:
            return rows
        if len(kept) == len(rows):
            return rows
        left = image_names(rows, self.image_column, np.setdiff1d(np.arange(len(rows)), kept))
        self.source.leave_out(left, role, f"not drawn, {parameter}={limit}", role)
        return rows.select(kept)

    def choose_streams(self, parts: dict[str, IterableDataset]) -> dict[str, IterableDataset]:
        """Validate on the test split where there is no other: nothing can be set aside of a stream."""
        if VALIDATION not in parts and TEST in parts:
            test = self.origins.pop(TEST)
            self.source.notes.append(f"nothing can be set aside of a stream: {test} is used for validation.")
            self.origins[VALIDATION] = test
            parts = {TRAIN: parts[TRAIN], VALIDATION: parts[TEST]}
        if VALIDATION not in parts or self.origins[VALIDATION] == self.origins[TRAIN]:
            raise InputError(
                "A stream can't be split: name two splits with `train_split` and `eval_split`; "
                f"splits: {', '.join(self.source.splits)}."
            )
        return parts

    def limit_streams(self, parts: dict[str, IterableDataset], limits: Limits) -> dict[str, IterableDataset]:
        """Take the images that limits leave, from many places of each stream."""
        if limits["images_per_class"] is not None:
            raise InputError("Classes of a stream can't be counted: leave `images_per_class` out, or `streaming`.")
        limited = dict(parts)
        for role, stream in parts.items():
            parameter, limit = _limit_of(role, limits)
            if limit is not None:
                check_limit(limit, len(self.class_names), parameter)
                limited[role], note = limit_stream(
                    stream, limit, self.label_column, len(self.class_names), self.seed, parameter
                )
                self.source.notes += [f"{role}: {note}"] if note else []
        return limited

    def _codes(self, rows: Dataset) -> Codes:
        return label_indices(rows, self.label_column)


def _limit_of(role: str, limits: Limits) -> tuple[str, int | None]:
    parameter = "max_train_samples" if role == TRAIN else "max_eval_samples"
    return parameter, limits[parameter]
