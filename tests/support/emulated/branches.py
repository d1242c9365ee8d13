"""Branches of the kernels, and which of them a process has run.

A branch is a function, or an arm of an `if` in one, of the modules below `megtool.kernels`; arms
that only raise are none, and neither are kernels' own bodies, which Triton compiles. `record`
changes these modules as they are imported, so that each branch notes itself when it runs: in any
thread, and nowhere else. It has to be called before they are imported.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from tests.support.paths import ROOT

KERNELS = ROOT / "megtool" / "kernels"
MARK = "__megtool_branch__"

Function = ast.FunctionDef | ast.AsyncFunctionDef


class _Marker(ast.NodeTransformer):
    """Lists the branches of a module, and lets each call MARK with its name."""

    def __init__(self, file: str) -> None:
        self.file, self.names = file, list[str]()
        self._within: list[str] = []

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        self._within.append(node.name)
        if not any(ast.unparse(base) == "Protocol" for base in node.bases):
            self.generic_visit(node)
        self._within.pop()
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self._within.append(node.name)
        # A kernel's language is imported for it alone; its text goes to Triton as it is.
        is_kernel = any(isinstance(x, ast.Name) and x.id == "tl" for x in ast.walk(node))
        is_abstract = any("abstractmethod" in ast.unparse(d) for d in node.decorator_list)
        if not (is_kernel and self.file.endswith("_triton.py")) and not is_abstract:
            self.generic_visit(node)
            doc = ast.get_docstring(node) is not None
            node.body[doc:doc] = [self._mark("")]
        self._within.pop()
        return node

    def visit_If(self, node: ast.If) -> ast.AST:
        if not self._within or "TYPE_CHECKING" in ast.unparse(node.test):
            return node
        test = ast.unparse(node.test)
        for arm, label in ((node.body, test), (node.orelse, f"not ({test})")):
            is_chain = arm is node.orelse and len(arm) == 1 and isinstance(arm[0], ast.If)
            if arm and not is_chain and not isinstance(arm[0], ast.Raise):
                arm.insert(0, self._mark(f": {label}"))
        self.generic_visit(node)
        return node

    def _mark(self, label: str) -> ast.stmt:
        name = f"{self.file} {'.'.join(self._within)}{label}"
        count = sum(n == name or n.startswith(f"{name} #") for n in self.names)
        name += f" #{count + 1}" if count else ""
        self.names.append(name)
        return ast.parse(f"{MARK}({name!r})").body[0]


def _marked(path: Path) -> tuple[ast.Module, list[str]]:
    marker = _Marker(path.relative_to(KERNELS).as_posix())
    tree = marker.visit(ast.parse(path.read_text()))
    return ast.fix_missing_locations(tree), marker.names


def branches() -> list[str]:
    """Every branch, in the order of files and of lines."""
    return [name for path in sorted(KERNELS.rglob("*.py")) for name in _marked(path)[1]]


class _MarkingLoader(SourceFileLoader):
    """A module whose branches note themselves."""

    reached: set[str]

    def source_to_code(self, data: Any, path: Any, **_: Any) -> Any:  # type: ignore[override]
        tree, _names = _marked(Path(path).resolve())
        return compile(tree, path, "exec", dont_inherit=True)

    def get_code(self, fullname: str) -> Any:
        # Neither from a cache, nor into one.
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__[MARK] = self.reached.add
        super().exec_module(module)


class _Finder(MetaPathFinder):
    def __init__(self, reached: set[str]) -> None:
        self.reached = reached

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not name.startswith("megtool.kernels."):
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.origin is None:
            return spec
        loader = _MarkingLoader(name, spec.origin)
        loader.reached = self.reached
        spec.loader = cast(Loader, loader)
        return spec


def record() -> set[str]:
    """Have branches note themselves from now on, in the set that is returned."""
    early = [name for name in sys.modules if name.startswith("megtool.kernels.")]
    assert not early, f"imported before: {early}"
    reached: set[str] = set()
    sys.meta_path.insert(0, _Finder(reached))
    return reached


def unreached(reached: set[str]) -> Iterator[str]:
    """Branches that are not among those reached."""
    return (name for name in branches() if name not in reached)
