"""Quantization: recipes, calibration, algorithms and packing.

From the top down: mixed_precision; the files here, modelopt; calibration; algorithms; fake_quant,
packed_tensors; qparams.py, rotation, statistics; recipes.
"""
