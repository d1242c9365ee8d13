"""Adapters of other programs as files: read, converted into one another, merged into weights."""
