"""FP8: scales, quantised products of linear layers, and parameters gathered as bytes."""
