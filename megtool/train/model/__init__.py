"""The model of a run: built, loaded, kept packed, and estimated."""
