"""What a run says of itself: before it starts, of its images, and at its end."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import numpy as np

from ..data import Splits, StreamingDataset, count_of, find_duplicates, output_size, write_skipped_images
from ..files import write_file
from ..patch import class_names
from ..trainer import EntameTrainer, last_intact_checkpoint
from .console import duration, knows_epochs, say, scores
from .output_folder import BATCH_FILE, RUN_FILE


def introduction(trainer: EntameTrainer, batch_file: Path | None) -> str:
    """Say in a line each what is trained, how, and where a batch of it can be seen."""
    args, config = trainer.args, trainer.model.config
    count = sum(parameter.numel() for parameter in trainer.model.parameters()) / 1e6
    processor: Any = trainer.processing_class
    height, width = output_size(processor)
    name = getattr(config, "architecture", None) or config.model_type
    batch = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    epochs = count_of(args.num_train_epochs, "epoch", "g")
    length = count_of(args.max_steps, "step") if args.max_steps > 0 else epochs
    # The recipe or the default, where nothing was asked for.
    method = args.entame_method or "entame"
    lines = [
        f"Model: {name}, {count:.1f} M parameters, images of {height}×{width}.",
        f"Run: {method}, recipe {args.recipe}, {length} in batches of {batch}, learning rate {args.learning_rate:g}, "
        f"on {args.device.type}.",
    ]
    samples = trainer.head_fitter.refresh_samples()
    # Nobody asked for it.
    if samples and trainer.head_args.znorm_refresh_samples is None:
        lines.append(f"Evaluation: by feature statistics of up to {samples:,} training images, as batches are small.")
    if batch_file is not None:
        later = "" if batch_file.name == BATCH_FILE else f" ({BATCH_FILE} after the first step)"
        lines.append(f"Batch: {batch_file}{later} shows training images as the model sees them.")
    return "\n".join(lines)


def draw_batch(trainer: EntameTrainer, file: Path) -> bool:
    """Draw augmented training images with their labels, unless a run is resumed; streams would be read twice by it."""
    if trainer.args.resume_from_checkpoint is not None or not trainer.is_world_process_zero():
        return False
    # Imported here: matplotlib takes long to import.
    from ..plots import batch_figure

    data: Any = trainer.train_dataset
    if isinstance(data, StreamingDataset):
        return False
    # A separate generator leaves the training order unchanged.
    rows = np.random.default_rng(trainer.args.seed).permutation(len(data))[:30]
    batch = data.finish(data.read(rows.tolist()))
    images, labels = (batch[name].numpy() for name in ("pixel_values", "labels"))
    figure = batch_figure(images, labels, class_names(trainer.model.config))
    if figure is None:
        return False
    write_file(file, lambda draft: figure.savefig(draft, format="png"))
    return True


def report_images(folder: Path, data: dict[str, Any], splits: Splits) -> None:
    """Name the images that were not used in a file, and say which images are in two splits or have two labels."""
    unread = [image for part in data.values() for image in part.skipped()]
    file = write_skipped_images(folder, [*splits.skipped, *unread])
    for name, part in data.items():
        if line := part.summary():
            say(f"{name}: {line}")
    if file is not None:
        say(f"Images that were not used, and why: {file}")
    # The others were compared before training.
    for name in sorted(splits.uncompared & data.keys()):
        if note := find_duplicates(data[name], data["train"]).note(name):
            say(f"Note: {note}")


def summary(trainer: EntameTrainer, found: dict[str, dict[str, float]], seconds: float) -> str:
    """Say what a run made, how good it is, and what to type next."""
    args, state, folder = trainer.args, trainer.state, str(trainer.args.output_dir)
    weights, step = f"the last ones, of step {state.global_step:,}", trainer.evaluations.loaded_step
    if step is not None:
        epoch = next(entry["epoch"] for entry in state.log_history if entry["step"] == step and "epoch" in entry)
        when = f"epoch {epoch:.3g} (step {step:,})" if knows_epochs(state) else f"step {step:,}"
        weights = f"the best ones, of {when}"
    epochs = f", {count_of(state.epoch or 0, 'epoch', '.3g')}" if knows_epochs(state) else ""
    lines = [
        f"\nDone in {duration(seconds)}: {count_of(state.global_step, 'step')}{epochs}.",
        f"  model       {folder}",
        f"  weights     {weights}",
        f"  validation  {scores(found['eval'])}",
    ]
    if "test" in found:
        lines.append(f"  test        {scores(found['test'], 'test_')}")
    path = shlex.quote(folder)
    lines += [
        f"  card        {folder}/README.md",
        f'  load        AutoModelForImageClassification.from_pretrained("{folder}")',
        f"  predict     entame predict {path} FOLDER --output predictions.csv",
    ]
    last = None if args.save_only_model else last_intact_checkpoint(folder)
    if last is not None:
        longer = f"--max_steps {2 * args.max_steps}" if args.max_steps > 0 else ""
        longer = longer or f"--num_train_epochs {2 * args.num_train_epochs:g}"
        lines.append(f"  continue    {resume_command(Path(folder))} {longer}")
        step = int(last.rpartition("-")[2])
        if step != state.global_step:
            lines.append(f"              from the last checkpoint, of step {step:,}: later steps are taken again")
    return "\n".join(lines)


def what_to_type(trainer: EntameTrainer) -> str:
    """Say how to resume an interrupted run, or to start it anew if it left no checkpoint."""
    folder = Path(str(trainer.args.output_dir))
    if not trainer.state.global_step:
        return "No step was taken: the same command starts it again."
    if last_intact_checkpoint(str(folder)):
        return f"Resume with:\n  {resume_command(folder)}"
    return f"There is no checkpoint yet. Start anew with:\n  entame finetune {_run_file(folder)} --overwrite"


def resume_command(folder: Path) -> str:
    """Write the command that resumes the run of a folder."""
    return f"entame finetune {_run_file(folder)} --resume_from_checkpoint last"


def _run_file(folder: Path) -> str:
    return shlex.quote(str(folder / RUN_FILE))
