"""A checkpoint under construction in an object store, published by its last objects."""
