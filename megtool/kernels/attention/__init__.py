"""Attention: masks, tiles, softmax, and the implementations it is dispatched to."""
