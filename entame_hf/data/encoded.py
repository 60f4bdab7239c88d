"""Set images aside, limit their number, and say what there is: with splits whose labels are class indices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from textwrap import shorten

import numpy as np
from datasets import Dataset, IterableDataset

from ..errors import InputError
from .columns import label_indices
from .skipped import SkippedImage
from .source import Rows, Source, count_of
from .splits import TEST, TRAIN, VALIDATION
from .streams import limit_stream
from .subsets import Codes, draw, few_of_each, hold_out
from .understanding import SplitFacts, Understanding, odd_classes

Limits = Mapping[str, int | None]


@dataclass
class EncodedSplits:
    """Work on splits by role: "train", "validation" and "test".

    Args:
        source ([`Source`]): collects what is left out.
        origins (`dict[str, str]`): what the user calls the split of each role.
        label_column (`str`): the column of class indices.
        class_names (`list[str]`): the classes by index.
        seed (`int`): decides all draws.
    """

    source: Source
    origins: dict[str, str]
    label_column: str
    class_names: list[str]
    seed: int

    def check_classes(self, parts: dict[str, Dataset]) -> None:
        """Refuse one class to train on, and classes to evaluate on that have no image to train on."""
        trained = set(np.unique(self._codes(parts[TRAIN])))
        if len(trained) < 2:
            raise InputError(
                f"There is one class only to train on, {self.class_names[int(trained.pop())]!r}; a classifier needs "
                "two "
                "or more. Add images of another, or name another column with `label_column_name`."
            )
        for role, rows in parts.items():
            unknown = [repr(self.class_names[i]) for i in np.unique(self._codes(rows)) if i not in trained]
            if unknown:
                raise InputError(
                    f"{len(unknown):,} of the classes of split {self.origins[role]!r} have no image to train on: "
                    f"{shorten(', '.join(unknown), 200, placeholder=' ...')}. Add some, or name another `eval_split`."
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
        single = int((np.bincount(codes, minlength=len(self.class_names)) == 1).sum())
        if single:
            self.source.notes.append(f"{count_of(single, 'class')} of one image are trained on and not validated.")
        name = self.origins[TRAIN]
        self.origins = {**self.origins, VALIDATION: f"{100 * fraction:.3g} % of {name}, set aside"}
        return {**parts, TRAIN: train.select(np.flatnonzero(~held)), VALIDATION: train.select(np.flatnonzero(held))}

    def limit_tables(self, parts: dict[str, Dataset], limits: Limits) -> dict[str, Dataset]:
        """Draw the images that limits leave, of all classes, and say how many others there are."""
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
        if left := len(rows) - len(kept):
            reason = f"not drawn, {parameter}={limit}"
            self.source.notes.append(f"{count_of(left, 'image')} of {role} left out: {reason}.")
            self.source.skipped.append(SkippedImage(count_of(left, "image"), self.origins[role], reason))
        return rows.select(kept) if left else rows

    def choose_streams(self, parts: dict[str, IterableDataset]) -> dict[str, IterableDataset]:
        """Validate on the test split where there is no other: nothing can be set aside of a stream."""
        if VALIDATION not in parts and TEST in parts:
            self.source.notes.append(
                f"nothing can be set aside of a stream: {self.origins[TEST]} is used for validation."
            )
            test = self.origins.pop(TEST)
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
                limited[role], note = limit_stream(
                    stream, limit, self.label_column, len(self.class_names), self.seed, parameter
                )
                self.source.notes += [f"{role}: {note}"] if note else []
        return limited

    def understand(self, parts: Mapping[str, Rows]) -> Understanding:
        """Say what there is."""
        facts = [
            SplitFacts(
                role,
                self.origins[role],
                np.bincount(self._codes(rows), minlength=len(self.class_names)) if isinstance(rows, Dataset) else None,
            )
            for role, rows in parts.items()
        ]
        counts = facts[0].counts
        notes = [*self.source.notes, *odd_classes(self.class_names, counts)]
        if counts is not None and (empty := int((counts == 0).sum())):
            notes.append(f"{empty:,} of {count_of(len(counts), 'class')} have no image to train on.")
        return Understanding(self.source.layout, facts, self.class_names, notes)

    def _codes(self, rows: Dataset) -> Codes:
        return label_indices(rows, self.label_column)


def _limit_of(role: str, limits: Limits) -> tuple[str, int | None]:
    parameter = "max_train_samples" if role == TRAIN else "max_eval_samples"
    return parameter, limits[parameter]
