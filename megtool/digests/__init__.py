"""What is computed over all bytes of tensors and files: digests, comparisons, statistics."""
