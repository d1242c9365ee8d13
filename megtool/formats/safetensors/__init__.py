"""Hugging Face folders of safetensors, quantized ones too, and bare `.safetensors` files."""
