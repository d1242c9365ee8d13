"""Inference: a model loaded from any checkpoint, and what it says."""
