"""Kernels: one fused operation a file, each with its plain-torch reference.

From the top down: choices.py; attention, experts; elementwise, fp8, graphs, recurrence,
vocabulary; the files here; transformer_engine; wgrad_accumulation.py.
"""
