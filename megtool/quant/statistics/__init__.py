"""Statistics of activations: where they are measured, how they are merged, what follows."""
