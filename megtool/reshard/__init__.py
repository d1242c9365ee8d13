"""The engine: from an opened checkpoint to a planned, executed and proven copy of it.

From the top down: the files here; writers.
"""
