"""NVIDIA ModelOpt: calibration by it, and its quantizers in Megatron checkpoints."""
