"""Tensors of a checkpoint as arrays: whole, tile by tile, in threads, shared by workers."""
