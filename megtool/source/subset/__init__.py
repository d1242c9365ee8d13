"""A model of some of its layers, channels, heads and experts, with their state."""
