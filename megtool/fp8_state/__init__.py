"""The parts of `megtool amax`, one action a file."""
