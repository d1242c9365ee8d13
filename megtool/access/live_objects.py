"""Values of a checkpoint's objects as a program has them, built from inert data without a pickle.

Numbers, texts, containers, namespaces, tensors, arrays, torch's dtypes and members of Megatron's
enumerations become what they were; whatever else an object holds is left out and named.
"""

from __future__ import annotations

import argparse
import collections
import enum
import importlib
import io
from typing import Any

import numpy as np
import torch

from megtool.pickles.reader import (
    Inert,
    PersistentRef,
    as_bytes,
    dict_items,
    is_global,
)

_NAMESPACES = frozenset({"argparse.Namespace", "types.SimpleNamespace"})
_TENSORS = frozenset({"torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor"})
_STORAGES = {
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "ByteStorage": torch.uint8,
    "CharStorage": torch.int8,
    "ShortStorage": torch.int16,
    "IntStorage": torch.int32,
    "LongStorage": torch.int64,
    "BoolStorage": torch.bool,
}


class _Absent:
    """The place of a value that cannot be built."""


_ABSENT = _Absent()


def live_value(tree: Any, name: str, left_out: list[str]) -> Any:
    """Inert data as live values; None, and names added to `left_out`, where something cannot be.

    Entries of dictionaries and namespaces that cannot be built are absent.
    """
    value = _build(tree, name, left_out)
    return None if value is _ABSENT else value


def _build(node: Any, name: str, left_out: list[str]) -> Any:
    if node is None or isinstance(node, str | bytes | int | float | complex):
        return node
    if is_global(node):
        kind = getattr(torch, node.qualname, None) if node.module == "torch" else None
        return kind if isinstance(kind, torch.dtype) else _leave_out(name, left_out)
    if isinstance(node, torch.Tensor | np.ndarray | np.generic | argparse.Namespace):
        return node
    if type(node) in (list, tuple, set, frozenset):
        items = [_build(x, f"{name}[{n}]", left_out) for n, x in enumerate(node)]
        if any(x is _ABSENT for x in items):
            return _ABSENT
        return type(node)(items)
    pairs = dict_items(node)
    if pairs is not None:
        return _entries(pairs, name, left_out)
    if isinstance(node, Inert):
        value = _build_inert(node, name, left_out)
        return _leave_out(name, left_out) if value is _ABSENT else value
    return _leave_out(name, left_out)


def _entries(pairs: Any, name: str, left_out: list[str]) -> dict[Any, Any]:
    built = {k: _build(v, f"{name}.{k}", left_out) for k, v in pairs}
    return {k: v for k, v in built.items() if v is not _ABSENT}


def _leave_out(name: str, left_out: list[str]) -> Any:
    left_out.append(name)
    return _ABSENT


def _build_inert(node: Inert, name: str, left_out: list[str]) -> Any:
    if node.name in _NAMESPACES:
        state = node.state if isinstance(node.state, dict) else {}
        return argparse.Namespace(**_entries(state.items(), name, left_out))
    if node.name in _TENSORS:
        return _tensor(node)
    if node.name == "_io.BytesIO":
        content = node.state if isinstance(node.state, tuple) else node.args
        data = as_bytes(content[0]) if content else b""
        return _ABSENT if data is None else io.BytesIO(data)
    if node.name == "torch.Size" and len(node.args) == 1:
        return torch.Size(node.args[0])
    if node.name == "collections.deque":
        return collections.deque(node.items)
    if node.module.startswith("numpy") and node.qualname == "_reconstruct":
        return _array(node)
    if node.module.startswith("megatron.core.") and len(node.args) == 1:
        return _member(node)
    data = as_bytes(node)
    return _ABSENT if data is None else data


def _tensor(node: Inert) -> Any:
    if len(node.args) < 4 or not isinstance(node.args[0], PersistentRef):
        return _ABSENT
    reference, offset, size, stride = node.args[:4]
    kind = _STORAGES.get(getattr(reference.id[1], "qualname", ""))
    if kind is None or reference.data is None:
        return _ABSENT
    if not reference.data:
        return torch.empty(tuple(size), dtype=kind)
    storage = torch.frombuffer(bytearray(reference.data), dtype=kind)
    return torch.as_strided(storage, tuple(size), tuple(stride), offset).clone()


def _array(node: Inert) -> Any:
    state = node.state
    if not isinstance(state, tuple) or len(state) != 5:
        return _ABSENT
    _, shape, described, is_fortran, data = state
    words = getattr(described, "args", ())
    content = as_bytes(data)
    if content is None or not words or not isinstance(words[0], str) or words[0][:1] == "O":
        return _ABSENT
    order = getattr(described, "state", None)
    mark = order[1] if isinstance(order, tuple) and len(order) > 1 else "="
    kind = np.dtype(f">{words[0]}" if mark == ">" else words[0])
    return np.frombuffer(content, kind).reshape(shape, order="F" if is_fortran else "C").copy()


def _member(node: Inert) -> Any:
    """A member of an enumeration of Megatron's."""
    try:
        kind = getattr(importlib.import_module(node.module), node.qualname, None)
    except ImportError:
        return _ABSENT
    if not (isinstance(kind, type) and issubclass(kind, enum.Enum)):
        return _ABSENT
    try:
        return kind(node.args[0])
    except ValueError:
        return _ABSENT
