"""Imports of ModelOpt's recipes: `imports:` and `$import` replaced by what they name."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path

from megtool.errors import RecipeError
from megtool.quant.recipes.located_yaml import Node, read_documents
from megtool.quant.recipes.modules import nearest
from megtool.quant.recipes.rules import Problems

_MOST_IMPORTS = 64


class Imports:
    """Looks for imports in a folder, in those above it, and in the package `modelopt_recipes`.

    The package is found, and nothing of it is run.
    """

    def __init__(self, root: Path | None, problems: Problems) -> None:
        self._roots = [root, *root.parents] if root else []
        found = importlib.util.find_spec("modelopt_recipes")
        self._roots += [Path(p) for p in (found.submodule_search_locations or ())] if found else []
        self._problems, self._left = problems, _MOST_IMPORTS

    def resolved(self, node: Node, above: tuple[str, ...] = ()) -> Node:
        """A document without imports."""
        named = node.get("imports")
        known: dict[str, Node] = {}
        if named is not None and isinstance(named.value, dict):
            for key, where in named.value.items():
                if isinstance(where.value, str):
                    known[key] = self._load(where, above)
        return self._filled(node, known)

    def _load(self, where: Node, above: tuple[str, ...]) -> Node:
        name = where.value
        self._left -= 1
        if name in above or self._left < 0 or ".." in name or name.startswith("/"):
            self._problems.add(where.line, f"import {name!r} goes round, up or on without end")
            return Node(value={}, line=where.line)
        for root in self._roots:
            for path in (root / f"{name}.yaml", root / f"{name}.yml", root / name):
                if path.is_file():
                    return self._read(path, where, (*above, name))
        self._problems.add(
            where.line,
            f"import {name!r} is not found",
            "it is looked for beside the recipe and in the installed modelopt_recipes",
        )
        return Node(value={}, line=where.line)

    def _read(self, path: Path, where: Node, above: tuple[str, ...]) -> Node:
        try:
            documents = read_documents(path.read_bytes(), file=path)
        except (OSError, RecipeError) as e:
            self._problems.add(where.line, f"import {where.value!r}: {e}")
            return Node(value={}, line=where.line)
        if len(documents) == 2 and documents[0].get("imports") is not None:
            known = {
                key: self._load(one, above)
                for key, one in documents[0].value["imports"].value.items()
                if isinstance(one.value, str)
            }
            return self._filled(documents[1], known)
        return self.resolved(documents[0], above) if documents else Node(value={}, line=0)

    def _filled(self, node: Node, known: Mapping[str, Node]) -> Node:
        if isinstance(node.value, list):
            out: list[Node] = []
            for one in node.value:
                alone = isinstance(one.value, dict) and set(one.value) == {"$import"}
                new = self._filled(one, known)
                out += new.value if alone and isinstance(new.value, list) else [new]
            return Node(value=out, line=node.line)
        if not isinstance(node.value, dict):
            return node
        asked = node.value.get("$import")
        held: dict[str, Node] = {}
        for one in (asked.value if isinstance(asked.value, list) else [asked]) if asked else ():
            found = known.get(str(one.value))
            if found is None:
                hint = nearest(str(one.value), known) if known else "no imports are declared"
                self._problems.add(one.line, f"unknown import {one.value!r}", hint)
            elif isinstance(found.value, list) and len(node.value) == 1:
                return found
            elif isinstance(found.value, dict):
                held |= found.value
        held |= {k: self._filled(v, known) for k, v in node.value.items() if k != "$import"}
        held.pop("imports", None)
        return Node(value=held, line=node.line, keys=node.keys)
