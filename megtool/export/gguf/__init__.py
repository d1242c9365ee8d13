"""GGUF: a model as the one file that llama.cpp reads."""
