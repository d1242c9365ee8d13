"""FP8 scaling state of checkpoints: inspected, derived, fixed and stripped (`megtool amax`)."""
