"""Rewrite trees before they are written: payloads encoded again, or problems left out.

A tree is rebuilt only where something changes; all other parts are shared with the source.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from megtool.errors import FormatError
from megtool.pickles.allow_list import ALLOWED_GLOBALS, GlobalForm
from megtool.pickles.nested_tensors import make_storage_stream
from megtool.pickles.payload import read_payload
from megtool.pickles.reader import (
    Inert,
    PersistentRef,
    as_bytes,
    dict_items,
    rebuild_dict,
)
from megtool.pickles.rules import find_problems, own_problems, tensor_bytes
from megtool.pickles.storage_stream import parse_storage_stream
from megtool.pickles.writer import encode, refuse_globals

EncodeZip = Callable[[Any], bytes]

_BYTE_STORAGES = ("ByteStorage", "CharStorage", "UntypedStorage")
_SMALL_BYTES = 64 << 10
_ATTRIBUTES = ("argparse.Namespace", "types.SimpleNamespace")


class _Foreign:
    """Stands for a node that must be left out."""


_FOREIGN = _Foreign()


class _Rewriter:
    """Rebuilds a tree from the replacements of its nodes; nodes that change nothing are shared."""

    def __init__(
        self, replace: Callable[[Any], Any], drop: Callable[[str, Any], None] | None
    ) -> None:
        self._replace, self._drop = replace, drop
        self._results: dict[int, Any] = {}
        self._alive: list[Any] = []

    def rewrite(self, node: Any, path: str = "") -> Any:
        """The node rewritten; `_FOREIGN` if it has to be left out of what contains it."""
        if node is None or isinstance(node, str | int | float):
            return node
        key = id(node)
        if key in self._results:
            return self._results[key]
        self._alive.append(node)
        self._results[key] = node  # a node inside itself stays as it is
        out = self._replace(node)
        if out is node:
            out = self._descend(node, path)
        self._results[key] = out
        return out

    def _descend(self, node: Any, path: str) -> Any:
        if isinstance(node, dict):
            pairs = self._pairs(list(node.items()), path)
            return node if pairs is None else dict(pairs)
        if isinstance(node, list | tuple | set | frozenset):
            items = [self.rewrite(x, f"{path}[{i}]") for i, x in enumerate(node)]
            return _FOREIGN if _FOREIGN in items else self._same(node, items)
        if isinstance(node, Inert):
            return self._inert(node, path)
        return node

    @staticmethod
    def _same(node: Any, items: list[Any]) -> Any:
        """The node itself where its items are the same, else a container of its class."""
        if all(a is b for a, b in zip(node, items, strict=True)):
            return node
        return type(node)(items)

    def _pairs(self, pairs: list[tuple[Any, Any]], path: str) -> list[tuple[Any, Any]] | None:
        """Rewritten entries without those to be left out; None if nothing changes."""
        out, changed = [], False
        for key, value in pairs:
            inner = f"{path}.{key}" if isinstance(key, str | int) else f"{path}.(key)"
            new_key, new_value = self.rewrite(key, inner), self.rewrite(value, inner)
            if new_key is _FOREIGN or new_value is _FOREIGN:
                if self._drop is not None:
                    self._drop(inner.removeprefix("."), (key, value))
                changed = True
                continue
            changed |= new_key is not key or new_value is not value
            out.append((new_key, new_value))
        return out if changed else None

    def _inert(self, node: Inert, path: str) -> Any:
        if node.name in _ATTRIBUTES and isinstance(node.state, dict):
            state = self.rewrite(node.state, path)
            return node if state is node.state else _copy(node, state=state)
        if (pairs := dict_items(node)) is not None and not node.has_state:
            new = self._pairs(pairs, path)
            return node if new is None else rebuild_dict(node, new)
        parts = [
            self.rewrite(list(part), path)
            for part in (node.args, node.items, [x for pair in node.pairs for x in pair])
        ]
        state = self.rewrite(node.state, path)
        kwargs = self.rewrite(node.kwargs, path)
        if _FOREIGN in parts or state is _FOREIGN or kwargs is not node.kwargs:
            return _FOREIGN
        args, items, flat = parts
        unchanged = (
            all(a is b for a, b in zip(node.args, args, strict=True))
            and all(a is b for a, b in zip(node.items, items, strict=True))
            and all(a is b for a, b in zip((x for p in node.pairs for x in p), flat, strict=True))
            and state is node.state
        )
        if unchanged:
            return node
        out = _copy(node, state=state, args=tuple(args))
        out.items, out.pairs = items, list(zip(flat[::2], flat[1::2], strict=True))
        return out


def _copy(node: Inert, *, state: Any, args: tuple[Any, ...] | None = None) -> Inert:
    """A node of the same class with another state."""
    kind = type(node)
    out = kind.__new__(kind, *(node.args if args is None else args), **node.kwargs)
    out.built_by, out.items, out.pairs = node.built_by, node.items, node.pairs
    if node.has_state:
        out.__setstate__(state)
    return out


def drop_problems(tree: Any) -> tuple[Any, dict[str, tuple[str, ...]]]:
    """The tree without what must not be written, and the problems of what is left out, by path.

    Entries of dicts and attributes of namespaces are left out one by one; of anything else, what
    contains the problem. A tree that is left out as a whole is None, with the path "".
    """
    dropped: dict[str, tuple[str, ...]] = {}
    if not find_problems(tree):
        return tree, dropped

    def drop(path: str, node: Any) -> None:
        dropped[path] = find_problems(node)

    rewriter = _Rewriter(lambda node: _FOREIGN if own_problems(node) else node, drop)
    try:
        out = rewriter.rewrite(tree)
    except RecursionError:
        out = _FOREIGN
    if out is _FOREIGN or find_problems(out):
        return None, {"": find_problems(tree)}
    return out, dropped


def encode_payloads(tree: Any, encode_zip: EncodeZip) -> Any:
    """The tree with its payloads decoded and encoded again; the tree itself if it has none.

    `encode_zip` writes a container of `torch.save`.

    Raises:
        FormatError: a payload is damaged or hostile.
        ValueError: the tree is too deep.
    """
    try:
        return _Rewriter(lambda node: _replace_payload(node, encode_zip), None).rewrite(tree)
    except FormatError as e:
        raise refuse_globals([e.message]) from e
    except RecursionError as e:
        raise ValueError("the tree is too deep to pickle") from e


def _replace_payload(node: Any, encode_zip: EncodeZip) -> Any:
    if isinstance(node, bytes | bytearray):
        data = encode_payload(bytes(node), encode_zip)
        return node if data == node else type(node)(data)
    if not isinstance(node, Inert):
        return node
    form = ALLOWED_GLOBALS.get((node.module, node.qualname))
    if form not in (GlobalForm.STORAGE_STREAM, GlobalForm.TENSOR, GlobalForm.BYTES):
        return node
    if own_problems(node):
        return node  # the writer refuses it
    if form is GlobalForm.STORAGE_STREAM:
        stream = parse_storage_stream(as_bytes(node.args[0]) or b"", file="")
        return make_storage_stream(stream.storage, stream.data)
    if form is GlobalForm.TENSOR:
        return _replace_byte_tensor(node, encode_zip)
    text = as_bytes(node)
    return node if text is None else encode_payload(text, encode_zip)


def _replace_byte_tensor(node: Inert, encode_zip: EncodeZip) -> Inert:
    """A tensor of bytes that are a payload, over a storage of its own; others unchanged."""
    storage = node.args[0]
    data = tensor_bytes(node)
    if not data or (recoded := encode_payload(data, encode_zip)) == data:
        return node
    if not isinstance(storage, PersistentRef):
        raise FormatError("a tensor in an old form has bytes that are a pickle")
    if storage.id[1].qualname not in _BYTE_STORAGES:
        raise FormatError(f"a pickle in a {storage.id[1].qualname}")
    key = hashlib.sha256(recoded).hexdigest()[:16]
    reference = PersistentRef((*storage.id[:2], key, storage.id[3], len(recoded)))
    reference.data = recoded
    return type(node)(reference, 0, (len(recoded),), (1,), *node.args[4:])


def encode_payload(data: bytes, encode_zip: EncodeZip) -> bytes:
    """A payload decoded and encoded again; bytes that are no payload as they are.

    Raises:
        FormatError: it is damaged, or hostile.
    """
    recode = _encode_payload if len(data) <= _SMALL_BYTES else _encode_payload.__wrapped__
    return recode(data, encode_zip)


@lru_cache(maxsize=1024)
def _encode_payload(data: bytes, encode_zip: EncodeZip) -> bytes:
    payload = read_payload(data)
    if payload is None:
        return data
    if payload.kind == "zip":
        return encode_zip(payload.tree)
    return encode(encode_payloads(payload.tree, encode_zip), protocol=3)
