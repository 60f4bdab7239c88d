"""A `Trainer` that starts every head at maximum entropy."""

from .callbacks import EarlyEvaluation
from .energies import PREFIX as ENERGY_PREFIX
from .energies import EnergyRecorder
from .files import check_writable, locked_output_dir
from .head_lr import LOGIT_STEP, HeadRates, head_learning_rate
from .informed import sampled_batches, training_batches
from .parallel import same_on_all, set_log_level, zero3_init_disabled
from .provenance import used_options
from .resume import asks_for_last, check_finite, find_checkpoint, last_intact_checkpoint, list_checkpoints
from .trainer import EntameTrainer

__all__ = [
    "ENERGY_PREFIX",
    "LOGIT_STEP",
    "EarlyEvaluation",
    "EnergyRecorder",
    "EntameTrainer",
    "HeadRates",
    "asks_for_last",
    "check_finite",
    "check_writable",
    "find_checkpoint",
    "head_learning_rate",
    "last_intact_checkpoint",
    "list_checkpoints",
    "locked_output_dir",
    "same_on_all",
    "sampled_batches",
    "set_log_level",
    "training_batches",
    "used_options",
    "zero3_init_disabled",
]
