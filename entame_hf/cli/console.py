"""What a run says: a line per logging step and per evaluation, under one progress bar."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from textwrap import fill
from typing import Any, TextIO

from tqdm.auto import tqdm
from transformers import TrainerCallback, TrainerState, TrainingArguments


class Console(TrainerCallback):
    """Say in one line each what steps and evaluations came to; energies go to the log history and trackers alone.

    Images per second leave evaluations and checkpoints out; the time that is left includes everything.
    """

    def __init__(self) -> None:
        self._bar: tqdm | None = None

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self._start = self._mark = time.monotonic()
        self._first = self._last = state.global_step
        # Seconds since the last line that went to evaluations and checkpoints.
        self._elsewhere = 0.0
        if state.is_world_process_zero:
            # None hides it where nobody watches.
            hidden = args.disable_tqdm or None
            total, done = state.max_steps, state.global_step
            self._bar = tqdm(total=total, initial=done, dynamic_ncols=True, leave=False, unit="step", disable=hidden)
        self._line_at = self._start

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self._mark = time.monotonic()
        if self._bar is not None:
            self._bar.update(state.global_step - self._bar.n)

    def on_epoch_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self._mark = time.monotonic()

    def on_save(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self._leave_out()

    def on_evaluate(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        # Evaluations before and after the training are part of the summary.
        if self._bar is None:
            return
        self._leave_out()
        metrics: dict[str, Any] = kwargs.get("metrics") or {}
        if "eval_accuracy" in metrics and state.is_world_process_zero:
            best = best_evaluation(state.log_history, args)
            epoch = f"epoch {_epoch(state.epoch)}/{_epoch(state.num_train_epochs)}  " if knows_epochs(state) else ""
            say(
                f"{epoch}step {state.global_step:,}  "
                f"{scores(metrics)}  best {_best(best, args)} at step {int(best['step']):,}"
            )

    def on_log(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        logs: dict[str, Any] = kwargs.get("logs") or {}
        if "probe_accuracy" in logs and state.is_world_process_zero:
            say(
                f"informed start  {logs['probe_accuracy']:.1%} expected on unseen images, by leaving one of "
                f"{logs['probe_samples']:,} out"
            )
        if "loss" not in logs or self._bar is None:
            return
        now, steps = time.monotonic(), state.global_step - self._last
        # That of the run, which auto_find_batch_size may have made smaller.
        batch = state.train_batch_size or args.train_batch_size
        images = steps * batch * args.gradient_accumulation_steps * args.world_size
        rate = images / max(now - self._line_at - self._elsewhere, 1e-9)
        done = max(state.global_step - self._first, 1)
        left = (now - self._start) / done * (state.max_steps - state.global_step)
        self._last, self._line_at, self._elsewhere = state.global_step, now, 0.0
        width = len(f"{state.max_steps:,}")
        say(
            f"step {state.global_step:>{width},}/{state.max_steps:,}  loss {float(logs['loss']):.4f}  "
            f"lr {float(logs.get('learning_rate', 0)):.2e}  {rate:,.0f} images/s  {duration(left)} left"
        )

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _leave_out(self) -> None:
        now = time.monotonic()
        self._elsewhere += now - self._mark
        self._mark = now


def say(text: str, file: TextIO | None = None) -> None:
    """Print text above a progress bar: see [`fitted`]."""
    file = file or sys.stdout
    tqdm.write(fitted(text, file), file=file)
    file.flush()


def fitted(text: str, file: TextIO) -> str:
    """Break a terminal's lines between words; a file's stay whole."""
    if not file.isatty():
        return text
    width = shutil.get_terminal_size().columns
    lines = text.split("\n")
    return "\n".join(
        fill(s, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False) for s in lines
    )


class Patience(TrainerCallback):
    """Stop a training after a number of evaluations without improvement.

    They are counted in the log history, which checkpoints keep: a run that is resumed stops where it would have.
    """

    def __init__(self, evaluations: int) -> None:
        self.evaluations = evaluations

    def on_evaluate(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        history = _evaluations(state.log_history, args)
        best = best_evaluation(state.log_history, args)
        if best and len(history) - 1 - history.index(best) >= self.evaluations:
            control.should_training_stop = True


def best_evaluation(history: Sequence[dict[str, Any]], args: TrainingArguments) -> dict[str, Any]:
    """Find the best evaluation by `metric_for_best_model`, the first of equals; empty if there is none."""
    entries, name = _evaluations(history, args), _metric(args)
    sign = -1 if name.endswith("loss") or args.greater_is_better is False else 1
    return max(entries, key=lambda entry: sign * entry[name], default={})


def scores(metrics: dict[str, Any], prefix: str = "eval_") -> str:
    """Write accuracy and macro F1 as percentages."""
    return f"accuracy {metrics[f'{prefix}accuracy']:.1%}  macro F1 {metrics[f'{prefix}f1_macro']:.1%}"


def duration(seconds: float) -> str:
    """Write seconds as minutes and seconds, with hours where there are some."""
    text = str(timedelta(seconds=round(seconds)))
    return text.removeprefix("0:")


def _evaluations(history: Sequence[dict[str, Any]], args: TrainingArguments) -> list[dict[str, Any]]:
    """List the evaluations of a training, the last of each step."""
    name = _metric(args)
    return list({entry["step"]: entry for entry in history if name in entry}.values())


def _metric(args: TrainingArguments) -> str:
    return f"eval_{(args.metric_for_best_model or 'accuracy').removeprefix('eval_')}"


def _best(entry: dict[str, Any], args: TrainingArguments) -> str:
    name = _metric(args)
    return f"{entry[name]:.4f}" if name.endswith("loss") else f"{entry[name]:.1%}"


def knows_epochs(state: TrainerState) -> bool:
    """Tell whether epochs can be counted: of a stream, whose length is not known, Trainer's numbers mean nothing."""
    return state.num_train_epochs < sys.maxsize


def _epoch(epoch: float | None) -> str:
    return f"{round(epoch or 0, 2):g}"
