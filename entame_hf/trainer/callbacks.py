"""What happens at steps."""

from __future__ import annotations

import math
from typing import Any

from accelerate.utils import set_seed
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..patch import set_trained
from .resume import check_finite


class TrainedMark(TrainerCallback):
    """Note, after a step, that the heads have begun to learn and that something would be lost with them."""

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        set_trained(kwargs["model"])


class OwnRandomness(TrainerCallback):
    """Give each of several processes random numbers of its own, where Trainer's one seed drops the same everywhere.

    The first one's stay what they are. By now the model and the order of the data are made, which processes share, and
    a checkpoint's random numbers, which each process has its own file of, are loaded afterwards.
    """

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if args.process_index > 0:
            set_seed(args.seed, device_specific=True)


class EarlyEvaluation(TrainerCallback):
    """Evaluate after each of the first steps, where ENTAME and its peers differ most.

    Args:
        steps (`int`, *optional*, defaults to 10): the paper's tables average over ten.
    """

    def __init__(self, steps: int = 10) -> None:
        self.steps = steps

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.global_step <= self.steps:
            control.should_evaluate = True


class FiniteCheck(TrainerCallback):
    """Stop a training whose loss or weights are not finite any more, before anything of it is saved.

    It looks at each logged loss, and at the weights whenever a loss is logged, before each checkpoint and at the end.
    With fp16, loss scaling skips single steps: two logged losses in a row must be not finite.

    Raises:
        NonFiniteError: the message says after which step, and what to try.
    """

    def __init__(self) -> None:
        self._skipped = False

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        loss = (kwargs.get("logs") or {}).get("loss")
        if loss is None:
            return
        skipped = args.fp16 and not math.isfinite(loss) and not self._skipped
        check_finite(kwargs["model"], args, state, 0.0 if skipped else loss)
        self._skipped = skipped

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        check_finite(kwargs["model"], args, state)
