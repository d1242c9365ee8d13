"""Inference: load a model from any checkpoint, generate, evaluate.

From the top down: evaluation; generation; the files here.
"""
