"""Resolves `imports:` and `$import` of ModelOpt recipes."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path

from megtool.errors import RecipeError
from megtool.quant.recipes.located_yaml import Node, read_documents
from megtool.quant.recipes.modules import suggest
from megtool.quant.recipes.rules import RecipeProblems

_MAX_IMPORTS = 64


class ImportResolver:
    """Searches imports in a folder, its parents, and the package `modelopt_recipes`.

    The package is located without executing it.
    """

    def __init__(self, root: Path | None, problems: RecipeProblems) -> None:
        self._roots = [root, *root.parents] if root else []
        spec = importlib.util.find_spec("modelopt_recipes")
        self._roots += [Path(p) for p in (spec.submodule_search_locations or ())] if spec else []
        self._problems, self._left = problems, _MAX_IMPORTS

    def resolve(self, node: Node, above: tuple[str, ...] = ()) -> Node:
        """Return the document with all imports replaced."""
        named = node.get("imports")
        imports: dict[str, Node] = {}
        if named is not None and isinstance(named.value, dict):
            for key, location in named.value.items():
                if isinstance(location.value, str):
                    imports[key] = self._load(location, above)
        return self._substitute(node, imports)

    def _load(self, location: Node, above: tuple[str, ...]) -> Node:
        name = location.value
        self._left -= 1
        if name in above or self._left < 0 or ".." in name or name.startswith("/"):
            self._problems.add(
                location.line,
                f"import {name!r} is circular, absolute, nested too deeply or outside the folder",
            )
            return Node(value={}, line=location.line)
        for root in self._roots:
            for path in (root / f"{name}.yaml", root / f"{name}.yml", root / name):
                if path.is_file():
                    return self._read(path, location, (*above, name))
        self._problems.add(
            location.line,
            f"import {name!r} is not found",
            "imports are searched next to the recipe and in the installed modelopt_recipes",
        )
        return Node(value={}, line=location.line)

    def _read(self, path: Path, location: Node, above: tuple[str, ...]) -> Node:
        try:
            documents = read_documents(path.read_bytes(), file=path)
        except (OSError, RecipeError) as e:
            self._problems.add(location.line, f"import {location.value!r}: {e}")
            return Node(value={}, line=location.line)
        if len(documents) == 2 and documents[0].get("imports") is not None:
            imports = {
                key: self._load(location, above)
                for key, location in documents[0].value["imports"].value.items()
                if isinstance(location.value, str)
            }
            return self._substitute(documents[1], imports)
        return self.resolve(documents[0], above) if documents else Node(value={}, line=0)

    def _substitute(self, node: Node, imports: Mapping[str, Node]) -> Node:
        if isinstance(node.value, list):
            out: list[Node] = []
            for item in node.value:
                alone = isinstance(item.value, dict) and set(item.value) == {"$import"}
                new = self._substitute(item, imports)
                out += new.value if alone and isinstance(new.value, list) else [new]
            return Node(value=out, line=node.line)
        if not isinstance(node.value, dict):
            return node
        reference = node.value.get("$import")
        values: dict[str, Node] = {}
        for item in (
            (reference.value if isinstance(reference.value, list) else [reference])
            if reference
            else ()
        ):
            imported = imports.get(str(item.value))
            if imported is None:
                hint = suggest(str(item.value), imports) if imports else "no imports are declared"
                self._problems.add(item.line, f"unknown import {item.value!r}", hint)
            elif isinstance(imported.value, list) and len(node.value) == 1:
                return imported
            elif isinstance(imported.value, dict):
                values |= imported.value
        values |= {k: self._substitute(v, imports) for k, v in node.value.items() if k != "$import"}
        values.pop("imports", None)
        return Node(value=values, line=node.line, keys=node.keys)
