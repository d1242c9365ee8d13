"""Recurrences over tokens: Mamba-2, delta rules, and the convolution before them."""
