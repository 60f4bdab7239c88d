"""Run `python -m entame_hf.cli`, which `accelerate launch -m` can start too."""

from . import main

if __name__ == "__main__":
    main()
