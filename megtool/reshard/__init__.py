"""The engine: plans a copy of an opened checkpoint, executes it and verifies it.

From the top down: the files here; writers.
"""
