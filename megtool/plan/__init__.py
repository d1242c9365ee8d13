"""Plans of copies: made from headers alone, shared out to workers, executed in units of work."""
