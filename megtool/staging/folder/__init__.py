"""A checkpoint under construction in a folder, renamed to its destination atomically."""
