"""Fit the heads to the training images before a run, and re-estimate feature statistics with current weights."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderStateMixin
from accelerate.utils import gather_object
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import IterableDataset
from tqdm.auto import tqdm
from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments
from transformers.utils import logging

from ..data import BatchDataset, ClassificationDataset, batch_loader, stratified_rows
from ..errors import InputError
from ..heads import Head, find_heads
from ..layers import widen
from ..patch import HeadFeatures, HeadFit, collect_head_features, collect_statistics, fit_to_features, normalised_heads
from .labels import has_several_labels
from .loader import forget_loader, prepared_loader
from .loss import ClassificationLoss

logger = logging.get_logger(__name__)

KEY = "probe_accuracy"
# The statistics of one batch of fewer images are too noisy to evaluate with: MobileNetV2 on MNIST-5k ends at 85.0 %
# with those of 32 or 64 images, and at 91.0 and 89.1 % with those of so many.
SMALL_BATCH, REFRESH_SAMPLES = 128, 1000


class HeadFitter(TrainerCallback):
    """Fit the heads of a trainer's model to its training images, and log what to expect of unseen ones."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self._fits: list[HeadFit] = []
        # What the last fit was made from, for the next trial of a search.
        self._known: tuple[str, list[HeadFeatures]] | None = None
        # The step, and the weights that the statistics were estimated with.
        self._refreshed: tuple[int, list[float]] | None = None

    def fit(self) -> None:
        """Fit the heads, which were drawn before: see [`fit_head`]."""
        trainer = self.trainer
        config, count = trainer.entame_config(), trainer.head_args.informed_samples
        if has_several_labels(trainer.model):
            raise InputError(
                "The informed head is fitted to one class an image, and this model's problem_type is "
                'multi_label_classification. Use entame_method="entame".'
            )
        heads = find_heads(trainer.model, config.head)
        # A search tries the same backbone several times.
        repeats = trainer.model_init is not None or trainer.args.auto_find_batch_size
        key = _digest(trainer, [head.module for head in heads], count) if repeats else ""
        if self._known is None or not repeats or self._known[0] != key:
            batches = training_batches(trainer, count, "Fitting the head")
            with _on_device(trainer), trainer.accelerator.autocast(), closing(batches):
                read = (trainer.read_labels(batch, trainer.model) for batch in batches)
                features = collect_head_features(trainer.model, heads, read, count)
            self._known = (key, [_to(read, "cpu") for read in features]) if repeats else None
        else:
            features = [_to(read, trainer.args.device) for read in self._known[1]]
        loss = trainer.label_smoother
        weights = loss.class_weights if isinstance(loss, ClassificationLoss) else None
        self._fits = fit_to_features(heads, features, config.eps, weights)

    # Reporting callbacks are ready then, and the state is the run's.
    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self._refreshed = None
        fits, self._fits = self._fits, []
        if not fits:
            return
        first = fits[0]
        logger.info(
            f"Before any training: {first.accuracy:.1%} expected on unseen images, by leaving one out of "
            f"{first.samples:,}."
        )
        several = {f"{KEY}/{fit.path}": fit.accuracy for fit in fits[1:]}
        self.trainer.log({KEY: first.accuracy, "probe_samples": first.samples, **several})

    # Every process gets here, which save_model cannot know.
    def on_train_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            # The best checkpoint was loaded, with its statistics.
            self._refreshed = state.global_step, self._weights()
        self.refresh_statistics()

    def refresh_samples(self) -> int:
        """Return on how many images feature statistics are re-estimated; 0 if they are not."""
        wanted: int | None = self.trainer.head_args.znorm_refresh_samples
        if wanted is not None:
            return wanted
        return 0 if not self._noisy() or self._hindrance() else REFRESH_SAMPLES

    def explain_refreshing(self) -> None:
        """Say what evaluation will do because batches are small."""
        if self.trainer.head_args.znorm_refresh_samples is not None or not self._noisy():
            return
        said = f"Batches of {self.batch_size()} are too noisy to evaluate with: feature statistics "
        if hindrance := self._hindrance():
            logger.warning(f"{said}are the last batch's, as {hindrance}.")
        else:
            logger.info(
                f"{said}are re-estimated on {REFRESH_SAMPLES:,} training images before evaluations and checkpoints. "
                "`znorm_refresh_samples=0` keeps the last batch's."
            )

    def _hindrance(self) -> str | None:
        """Tell what keeps feature statistics from being re-estimated unasked."""
        dataset = self.trainer.train_dataset
        if self.trainer.is_deepspeed_enabled:
            return f"DeepSpeed holds the model. Use batches of {SMALL_BATCH} or more"
        # It may be one that can be read once.
        if isinstance(dataset, IterableDataset) and not isinstance(dataset, BatchDataset):
            return (
                f"a stream of your own may not begin anew. If it can, pass `znorm_refresh_samples={REFRESH_SAMPLES}`"
            )
        return None

    def _evaluate(self, batch: Any) -> None:
        trainer = self.trainer
        # Its own counts the images of an evaluation.
        Trainer.prediction_step(trainer, trainer.model, trainer.read_labels(batch, trainer.model), True)

    def _noisy(self) -> bool:
        config = self.trainer.entame_config()
        return config.feature_norm and config.momentum == 1 and self.batch_size() < SMALL_BATCH

    def batch_size(self) -> int:
        """Return how many images a batch has in all processes together."""
        return self.trainer._train_batch_size * self.trainer.args.world_size

    def refresh_statistics(self) -> None:
        """Re-estimate the feature statistics with the current weights, once; to be called in all processes."""
        trainer, step = self.trainer, self.trainer.state.global_step
        count = self.refresh_samples()
        heads: dict[str, Any] = dict(normalised_heads(trainer.model))
        if not count or not heads or step == 0:
            return
        # A callback may have exchanged the weights within a step, for their averages.
        current = step, self._weights()
        if current == self._refreshed:
            return
        if trainer.is_deepspeed_enabled:
            raise InputError("`znorm_refresh_samples` needs a model that DeepSpeed does not hold: use FSDP or 0.")
        self._refreshed = current
        batches = training_batches(trainer, count, "Feature statistics")
        device = trainer.args.device
        # The training draws what it would without this.
        with torch.random.fork_rng([device] if device.type == "cuda" else []), closing(batches):
            found = collect_statistics(trainer.model, [Head(*pair) for pair in heads.items()], batches, self._evaluate)
        for leaf, (mean, var) in zip(heads.values(), found, strict=True):
            leaf.znorm.mean.copy_(mean)
            leaf.znorm.var.copy_(var)

    def _weights(self) -> list[float]:
        """Give a number that the parameters of each process decide: the sum of their norms and sums."""
        held = (each.to_local() if isinstance(each, DTensor) else each for each in self.trainer.model.parameters())
        # Of each device that holds parameters, one number.
        totals: dict[torch.device, Any] = defaultdict(float)
        for each in (widen(each.detach()) for each in held if each.numel()):
            totals[each.device] += torch.linalg.vector_norm(each).double() + each.sum().double()
        return gather_object([sum(map(float, totals.values()))])


def training_batches(trainer: Any, count: int, title: str) -> Generator[Any]:
    """Iterate over batches of the training images, as evaluation sees them where the dataset can show them so."""
    dataset, args = trainer.train_dataset, trainer.args
    size, processes = _batch_size(args), args.world_size
    if isinstance(dataset, ClassificationDataset):
        yield from sampled_batches(dataset, count, title, args)
        return
    if isinstance(dataset, BatchDataset):
        with dataset.evaluation_view() as view:
            loader, _ = prepared_loader(view, size, None, args, trainer.accelerator)
            yield from _progress(
                _first(loader, -(-count // (size * processes)), trainer.accelerator), None, title, args
            )
        return
    loader = trainer.get_train_dataloader()
    number = -(-count // (trainer._train_batch_size * processes))
    if isinstance(dataset, IterableDataset):
        logger.info(f"{title}: the first {count:,} images of the stream, as training sees them.")
    else:
        number = min(number, len(loader))
    yield from _progress(_first(loader, number, trainer.accelerator), number, title, args)


def sampled_batches(dataset: ClassificationDataset, count: int, title: str, args: TrainingArguments) -> Generator[Any]:
    """Iterate over a process's part of so many images, with the classes' proportions, as evaluation sees them."""
    seed = args.seed if args.data_seed is None else args.data_seed
    rows: Any = stratified_rows(dataset.labels, count, seed)[args.process_index :: args.world_size]
    with dataset.evaluation_view() as view:
        workers = args.dataloader_num_workers
        loader = batch_loader(view, _batch_size(args), args.device, rows, num_workers=workers)
        yield from _progress((batch.to(args.device) for batch in loader), len(loader), title, args)


def _batch_size(args: TrainingArguments) -> int:
    # Evaluation takes 8 images unless told otherwise. Two training batches have room, as no gradients are kept, and
    # are less work for the host.
    return max(args.eval_batch_size, 2 * args.train_batch_size)


def _first(loader: Any, number: int, accelerator: Accelerator) -> Iterator[Any]:
    """Iterate over the first batches of a loader that accelerate has prepared, and is made for this pass."""
    try:
        yield from islice(loader, number)
    finally:
        if isinstance(loader, DataLoaderStateMixin):
            # accelerate would take this loader for the one that the training reads.
            loader.end()
        forget_loader(loader, accelerator)


def _progress(batches: Iterable[Any], total: int | None, title: str, args: TrainingArguments) -> Iterator[Any]:
    # None hides it where nobody watches.
    hidden = args.disable_tqdm or not args.should_log or None
    yield from tqdm(batches, title, total, disable=hidden, leave=False)


@contextmanager
def _on_device(trainer: Any) -> Iterator[None]:
    """Let a model that is sharded later be on the device, whole, while this context lasts."""
    model, device = trainer.model, trainer.args.device
    before = next(model.parameters()).device
    if before == device:
        yield
        return
    model.to(device)
    try:
        yield
    finally:
        model.to(before)


def _to(read: HeadFeatures, device: torch.device | str) -> HeadFeatures:
    return replace(read, **{name: tensor.to(device) for name, tensor in vars(read).items()})


def _digest(trainer: Any, heads: list[nn.Module], count: int) -> str:
    """Identify what features depend on: the backbone's values and the images."""
    own = {id(tensor) for head in heads for tensor in (*head.parameters(), *head.buffers())}
    images = (id(trainer.train_dataset), count, trainer.args.seed, trainer.args.data_seed)
    sums = hashlib.blake2b(str(images).encode())
    for name, tensor in trainer.model.state_dict(keep_vars=True).items():
        if id(tensor) not in own:
            sums.update(name.encode())
            sums.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return sums.hexdigest()
