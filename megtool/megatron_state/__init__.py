"""What Megatron stores beside weights, by rank or by bucket, as tensors of the model."""
