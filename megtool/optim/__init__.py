"""Optimizers: the step protocol, its parts, and where gradients and states lie on the ranks.

From the top down: the files here; fp8; segments.py; param_groups.py; config.py.
"""
