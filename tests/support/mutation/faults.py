"""Single faults that can be planted into a Python source: small changes that still compile."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass

_COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,  # codespell:ignore notin
    ast.NotIn: ast.In,  # codespell:ignore notin
}
_COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
_CALLED = {"any": "all", "all": "any", "min": "max", "max": "min"}
_LOGGED = {"debug", "info", "warning"}


@dataclass(frozen=True, slots=True)
class Fault:
    """Text that replaces what stands between two offsets of a source."""

    kind: str
    line: int
    start: int
    stop: int
    before: str
    after: str

    def plant(self, source: str) -> str:
        """Return the source with the fault."""
        return source[: self.start] + self.after + source[self.stop :]


def find_faults(source: str) -> list[Fault]:
    """Return every fault that can be planted, in the order of the source."""
    tree = ast.parse(source)
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    lines = source.splitlines()

    def offset(line: int, column: int) -> int:
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    out = []
    for node, kind, after in _changes(tree):
        start = offset(node.lineno, node.col_offset)
        stop = offset(node.end_lineno or node.lineno, node.end_col_offset or 0)
        before = source[start:stop]
        if isinstance(node, ast.expr):
            after = f"({after})"
        else:
            after = after.replace("\n", "\n" + " " * node.col_offset)
        out.append(Fault(kind, node.lineno, start, stop, before, after))
    return sorted(set(out), key=lambda f: (f.start, f.stop, f.kind, f.after))


def _changes(tree: ast.Module) -> Iterator[tuple[ast.expr | ast.stmt, str, str]]:
    """Yield nodes, what is changed, and the text that replaces them."""
    for node in _code(tree):
        if isinstance(node, ast.stmt):
            yield from _of_statement(node)
        elif isinstance(node, ast.expr):
            for kind, changed in _of_expression(node):
                yield node, kind, ast.unparse(changed)


def _code(tree: ast.AST) -> Iterator[ast.AST]:
    """Walk over what runs, without types, docstrings, `__all__`, messages and f-strings."""
    skipped: set[int] = set()
    for node in ast.walk(tree):
        parts: list[ast.AST | None] = []
        if isinstance(node, ast.arg | ast.AnnAssign):
            parts.append(node.annotation)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            parts += [node.returns, *node.decorator_list]
        if isinstance(node, ast.ClassDef):
            parts += node.decorator_list
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            parts += [node]
        if isinstance(node, ast.JoinedStr | ast.Raise):
            parts.append(node)
        skipped.update(id(x) for part in parts if part is not None for x in ast.walk(part))
    yield from (node for node in ast.walk(tree) if id(node) not in skipped)


def _of_statement(node: ast.stmt) -> Iterator[tuple[ast.stmt, str, str]]:
    match node:
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr=name))) if name in _LOGGED:
            return
        case ast.Expr(value=ast.Call()):
            yield node, "delete a call", "pass"
        case ast.If(test=test, body=body):
            dropped = copy.deepcopy(node)
            dropped.test = ast.Constant(False)
            yield node, f"never: {_short(test)}", ast.unparse(dropped)
            if all(isinstance(x, ast.Raise) for x in body):
                return
            always = copy.deepcopy(node)
            always.test = ast.Constant(True)
            yield node, f"always: {_short(test)}", ast.unparse(always)
        case ast.For(body=body) if len(body) > 1 or not isinstance(body[0], ast.If):
            once = copy.deepcopy(node)
            once.body.append(ast.Break())
            yield node, "break after the first", ast.unparse(once)
        case ast.AugAssign(op=op) if type(op) in _COMPUTED:
            changed = copy.deepcopy(node)
            changed.op = _COMPUTED[type(op)]()
            yield node, "arithmetic", ast.unparse(changed)


def _of_expression(node: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    changed: ast.expr
    match node:
        case ast.Compare(ops=[op]):
            changed = copy.deepcopy(node)
            changed.ops = [_COMPARED[type(op)]()]
            yield "compare", changed
        case ast.BoolOp(op=op, values=values):
            other = ast.Or() if isinstance(op, ast.And) else ast.And()
            yield "and/or", ast.BoolOp(other, values)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "drop a not", operand
        case ast.BinOp(op=op, left=left, right=right) if type(op) in _COMPUTED:
            if not any(
                isinstance(x, ast.Constant) and isinstance(x.value, str) for x in (left, right)
            ):
                yield "arithmetic", ast.BinOp(left, _COMPUTED[type(op)](), right)
        case ast.Call(func=ast.Name(id=name)) if name in _CALLED:
            changed = copy.deepcopy(node)
            changed.func = ast.Name(_CALLED[name])
            yield "any/all, min/max", changed
        case ast.Call(func=ast.Name(id="isinstance" | "hasattr" | "getattr")):
            return
        case ast.Call(args=[first, second]) if not isinstance(first, ast.Starred | ast.Constant):
            if not isinstance(second, ast.Starred | ast.Constant):
                changed = copy.deepcopy(node)
                changed.args.reverse()
                yield "swap arguments", changed
        case ast.Constant(value=bool() as value):
            yield "constant", ast.Constant(not value)
        case ast.Constant(value=int() as value):
            yield "constant", ast.Constant(value + 1)
        case ast.IfExp(test=test, body=body, orelse=orelse):
            yield "swap branches", ast.IfExp(test, orelse, body)


def _short(node: ast.AST) -> str:
    text = ast.unparse(node)
    return text if len(text) <= 60 else f"{text[:57]}..."
