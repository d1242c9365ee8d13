"""Targets of compressed-tensors: which modules an entry of `targets` or `ignore` means by name."""

from __future__ import annotations

import re

EXPRESSION = "re:"
"""What an entry begins with that is an expression for the beginning of a name."""


def means(entry: str, module: str) -> bool:
    """The entry is the module's name, or an expression for it; one that is none means nothing."""
    if not entry.startswith(EXPRESSION):
        return entry == module
    try:
        return re.match(entry.removeprefix(EXPRESSION), module) is not None
    except re.error:
        return False
