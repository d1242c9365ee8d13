"""Kernels: one fused operation a file, with its plain-torch reference."""
