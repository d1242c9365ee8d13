"""Functions of other packages that are replaced for a while."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Action = Callable[[ModuleType], None]


class Installed:
    """What `install` put in place; `undo()`, or the end of a `with` block, takes it away."""

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str, Any]] = []
        self._awaited: dict[str, Action] = {}
        self._finder = _ImportWatch(self._awaited)

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

    def when_imported(self, name: str, action: Action) -> None:
        """Do `action` with a module: now if it is imported, else as soon as it is."""
        if name in sys.modules:
            action(sys.modules[name])
            return
        self._awaited[name] = action
        if self._finder not in sys.meta_path:
            sys.meta_path.insert(0, self._finder)

    def undo(self) -> None:
        """Put back what was there, and wait for no import any more."""
        self._awaited.clear()
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        while self._replaced:
            setattr(*self._replaced.pop())


class _ImportWatch(MetaPathFinder):
    """Lets the other finders find modules, and acts once those that are awaited have run."""

    def __init__(self, awaited: dict[str, Action]) -> None:
        self._awaited = awaited

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of an awaited module, whose loader acts after the module has run."""
        if name not in self._awaited:
            return None
        others = (f for f in sys.meta_path if f is not self)
        specs = (f.find_spec(name, path, target) for f in others)
        spec = next((s for s in specs if s is not None), None)
        if spec is not None and spec.loader is not None:
            self._act_after(name, spec.loader)
        return spec

    def _act_after(self, name: str, loader: Any) -> None:
        run = loader.exec_module

        def run_and_act(module: ModuleType) -> None:
            run(module)
            action = self._awaited.pop(name, None)
            if action is not None:
                action(module)

        loader.exec_module = run_and_act
