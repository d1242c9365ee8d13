"""Pure arithmetic about tensors: boxes, placements, shards."""
