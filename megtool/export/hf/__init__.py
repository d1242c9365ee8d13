"""Quantized Hugging Face folders, one form a file: how each is read, and how it is written."""
