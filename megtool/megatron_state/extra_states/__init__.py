"""Extra states of Transformer Engine and ModelOpt: names, bytes, faults, merged over ranks."""
