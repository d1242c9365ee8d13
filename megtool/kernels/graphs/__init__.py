"""CUDA graphs: captured and replayed."""
