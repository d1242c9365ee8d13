"""Functions of other packages that are replaced for a while."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Installed:
    """What `install` put in place; `undo()`, or the end of a `with` block, takes it away."""

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> Installed:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()

    def replace(self, module: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Put `make(what was there)` in place of a module's attribute, if it has one."""
        if hasattr(module, name):
            original = getattr(module, name)
            self._replaced.append((module, name, original))
            setattr(module, name, make(original))

    def undo(self) -> None:
        """Put back what was there."""
        while self._replaced:
            setattr(*self._replaced.pop())
