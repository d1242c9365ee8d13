"""Digests, comparisons and statistics over all bytes of tensors and files."""
