"""The stages of one `megtool quantize` run, and its report."""
