"""Whether a destination can and may be written, on disk or in a store; nothing is written."""
