"""The mapping language: expressions, canonical tensors, layouts, and tables bound to a model."""
