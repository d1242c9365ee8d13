"""Calibration by NVIDIA ModelOpt, over the activations of our own decoder."""
