"""No value is copied field by field from one dataclass into another."""

from __future__ import annotations

import ast
from itertools import combinations
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMPOSED = ("group", "argument")
"""What makes a field that verbs share on purpose: a group of options, or a positional argument."""

REPEATS = {
    # what a user says of a layout, where nothing leaves it to the checkpoint, and the layout
    frozenset({"LayoutOptions", "ParallelConfig"}),
    # scores of a model's parts, and the numbers of those that stay
    frozenset({"KeptParts", "PruningScores"}),
}
"""Pairs that name the same things and hold something else of each."""


def own_fields(node: ast.ClassDef) -> set[str]:
    """The names of a dataclass's own fields, without those that verbs are composed of."""
    out = set()
    for line in node.body:
        if not isinstance(line, ast.AnnAssign) or not isinstance(line.target, ast.Name):
            continue
        made = line.value.func if isinstance(line.value, ast.Call) else None
        is_composed = isinstance(made, ast.Name) and made.id in COMPOSED
        if not is_composed and not ast.unparse(line.annotation).startswith("ClassVar"):
            out.add(line.target.id)
    return out


def dataclasses_of_the_tree() -> dict[str, set[str]]:
    """The own fields of every dataclass by its name."""
    out = {}
    for folder in ("megtool", "converters"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef) and any(
                    "dataclass" in ast.unparse(d) for d in node.decorator_list
                ):
                    out[node.name] = own_fields(node)
    return out


def test_dataclasses_do_not_repeat_fields() -> None:
    found = set()
    for (a, of_a), (b, of_b) in combinations(dataclasses_of_the_tree().items(), 2):
        shared = len(of_a & of_b)
        if shared >= 4 and shared >= 0.7 * min(len(of_a), len(of_b)):
            found.add(frozenset({a, b}))
    assert found == REPEATS
