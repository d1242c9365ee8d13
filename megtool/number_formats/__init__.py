"""Number formats of packed tensors: one format a file, decoded and encoded."""
