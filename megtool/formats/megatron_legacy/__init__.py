"""Megatron's legacy `torch` format: a folder for each rank."""
