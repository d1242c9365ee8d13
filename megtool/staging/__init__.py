"""Checkpoints under construction, on disk or in a store: staged, resumed and published whole.

From the top down: open_stage.py; workers; left_overs.py, store; folder; destination; the files
here.
"""
