"""The grid of ranks: layout, process groups and collectives."""
