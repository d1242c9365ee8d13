"""Who holds what: the grid of ranks, and how they talk."""
