"""An open checkpoint: its format and family, subsets, averages, merges and adapters of it.

From the top down: the files here, subset; identify.py,
edited_identity.py; checkpoint.py, computed; held_settings.py.
"""
