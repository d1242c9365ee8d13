"""Calibration: runs data through a model layer by layer and collects activation statistics."""
