"""Loaders for engines: vLLM, SGLang and TensorRT-LLM."""
