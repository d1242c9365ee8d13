"""Algorithms of calibration: pure functions of weights and of what was seen of their inputs."""
