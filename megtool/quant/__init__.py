"""Quantization: recipes, calibration, algorithms, packing and verification."""
