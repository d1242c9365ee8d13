"""The audit of a run: its saves one after the other, each byte read once, and what is wrong."""
