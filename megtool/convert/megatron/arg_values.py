"""Values of Megatron's args in whatever form a checkpoint stores them, as plain ones.

Namespaces hold Python values, enum members and functions; YAML files of Megatron-Bridge and NeMo
hold tables, and texts such as `"True"` or `"[0]*3+[1]*58"`, Megatron's own notation for lists.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from megtool.errors import MappingError
from megtool.pickles.reader import Inert

_WORDS = {"True": True, "true": True, "False": False, "false": False, "None": None, "null": None}
_LONGEST_TEXT, _MOST_ITEMS = 20_000, 10_000


def plain_value(value: Any) -> Any:
    """Return the value that a stored form stands for; a function or class is its name.

    Text that is no word, number or list stays as it is.
    """
    if isinstance(value, Inert) and len(value.args) == 1:  # an enum member
        return plain_value(value.args[0])
    if isinstance(value, Mapping):
        target = value.get("_target_")
        return last_name(target) if isinstance(target, str) else dict(value)
    if isinstance(value, list | tuple):
        return type(value)(map(plain_value, value))
    if not isinstance(value, str):
        return value
    text = value.strip()
    if text in _WORDS:
        return _WORDS[text]
    if text[:1] in tuple("([+-.0123456789") and len(text) <= _LONGEST_TEXT:
        try:
            return _evaluate(ast.parse(text, mode="eval").body)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return value
    return value


def last_name(name: str) -> str:
    """Return the last part of a dotted name: `silu` of `torch.nn.functional.silu`."""
    return name.rpartition(".")[2]


def as_flag(name: str, value: Any) -> bool:
    """Return a plain value as a flag.

    Raises:
        MappingError: it is neither true nor false.
    """
    if value is None:
        return False
    if isinstance(value, bool) or value in (0, 1):
        return bool(value)
    raise MappingError(f"{name} is {value!r:.60}", hint="true or false")


def _evaluate(node: ast.expr) -> Any:
    """Evaluate numbers, lists, sums and repetitions of lists, and nothing else."""
    match node:
        case ast.Constant(value=bool() | int() | float() | None as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_evaluate(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return +_evaluate(operand)
        case ast.List(elts=items):
            return [_evaluate(item) for item in items]
        case ast.Tuple(elts=items):
            return tuple(_evaluate(item) for item in items)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            first, second = _evaluate(left), _evaluate(right)
            if isinstance(first, list) and isinstance(second, list):
                return _bounded([*first, *second])
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            first, second = _evaluate(left), _evaluate(right)
            if isinstance(first, int):
                first, second = second, first
            if isinstance(first, list) and isinstance(second, int):
                if second * len(first) > _MOST_ITEMS:
                    raise ValueError("too many items")
                return first * second
    raise ValueError("no number and no list")


def _bounded(items: list[Any]) -> list[Any]:
    if len(items) > _MOST_ITEMS:
        raise ValueError("too many items")
    return items
