"""Recipes: what a file says about each module, in every dialect, and what engines load."""
