"""The paper's experiments, and others like them, as a grid of short runs."""
