"""The parts of `megtool verify`: digests, files, metadata, quantized weights."""
