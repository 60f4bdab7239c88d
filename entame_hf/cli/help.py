"""Write what `--help` prints, from the descriptions of the options themselves.

The texts are files of the package, so that `--help` answers without importing torch:

python -m entame_hf.cli.help
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from ..training_args import HeadArguments
from .arguments import ModelArguments, RunArguments
from .data_arguments import DataArguments
from .demo import DEFAULTS
from .inspect import inspect_parser
from .loading import training_parser
from .options import OptionParser, describe_option
from .predict import PredictArguments, predict_parser
from .ranking import RankingArguments

FOLDER = Path(__file__).with_name("help")

_RUN = ("output_dir", "patience", "resume_from_checkpoint", "overwrite", "inspect", "gradio")

# Of an inspection, which takes one step.
_INSPECT = ("per_device_train_batch_size", "learning_rate", "phi_w", "noise_lambda", "seed", "use_cpu")


def help_texts() -> dict[str, str]:
    """Write the text of each command's `--help`."""
    parser = training_parser("")
    own = {f.name for f in fields(HeadArguments)}
    declared = list(vars(RunArguments)["__annotations__"])
    groups = {
        "Model": _names(ModelArguments),
        "Data": _names(DataArguments),
        "Method": [name for name in _names(HeadArguments) if name in own],
        "Run": list(_RUN),
        "Training": [name for name in declared if name not in _RUN],
    }
    more = "--help_all lists all other options of transformers' TrainingArguments. Options\n"
    more += "may come from a YAML or JSON file; those that are typed take precedence over it."
    return {
        "finetune": help_text(
            parser,
            "entame finetune [FILE] [OPTIONS]",
            "Fine-tune an image classifier on your images.",
            "entame finetune --model_name_or_path timm/resnet50.a1_in1k --data_dir PHOTOS \\\n"
            "    --output_dir out --recipe recommended\n"
            "entame finetune out/run.yaml --resume_from_checkpoint last",
            groups,
            more,
        ),
        "demo": help_text(
            parser,
            "entame demo [OPTIONS]",
            "Fine-tune EfficientNet-Lite0 on MNIST-5k as usual, as the paper's Base, with\n"
            "ENTAME, its recommended recipe and the informed start: on the CPU, in minutes.",
            "entame demo --output_dir out/demo --overwrite",
            {"Defaults of the demonstration": list(DEFAULTS), "Others": ["overwrite", "max_steps", "seed"]},
            "It takes every option of entame finetune.",
            DEFAULTS,
        ),
        "inspect": help_text(
            inspect_parser(),
            "entame inspect [FILE] [OPTIONS]",
            "Show what each method would do to your model in the first step; nothing is\n"
            "trained or written. Without a model and data, it inspects the demonstration.",
            "entame inspect --model_name_or_path timm/resnet50.a1_in1k --data_dir PHOTOS\n"
            "entame inspect --models timm/resnet50.a1_in1k MODEL --data_dir PHOTOS",
            {
                "Ranking": _names(RankingArguments),
                "Model": groups["Model"],
                "Data": groups["Data"],
                "First step": list(_INSPECT),
            },
        ),
        "predict": help_text(
            predict_parser(),
            "entame predict MODEL FOLDER [OPTIONS]",
            "Write the classes of a folder of images to a CSV file. MODEL is the folder of a\n"
            "run or an id on the Hub; FOLDER is searched with all folders in it.",
            "entame predict out/photos FOLDER --output predictions.csv",
            {"Options": _names(PredictArguments)},
        ),
    }


def help_text(
    parser: OptionParser,
    usage: str,
    description: str,
    example: str,
    groups: dict[str, list[str]],
    more: str = "",
    defaults: dict[str, Any] | None = None,
) -> str:
    """Write a command's help: usage, what it does, an example, and its options in groups."""
    known = {f.name: f for kind in parser.dataclass_types for f in fields(kind)}
    example = "\n".join(f"  {line}" for line in example.splitlines())
    parts = [f"Usage: {usage}\n\n{description}\n\n{example}"]
    for title, names in groups.items():
        lines = [
            line
            for name in names
            if name in parser.options
            for line in describe_option(parser, known[name], (defaults or {}).get(name, MISSING))
        ]
        parts.append("\n".join([f"{title}:", *lines]))
    return "\n\n".join([*parts, *([more] if more else [])]) + "\n"


def _names(kind: Any) -> list[str]:
    return [f.name for f in fields(kind) if f.init]


def write_help(texts: Iterable[tuple[str, str]]) -> None:
    """Write the files that `--help` prints."""
    FOLDER.mkdir(exist_ok=True)
    for command, text in texts:
        (FOLDER / f"{command}.txt").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write_help(help_texts().items())
