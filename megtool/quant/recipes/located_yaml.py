"""Safe YAML and JSON parsing into values with line numbers, for untrusted files."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megtool.errors import RecipeError
from megtool.options.config_file import TAG_ERRORS

MAX_BYTES, MAX_NODES, MAX_DEPTH = 1 << 20, 20_000, 40
"""Limits for recipes: larger files are mistakes or attacks on memory."""

_MAX_INTEGER = 1 << 63
_PLAIN = ("str", "int", "float", "bool", "null")


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A value of a file and the line (from 1) where it begins.

    `value` is a str, int, float, bool or None, a list of nodes, or a dict from keys to nodes;
    `keys` are the lines of a dict's keys.
    """

    value: Any
    line: int
    keys: dict[str, int] | None = None

    def plain(self) -> Any:
        """The value without lines."""
        if isinstance(self.value, dict):
            return {key: item.plain() for key, item in self.value.items()}
        if isinstance(self.value, list):
            return [item.plain() for item in self.value]
        return self.value

    @property
    def text(self) -> str:
        """The value if it is a string, else its repr."""
        return self.value if isinstance(self.value, str) else repr(self.plain())

    def get(self, key: str) -> Node | None:
        """The value of a key; None if this is not a mapping or has no such key."""
        return self.value.get(key) if isinstance(self.value, dict) else None


def read_documents(text: bytes, *, file: str | Path) -> list[Node]:
    """Read the YAML documents of a file (JSON is YAML) safely, without custom tags.

    Anchors are expanded up to `MAX_NODES` values, so that small files cannot grow without bound.

    Raises:
        RecipeError: too large, too deep, a duplicate key, a custom tag, or invalid YAML.
    """
    yaml: Any = importlib.import_module("yaml")
    if len(text) > MAX_BYTES:
        raise RecipeError(
            f"the recipe has {len(text):,} bytes, which is too much",
            file=file,
            hint=f"at most {MAX_BYTES:,}",
        )
    loader: Any = None
    try:
        loader = yaml.SafeLoader(text)
        tree = _Tree(yaml, loader, str(file))
        documents = []
        while loader.check_node():
            documents.append(tree.node(loader.get_node(), 0))
        return documents
    except yaml.MarkedYAMLError as e:
        mark = e.problem_mark or e.context_mark
        location = f"line {mark.line + 1}: " if mark else ""
        raise RecipeError(
            f"{location}the YAML is invalid: {e.problem or e.context}", file=file
        ) from e
    except (yaml.YAMLError, *TAG_ERRORS) as e:
        message = " ".join(str(e).split())[:120]
        raise RecipeError(f"the YAML is invalid: {message}", file=file) from e
    finally:
        if loader is not None:
            loader.dispose()


class _Tree:
    """Converts PyYAML nodes, and counts them."""

    def __init__(self, yaml: Any, loader: Any, file: str) -> None:
        self._yaml, self._loader, self._file = yaml, loader, file
        self._left = MAX_NODES

    def node(self, node: Any, depth: int) -> Node:
        self._left -= 1
        line = node.start_mark.line + 1
        if self._left < 0 or depth > MAX_DEPTH:
            raise RecipeError(
                f"line {line}: there are more than {MAX_NODES:,} values, or they are nested more "
                f"than {MAX_DEPTH} deep",
                file=self._file,
                hint="nested anchors grow without bound",
            )
        kind = node.tag.removeprefix("tag:yaml.org,2002:")
        if kind == node.tag or kind.startswith("python/"):
            raise RecipeError(
                f"line {line}: the tag {node.tag!r} is not allowed",
                file=self._file,
                hint="remove it",
            )
        if isinstance(node, self._yaml.MappingNode):
            return self._mapping(node, depth)
        if isinstance(node, self._yaml.SequenceNode):
            return Node(value=[self.node(n, depth + 1) for n in node.value], line=line)
        if kind not in _PLAIN:  # dates stay strings
            return Node(value=node.value, line=line)
        value = self._loader.construct_object(node)
        if isinstance(value, int) and abs(value) >= _MAX_INTEGER:
            raise RecipeError(f"line {line}: an integer of more than 64 bits", file=self._file)
        return Node(value=value, line=line)

    def _mapping(self, node: Any, depth: int) -> Node:
        values: dict[str, Node] = {}
        lines: dict[str, int] = {}
        merged: list[Node] = []
        for key_node, value_node in node.value:
            key, line = key_node.value, key_node.start_mark.line + 1
            if not isinstance(key, str):
                raise RecipeError(f"line {line}: a key that is not a string", file=self._file)
            if key_node.tag.endswith(":merge"):
                merged += _as_list(self.node(value_node, depth + 1))
                continue
            if key in values:
                raise RecipeError(
                    f"line {line}: the key {key!r} is a duplicate, first at line {lines[key]}",
                    file=self._file,
                    hint="YAML would silently use the last value",
                )
            values[key], lines[key] = self.node(value_node, depth + 1), line
        for parent in merged:
            for key, value in parent.value.items() if isinstance(parent.value, dict) else ():
                if key not in values:
                    values[key], lines[key] = value, (parent.keys or {}).get(key, value.line)
        return Node(value=values, line=node.start_mark.line + 1, keys=lines)


def _as_list(node: Node) -> list[Node]:
    return node.value if isinstance(node.value, list) else [node]


def as_key(value: Any) -> Any:
    """Convert plain data to a hashable value: lists to tuples, mappings to their repr."""
    if isinstance(value, list | tuple):
        return tuple(as_key(item) for item in value)
    return repr(value) if isinstance(value, dict) else value
