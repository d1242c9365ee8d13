"""The tensors of a quantized model as they are stored: codes, scales and configuration."""
