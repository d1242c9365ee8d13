"""The shape of a model: `ModelConfig`, a part for every concept, and its sets of layers."""
