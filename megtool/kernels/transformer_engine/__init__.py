"""Transformer Engine: the library, its linear layers, and weights without a copy."""
