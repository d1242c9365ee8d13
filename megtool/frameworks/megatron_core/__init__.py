"""Megatron-Core's state dicts, filled from any checkpoint."""
