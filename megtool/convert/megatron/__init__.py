"""Megatron's names and args, and how it cuts tensors over ranks."""
