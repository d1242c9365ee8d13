"""Detection of what a machine has, and of what megtool can run on it: `megtool doctor`."""
