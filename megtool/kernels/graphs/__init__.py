"""CUDA graphs: captured, replayed, and checked without a GPU."""
