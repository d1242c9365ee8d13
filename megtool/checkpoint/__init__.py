"""Checkpoints on disk: catalogue, plan, copy, commit, verify; one file a format."""
