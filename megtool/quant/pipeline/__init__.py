"""Quantizing: the steps of `megtool quantize`, and what it tells of them."""
