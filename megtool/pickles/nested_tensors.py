"""Tensors nested in a pickle, with their storages, read and written without torch.

A storage is a stream of its own (see `storage_stream`), or a member of the container.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megtool.dtypes import DType, from_storage
from megtool.errors import FormatError
from megtool.pickles import reader as pickle_reader
from megtool.pickles.reader import Inert, PersistentRef, inert_global
from megtool.pickles.storage_stream import STREAM_HEAD, parse_storage_stream
from megtool.pickles.writer import encode

REBUILD = "torch._utils._rebuild_tensor_v2"
LOAD = "torch.storage._load_from_bytes"

_KEY = "0"


def read_array(node: Any, file: str | Path = "") -> NDArray[np.float32] | None:
    """The float32 array of an inert tensor; None for any other node.

    Its storage is a separate stream (`LOAD`), or a reference with its bytes attached.

    Raises:
        FormatError: damaged, not of floats, or larger than its storage.
    """
    if not (isinstance(node, Inert) and node.name == REBUILD and len(node.args) >= 4):
        return None
    storage, offset, shape, strides = node.args[:4]
    shape, strides = _parse_sizes(shape), _parse_sizes(strides)
    if isinstance(storage, PersistentRef):
        pid = storage.id
        fits = isinstance(pid, tuple) and len(pid) > 1 and pickle_reader.is_global(pid[1])
        if not fits or storage.data is None:
            raise FormatError("a tensor in an extra state has no storage", file=file)
        flat = _to_numpy(storage.data, _parse_dtype(pid[1].qualname, file), file)
    elif isinstance(storage, Inert) and storage.name == LOAD and storage.args:
        stream = parse_storage_stream(pickle_reader.as_bytes(storage.args[0]) or b"", file=file)
        flat = _to_numpy(stream.data, _parse_dtype(stream.storage, file), file)
    else:
        raise FormatError("a tensor in an extra state has no storage", file=file)
    if shape is None or strides is None or len(shape) != len(strides) or type(offset) is not int:
        raise FormatError("a tensor in an extra state has invalid sizes or strides", file=file)
    last = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + offset
    if offset < 0 or (0 not in shape and max(last + 1, math.prod(shape)) > flat.size):
        raise FormatError("a tensor in an extra state is larger than its storage", file=file)
    if 0 in shape:
        return np.zeros(shape, np.float32)
    item = flat.itemsize
    view = np.lib.stride_tricks.as_strided(flat[offset:], shape, [s * item for s in strides])
    return np.array(view, np.float32)


def make_nested_tensor(array: NDArray[np.float32]) -> Inert:
    """A float32 tensor as torch pickles it."""
    data = np.ascontiguousarray(array, "<f4").tobytes()
    return _make_rebuild(make_storage_stream("FloatStorage", data), array.shape)


def make_storage_stream(storage: str, data: bytes) -> Inert:
    """A storage of a class of `torch`, as torch pickles it."""
    count = len(data) // from_storage(storage).itemsize
    kind = inert_global("torch", storage)
    reference = PersistentRef(("storage", kind, _KEY, "cpu", count, None))
    stream = b"".join(
        (
            STREAM_HEAD,
            encode(reference, replace=_persistent_id),
            encode([_KEY]),
            struct.pack("<q", count),
            data,
        )
    )
    return inert_global("torch.storage", "_load_from_bytes")(stream)


def make_stored_tensor(array: NDArray[np.float32], key: str) -> Inert:
    """A float32 tensor in the storage `key` of a container."""
    storage = PersistentRef(("storage", _float_storage(), key, "cpu", array.size))
    storage.data = np.ascontiguousarray(array, "<f4").tobytes()
    return _make_rebuild(storage, array.shape)


def _make_rebuild(storage: Any, shape: tuple[int, ...]) -> Inert:
    steps, step = list[int](), 1
    for n in reversed(shape):
        steps.insert(0, step)
        step *= max(n, 1)
    hooks = inert_global("collections", "OrderedDict")()
    rebuild = inert_global("torch._utils", "_rebuild_tensor_v2")
    return rebuild(storage, 0, tuple(shape), tuple(steps), False, hooks)


def _float_storage() -> type[Inert]:
    return inert_global("torch", "FloatStorage")


def _persistent_id(node: Any) -> Any:
    return node.id


def _parse_dtype(name: str, file: str | Path) -> DType:
    kind = from_storage(name, file)
    if not kind.is_float:
        raise FormatError(f"a tensor in an extra state is of {kind.name}", file=file)
    return kind


def _to_numpy(data: bytes, kind: DType, file: str | Path) -> NDArray[Any]:
    if len(data) % kind.itemsize:
        raise FormatError(
            "a storage in an extra state is truncated", file=file, error_id="truncated-file"
        )
    flat = np.frombuffer(data, kind.view)
    if kind.name == "bfloat16":
        flat = (flat.astype("<u4") << 16).view("<f4")
    return flat


def _parse_sizes(values: Any) -> tuple[int, ...] | None:
    if isinstance(values, Inert) and values.name == "torch.Size" and values.args:
        values = values.args[0]
    if not isinstance(values, tuple | list) or len(values) > 4:
        return None
    return tuple(values) if all(type(v) is int and 0 <= v < 1 << 40 for v in values) else None
