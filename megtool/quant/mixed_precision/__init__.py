"""Automatic mixed precision: a format for each part of a model, within a budget of bits."""
