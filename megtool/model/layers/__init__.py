"""The parts of every layer: linear layers, MLP, norms, dropout, hooks."""
