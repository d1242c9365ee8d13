"""Checkpoints under construction, on disk or in a store: staged, resumed and published whole."""
