#!/usr/bin/env python
"""Fine-tune an image classifier: the same as `entame finetune`."""

import sys

from entame_hf.cli import main

if __name__ == "__main__":
    main(["finetune", *sys.argv[1:]])
