"""Quantization algorithms: pure functions of weights and activation statistics."""
