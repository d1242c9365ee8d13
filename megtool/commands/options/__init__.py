"""The options of every verb: one dataclass each, whose docstring is the command's help."""
