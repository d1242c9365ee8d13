"""Boxes of tensors on their way: located, read, cast, decoded and computed, tile by tile.

From the top down: reading; the files here.
"""
