"""The parts of an export, one target a file."""
