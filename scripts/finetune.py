#!/usr/bin/env python
"""Fine-tune an image classifier with ENTAME: the same as `entame finetune`."""

from entame_hf.cli.finetune import main
from entame_hf.cli.launch import run_script

if __name__ == "__main__":
    run_script(main)
