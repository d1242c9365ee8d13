"""Optimizer state by bucket, decoded to tensors of the model and encoded again."""
