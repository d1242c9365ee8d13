"""The stored tensors of a quantized model, in Hugging Face folders and in Megatron's."""
