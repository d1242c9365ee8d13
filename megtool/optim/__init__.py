"""Optimizers: the step protocol, its parts, and where gradients and states lie on the ranks."""
