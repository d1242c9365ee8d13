"""Kernels: one fused operation a file, each with its plain-torch reference."""
