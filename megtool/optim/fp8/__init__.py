"""FP8: scales, quantized products of linear layers, and parameters gathered as bytes."""
