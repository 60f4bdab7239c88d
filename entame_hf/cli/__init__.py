"""The `entame` command: finetune, predict, inspect and demo."""

from __future__ import annotations

import logging
import os
import sys
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

EXAMPLES = """\
  entame demo
  entame finetune --model_name_or_path timm/resnet50.a1_in1k --data_dir PHOTOS \\
      --output_dir out --recipe recommended
  entame predict out FOLDER --output predictions.csv

entame COMMAND --help lists the options of a command. For several GPUs, type
accelerate launch -m entame_hf.cli finetune in place of entame finetune."""

# What each command does, and its module: none is imported before it runs, so that --help answers at once.
COMMANDS = {
    "finetune": "Fine-tune an image classifier on your images.",
    "predict": "Write the classes of a folder of images to a CSV file.",
    "inspect": "Show what each method would do in the first step; nothing is trained.",
    "demo": "See it work: real weights on real images, on the CPU, in minutes.",
}


def main(argv: list[str] | None = None) -> None:
    """Run a command of `entame`."""
    argv = sys.argv[1:] if argv is None else argv
    command = argv[0] if argv else "--help"
    if command in ("-h", "--help"):
        print(_overview())
    elif command == "--version":
        print(f"entame_hf {version('entame-hf')}")
    elif command not in COMMANDS:
        close = get_close_matches(command, COMMANDS, n=1)
        hint = f"Did you mean {close[0]}? " if close else ""
        print(f"entame: error: Unknown command {command!r}. {hint}Use {', '.join(COMMANDS)}.", file=sys.stderr)
        sys.exit(2)
    elif any(option in ("-h", "--help") for option in argv[1:]):
        print(Path(__file__).with_name("help").joinpath(f"{command}.txt").read_text(encoding="utf-8"), end="")
    else:
        # Torch reads it when it is imported. Below errors, DDP says that a model has no unused parameters.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        # DeepSpeed says wherever it is installed that it found no accelerator.
        logging.getLogger("DeepSpeed").addFilter(lambda record: "Setting accelerator" not in record.getMessage())
        name = Path(sys.argv[0]).name
        name = f"entame {command}" if name in ("entame", "__main__.py") else name
        try:
            from .launch import run_command

            run = import_module(f".{command}", __package__).main
        # Seconds in which Ctrl-C comes too.
        except KeyboardInterrupt:
            print(f"{name}: interrupted.", file=sys.stderr)
            sys.exit(130)
        run_command(run, argv[1:], name)


def _overview() -> str:
    commands = "\n".join(f"  {name:9} {text}" for name, text in COMMANDS.items())
    return f"Usage: entame COMMAND [OPTIONS]\n\n{commands}\n\n{EXAMPLES}"
