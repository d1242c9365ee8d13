"""Simulation: a model computing as an engine will, in ordinary numbers."""
