"""Where a tensor lives: boxes, relations, shards. Pure arithmetic."""
