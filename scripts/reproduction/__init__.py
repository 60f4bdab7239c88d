"""The parts of `scripts/reproduce.py`: a grid of short trainings, and what is made of its result lines."""
