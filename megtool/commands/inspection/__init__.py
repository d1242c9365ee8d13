"""The parts of `megtool inspect`: names, ranks, statistics by layer."""
