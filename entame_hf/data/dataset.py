"""Feed images and labels to a Trainer, and skip images that can't be read."""

import copy
import logging
from typing import Any

import datasets
import torch
from PIL import Image

from ..errors import InputError
from .images import UnreadableImageError, decode_image
from .transforms import Transform

logger = logging.getLogger(__name__)

MAX_UNREADABLE_SHARE = 0.01
# What cross-entropy leaves out, in torch and so in transformers.
IGNORED_LABEL = -100
_NAMED = 5


class UnreadableDataError(InputError):
    """Say that too many images can't be read.

    A DataLoader raises a worker's error anew with the worker's traceback for a message; the line for the user
    is the last of it.
    """

    def __init__(self, message: str):
        super().__init__(message.rsplit(f"{type(self).__name__}: ", 1)[-1].strip())


class ClassificationDataset(torch.utils.data.Dataset):
    """Give the images of a `datasets.Dataset` as a model's input.

    An image that can't be read is named in one warning, flagged, and not tried again. The next one that can be
    stands in for it, so that batches stay full and of one size on every process. The flags lie in shared memory:
    DataLoader workers and the main process see the same ones.

    Args:
        dataset (`datasets.Dataset`):
            The rows.
        image_column (`str`):
            The column of undecoded images.
        label_column (`str`):
            The column of class indices.
        transform (`Callable`):
            From an RGB `PIL.Image.Image` to a tensor.
        name (`str`, *optional*, defaults to `"train"`):
            What messages call this dataset.
        evaluation (`bool`, *optional*, defaults to `False`):
            Whether stand-ins are labelled -100, which the loss and the metrics leave out, so that nothing is
            counted twice.

    Raises:
        InputError: From an item's access, once more than 1 % of the images could not be read.

    Example:

    ```python
    >>> data = ClassificationDataset(splits.train, "image", "label", training_transform(processor))
    >>> Trainer(model, args, train_dataset=data).train()
    ```
    """

    def __init__(
        self,
        dataset: datasets.Dataset,
        image_column: str,
        label_column: str,
        transform: Transform,
        name: str = "train",
        evaluation: bool = False,
    ):
        self.dataset = dataset
        self.image_column = image_column
        self.label_column = label_column
        self.transform = transform
        self.name = name
        self.evaluation = evaluation
        self.unreadable = torch.zeros(len(dataset), dtype=torch.bool).share_memory_()

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        for step in range(len(self)):
            read = self._read((index + step) % len(self))
            if read is not None:
                image, label = read
                ignored = self.evaluation and step > 0
                return {"pixel_values": self.transform(image), "labels": IGNORED_LABEL if ignored else label}
        raise UnreadableDataError(f"{self.summary()}. Repair them.")

    def _read(self, index: int) -> tuple[Image.Image, int] | None:
        if self.unreadable[index]:
            return None
        row = self.dataset[index]
        try:
            return decode_image(row[self.image_column]), row[self.label_column]
        except UnreadableImageError as error:
            self.unreadable[index] = True
            logger.warning("Skipping an image that cannot be read: %s (%s)", self._describe(index), error)
            if int(self.unreadable.sum()) > MAX_UNREADABLE_SHARE * len(self):
                raise UnreadableDataError(
                    f"{self.summary()}. At most {MAX_UNREADABLE_SHARE:.0%} may be: repair or remove them."
                ) from error
            return None

    def with_transform(self, transform: Transform) -> "ClassificationDataset":
        """Give the same images through another transform; the flags are shared.

        Args:
            transform (`Callable`):
                From an RGB `PIL.Image.Image` to a tensor.

        Returns:
            [`ClassificationDataset`]: The other view.
        """
        other = copy.copy(self)
        other.transform = transform
        return other

    def summary(self) -> str | None:
        """Tell which images could not be read so far.

        Returns:
            `str` or `None`: One line; `None` where all could.
        """
        rows = self.unreadable.nonzero().flatten().tolist()
        if not rows:
            return None
        names = [self._describe(row) for row in rows[:_NAMED]] + ["..."] * (len(rows) > _NAMED)
        return f"{len(rows):,} of {len(self):,} images could not be read and were skipped: {', '.join(names)}"

    def _describe(self, index: int) -> str:
        image = self.dataset[index][self.image_column] or {}
        return image.get("path") or f"row {index} of {self.name}"
