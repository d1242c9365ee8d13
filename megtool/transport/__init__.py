"""How boxes of tensors move: located, read, cast, decoded and computed, tile by tile."""
