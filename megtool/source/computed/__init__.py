"""Tensors of a source that are computed when they are read."""
