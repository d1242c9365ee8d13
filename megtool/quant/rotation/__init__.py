"""Offline rotations: orthogonal matrices that are multiplied into weights as they are read."""
