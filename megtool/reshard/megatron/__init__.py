"""Megatron's rank files and optimizer buckets, as tensors of the model and back."""
