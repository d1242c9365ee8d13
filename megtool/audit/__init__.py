"""The audit of a run: every save is read once, and compared with those before it."""
