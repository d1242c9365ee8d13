"""Quantization recipes in every dialect, and the formats that engines support."""
