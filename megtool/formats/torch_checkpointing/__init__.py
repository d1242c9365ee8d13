"""Folders of torch_checkpointing: a file for each item and rank."""
