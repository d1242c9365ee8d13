"""Public methods are documented: by themselves, by a base, or by a protocol."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]

Classes = dict[str, list[tuple[Path, ast.ClassDef]]]


def classes_of_the_tree() -> Classes:
    out: Classes = defaultdict(list)
    for folder in ("megtool", "converters"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    out[node.name].append((path.relative_to(ROOT), node))
    return out


def base_names(node: ast.ClassDef) -> Iterator[str]:
    for base in node.bases:
        name = base.value if isinstance(base, ast.Subscript) else base
        yield name.attr if isinstance(name, ast.Attribute) else getattr(name, "id", "")


def documented(node: ast.ClassDef) -> set[str]:
    methods = (m for m in node.body if isinstance(m, ast.FunctionDef))
    return {m.name for m in methods if ast.get_docstring(m)}


def inherited(node: ast.ClassDef, classes: Classes) -> set[str]:
    """The methods that the bases of a class document."""
    out: set[str] = set()
    for name in base_names(node):
        for _, base in classes.get(name, ()):
            out |= documented(base) | inherited(base, classes)
    return out


def test_methods_without_a_docstring_have_one_where_they_are_declared() -> None:
    classes = classes_of_the_tree()
    everything = [(path, node) for nodes in classes.values() for path, node in nodes]
    protocols = set[str]().union(
        *(documented(c) for _, c in everything if "Protocol" in base_names(c))
    )
    undocumented = [
        f"{path}:{m.lineno} {node.name}.{m.name}"
        for path, node in everything
        if not node.name.startswith("_") and not node.col_offset
        for m in node.body
        if isinstance(m, ast.FunctionDef) and not m.name.startswith("_")
        if m.name not in documented(node) | inherited(node, classes) | protocols
    ]
    assert undocumented == []
