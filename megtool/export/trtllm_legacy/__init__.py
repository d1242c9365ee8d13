"""TensorRT-LLM's own checkpoints of releases up to 1.x: names, ranks, scales, config."""
