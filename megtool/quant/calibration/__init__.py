"""Calibration: a model shown data layer by layer, and what is kept of it."""
