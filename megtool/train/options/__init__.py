"""The options of a training run, one group a file."""
