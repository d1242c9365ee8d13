"""The stages of one `megtool quantize` run, and its report.

From the top down: the files here; layout, verification.
"""
