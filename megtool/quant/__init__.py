"""Quantization: recipes, and which rule of a recipe decides about which module of a model."""
