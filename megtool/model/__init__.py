"""The model: one decoder for every family, parallel over ranks.

From the top down: stacks; moe, recurrent; attention; the files here; cache; batch.py, layers,
positions.
"""
