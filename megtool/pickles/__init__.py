"""Zip archives and pickles: read without running code in them, and written."""
