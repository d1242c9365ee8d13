"""Fake quantization: a model that computes with rounded values, as an engine will."""
