"""The reports of verbs: what was done and found, as data and as text."""
