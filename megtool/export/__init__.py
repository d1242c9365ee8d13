"""Exports for inference engines: Hugging Face folders, GGUF, TensorRT-LLM; codes repacked.

From the top down: trtllm_legacy; gguf, hf; the files here.
"""
