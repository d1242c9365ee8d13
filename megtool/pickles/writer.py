"""Writes trees of plain values and inert nodes as pickles, without importing what they name.

Protocol 2 by default, like torch.save, so that `torch.load(weights_only=True)` reads it. Only
globals of the allow-list (`allow_list`) are written, each in the form that checkpoints use.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megtool.errors import FormatError, listed
from megtool.pickles.allow_list import is_allowed
from megtool.pickles.reader import (
    Inert,
    PersistentRef,
    inert_global,
    is_global,
)
from megtool.pickles.rules import find_problems

DROP_OBJECTS_HINT = "--drop-objects leaves out what names them; nothing was executed"

_BATCH = 1000


def encode(tree: Any, *, replace: Callable[[Any], Any] | None = None, protocol: int = 2) -> bytes:
    """The pickle of a tree of dicts, lists, tuples, sets, scalars, bytes and inert nodes.

    Objects that occur twice are written once. `replace` returns the id to write for each reference,
    and the replacement of a value of any other type. Protocol 3 writes bytes as bytes, protocol 2
    as encoded text.

    Raises:
        FormatError: the tree, or a pickle in its bytes, names a global that no checkpoint needs.
        TypeError: a value of any other type.
        ValueError: a tuple that contains itself, or a tree too deep to write.
    """
    if problems := find_problems(tree):
        raise refuse_globals(problems)
    writer = _Writer(replace or _replace_none, protocol)
    try:
        writer.write(tree)
    except RecursionError as e:
        raise ValueError("the tree is too deep to pickle") from e
    return b"\x80" + bytes((protocol,)) + b"".join(writer.out) + b"."


def refuse_globals(problems: Sequence[str], *, file: str | Path | None = None) -> FormatError:
    """The error for a tree that must not be written; `problems` are those of `find_problems`."""
    return FormatError(
        f"not written, because loading it could run code: it names {listed(problems)}",
        file=file,
        hint=DROP_OBJECTS_HINT,
        error_id="hostile-pickle",
    )


def make_namespace(values: dict[str, Any]) -> Inert:
    """An `argparse.Namespace` with the given attributes, as Megatron saves its args."""
    node = inert_global("argparse", "Namespace").__new__(inert_global("argparse", "Namespace"))
    node.__setstate__(values)
    return node


def encode_int(value: int) -> bytes:
    """The opcode of one integer."""
    if 0 <= value < 256:
        return b"K" + bytes((value,))
    if 0 <= value < 65536:
        return b"M" + value.to_bytes(2, "little")
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + value.to_bytes(4, "little", signed=True)
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    if len(raw) < 256:
        return b"\x8a" + bytes((len(raw),)) + raw
    return b"\x8b" + len(raw).to_bytes(4, "little") + raw


def encode_text(value: str) -> bytes:
    """The opcode of one string."""
    raw = value.encode("utf-8", "surrogatepass")
    return b"X" + len(raw).to_bytes(4, "little") + raw


def _replace_none(node: Any) -> Any:
    if isinstance(node, PersistentRef):
        return node.id
    raise TypeError(f"cannot pickle a {type(node).__name__}: {node!r:.60}")


class _Writer:
    def __init__(self, replace: Callable[[Any], Any], protocol: int) -> None:
        self._replace = replace
        self._has_bytes = protocol >= 3
        self.out: list[bytes] = []
        self._memo: dict[Any, int] = {}
        self._alive: list[Any] = []
        self._open: set[int] = set()

    def write(self, node: Any) -> None:
        out = self.out
        if node is None:
            out.append(b"N")
        elif node is True or node is False:
            out.append(b"\x88" if node else b"\x89")
        elif type(node) is int:
            out.append(encode_int(node))
        elif type(node) is float:
            out.append(b"G" + struct.pack(">d", node))
        elif type(node) is str:
            if not self._recall(node):
                out.append(encode_text(node))
                self._remember(node)
        elif self._recall(key := id(node)):
            pass
        elif type(node) is dict:
            out.append(b"}")
            self._remember(key, node)
            self._pairs(list(node.items()))
        elif type(node) is list:
            out.append(b"]")
            self._remember(key, node)
            self._items(node)
        elif type(node) is tuple:
            self._tuple(node)
        elif is_global(node):
            self._global(node.module, node.qualname)
        elif isinstance(node, Inert):
            self._inert(node)
        elif isinstance(node, PersistentRef):
            self.write(self._replace(node))
            out.append(b"Q")
            self._remember(key, node)
        elif self._has_bytes and isinstance(node, bytes | bytearray):
            out.append(b"B" + len(node).to_bytes(4, "little") + bytes(node))
            self._remember(key, node)
        elif isinstance(node, bytes | bytearray):
            self._global("_codecs", "encode")
            self.write((bytes(node).decode("latin1"), "latin1"))
            out.append(b"R")
            self._remember(key, node)
        elif isinstance(node, set | frozenset):
            self._global("builtins", "frozenset" if isinstance(node, frozenset) else "set")
            self.write((list(node),))
            out.append(b"R")
            self._remember(key, node)
        else:
            replacement = self._replace(node)
            self.write(replacement)
            self._alive += (node, replacement)
            if id(replacement) in self._memo:
                self._memo[key] = self._memo[id(replacement)]

    def _recall(self, key: Any) -> bool:
        index = self._memo.get(key)
        if index is None:
            return False
        self.out.append(
            b"h" + bytes((index,)) if index < 256 else b"j" + index.to_bytes(4, "little")
        )
        return True

    def _remember(self, key: Any, node: Any = None) -> None:
        index = len(self._memo)
        self._memo[key] = index
        self._alive.append(node)
        self.out.append(
            b"q" + bytes((index,)) if index < 256 else b"r" + index.to_bytes(4, "little")
        )

    def _global(self, module: str, qualname: str) -> None:
        key = ("global", module, qualname)
        if self._recall(key):
            return
        if not is_allowed(module, qualname):
            raise refuse_globals([f"{module}.{qualname}"])
        self.out.append(f"c{module}\n{qualname}\n".encode())
        self._remember(key)

    def _tuple(self, node: tuple[Any, ...]) -> None:
        if not node:
            self.out.append(b")")
            return
        if id(node) in self._open:
            raise ValueError("a tuple contains itself")
        self._open.add(id(node))
        if len(node) > 3:
            self.out.append(b"(")
        for item in node:
            self.write(item)
        self._open.discard(id(node))
        self.out.append({1: b"\x85", 2: b"\x86", 3: b"\x87"}.get(len(node), b"t"))
        self._remember(id(node), node)

    def _inert(self, node: Inert) -> None:
        if id(node) in self._open:
            raise ValueError(f"{node.name} is an argument of itself")
        self._open.add(id(node))
        self._global(node.module, node.qualname)
        self._arguments(node.args)
        if node.kwargs:
            self.write(node.kwargs)
        self._open.discard(id(node))
        new = b"\x92" if node.kwargs else b"\x81"
        self.out.append(b"R" if node.built_by == "reduce" else new)
        self._remember(id(node), node)
        self._items(node.items)
        self._pairs(node.pairs)
        if node.has_state:
            self.write(node.state)
            self.out.append(b"b")

    def _arguments(self, args: tuple[Any, ...]) -> None:
        """Write arguments like a tuple, or refer to the same tuple written before."""
        if not args or not self._recall(id(args)):
            self._tuple(args)

    def _items(self, items: list[Any]) -> None:
        for start in range(0, len(items), _BATCH):
            self.out.append(b"(")
            for item in items[start : start + _BATCH]:
                self.write(item)
            self.out.append(b"e")

    def _pairs(self, pairs: list[tuple[Any, Any]]) -> None:
        for start in range(0, len(pairs), _BATCH):
            self.out.append(b"(")
            for key, value in pairs[start : start + _BATCH]:
                self.write(key)
                self.write(value)
            self.out.append(b"u")
