"""What a machine has, and what of megtool it can run: `megtool doctor`."""
