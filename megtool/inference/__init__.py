"""Inference: load a model from any checkpoint, generate, evaluate."""
