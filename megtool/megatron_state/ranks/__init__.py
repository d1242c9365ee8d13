"""Legacy rank files: their tensors, and the objects inside them."""
