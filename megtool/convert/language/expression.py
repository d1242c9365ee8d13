"""Arithmetic and conditions over a model's configuration, written as short strings."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from functools import cache
from types import CodeType
from typing import Any

from megtool.errors import MappingError
from megtool.spec import layer_sets
from megtool.spec.model_config import ModelConfig

Expression = str | int | bool

_ALLOWED = (
    ast.Expression,
    ast.Name,
    ast.Load,
    ast.Constant,
    ast.BinOp,
    ast.UnaryOp,
    ast.BoolOp,
    ast.Compare,
    ast.IfExp,
    ast.operator,
    ast.unaryop,
    ast.boolop,
    ast.cmpop,
)


@cache
def _compiled(text: str) -> tuple[CodeType, frozenset[str]]:
    """Checked code of an expression and the names it uses."""
    try:
        tree = ast.parse(text, mode="eval")
    except SyntaxError as error:
        raise MappingError(f"{text!r} is no expression: {error.msg}") from error
    for node in ast.walk(tree):
        if not isinstance(node, _ALLOWED):
            raise MappingError(
                f"{text!r} uses {type(node).__name__}",
                hint="expressions may contain names, numbers, arithmetic, comparisons and "
                "conditions",
            )
    names = frozenset(n.id for n in ast.walk(tree) if isinstance(n, ast.Name))
    return compile(tree, text, "eval"), names


def names_in(text: Expression) -> frozenset[str]:
    """The names an expression uses."""
    return _compiled(text)[1] if isinstance(text, str) else frozenset()


def evaluate(
    text: Expression,
    config: ModelConfig | Mapping[str, Any],
    index: Mapping[str, int] | None = None,
) -> Any:
    """The value of `text`, such as `num_heads * head_dim` or `gated and l not in moe_layers`.

    Names are fields of the configuration (or keys of its `extra`), and `index` adds `l` for the
    layer and `e` for the expert. There are no calls, attributes or subscripts, so evaluating runs
    nothing.

    Raises:
        MappingError: the text is malformed or uses a name that is not there.
    """
    if not isinstance(text, str):
        return text
    code, names = _compiled(text)
    values = {n: _lookup(n, text, config, index) for n in names}
    try:
        return eval(code, {"__builtins__": {}}, values)
    except (TypeError, ArithmeticError) as error:
        raise MappingError(f"{text!r} cannot be computed of {values!r}: {error}") from error


def _lookup(
    name: str,
    text: str,
    config: ModelConfig | Mapping[str, Any],
    index: Mapping[str, int] | None,
) -> Any:
    if index is not None and name in index:
        return index[name]
    if isinstance(config, ModelConfig):
        if layer_sets.knows(name):
            return layer_sets.value_of(config, name)
        config = config.extra
    if name in config:
        return config[name]
    raise MappingError(f"{name!r} in {text!r} is not a field of the model's configuration")
