"""The shape of a model: `ModelConfig`, its sets of layers, and its checks."""
