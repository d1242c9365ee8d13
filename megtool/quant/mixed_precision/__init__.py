"""Choosing: formats for each part of a model, within a budget."""
