"""Models of transformers from any checkpoint: see `megtool.frameworks.transformers`."""

from megtool.frameworks.transformers import from_pretrained

__all__ = ["from_pretrained"]
