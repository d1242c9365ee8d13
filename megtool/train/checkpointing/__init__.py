"""Saving and resuming a training run: what is written, by which rank, and what is kept."""
