"""GGUF files as llama.cpp writes them: read only."""
