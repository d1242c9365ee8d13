"""An open checkpoint: opened, identified, and as other checkpoints and adapters change it.

From the top down: the files here, subset; checkpoint.py, computed.
"""
