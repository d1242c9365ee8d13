"""What a model keeps between passes: keys and values, contiguous or paged, and states."""
