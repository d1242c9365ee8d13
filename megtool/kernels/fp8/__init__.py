"""Casts to FP8, and products of FP8 operands."""
