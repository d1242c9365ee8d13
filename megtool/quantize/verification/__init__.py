"""Compare a quantized folder with its source: weights, scales and unquantized tensors."""
