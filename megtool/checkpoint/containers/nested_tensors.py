"""Tensors nested in a pickle, each with its storage as a separate stream, read without torch.

`pickle.dumps` of a tensor calls `torch.storage._load_from_bytes` on what `torch.save` wrote before
release 1.6: five pickles (a number, a version, the machine, the storage, its key), the number of
elements, and their bytes.
"""

from __future__ import annotations

import io
import math
import pickletools
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megtool.checkpoint.containers import pickle_reader
from megtool.checkpoint.containers.pickle_reader import Inert, PersistentRef, inert_global
from megtool.checkpoint.containers.pickle_writer import encode
from megtool.dtypes import DType, from_storage
from megtool.errors import FormatError

REBUILD = "torch._utils._rebuild_tensor_v2"
LOAD = "torch.storage._load_from_bytes"

_HEAD = (
    b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.\x80\x02}q\x00("
    b"X\x10\x00\x00\x00protocol_versionq\x01M\xe9\x03X\r\x00\x00\x00little_endianq\x02\x88"
    b"X\n\x00\x00\x00type_sizesq\x03}q\x04(X\x05\x00\x00\x00shortq\x05K\x02"
    b"X\x03\x00\x00\x00intq\x06K\x04X\x04\x00\x00\x00longq\x07K\x04uu."
)
_MAGIC = _HEAD[:15]
_TORCH_PICKLES = re.compile(
    rb"\x80\x02\(X\x07\0\0\0storageq\0ctorch\n(\w+Storage)\nq\x01X[\x01-\x14]\0\0\0\d+q\x02"
    rb"X.\0\0\0(?:cpu|cuda:\d+)q\x03(?:K.|M..|J....)Ntq\x04Q(?:q\x05)?\."
    rb"\x80\x02\]q\0\(?X[\x01-\x14]\0\0\0\d+q\x01[ae]\.",
    re.DOTALL,
)
"""The last two pickles as torch writes them; other forms are decoded, ten times slower."""
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
        flat = _read_storage(pickle_reader.as_bytes(storage.args[0]) or b"", file)
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
    storage = PersistentRef(("storage", _float_storage(), _KEY, "cpu", array.size, None))
    stream = b"".join(
        (
            _HEAD,
            encode(storage, replace=_persistent_id),
            encode([_KEY]),
            struct.pack("<q", array.size),
            data,
        )
    )
    load = inert_global("torch.storage", "_load_from_bytes")(stream)
    return _make_rebuild(load, array.shape)


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


def _read_storage(data: bytes, file: str | Path) -> NDArray[Any]:
    """The elements of a storage in a separate stream."""
    if not data.startswith(_MAGIC):
        raise FormatError("a tensor in an extra state has a storage in an unknown form", file=file)
    if data.startswith(_HEAD) and (match := _TORCH_PICKLES.match(data, len(_HEAD))):
        return _read_elements(data, match.end(), _parse_dtype(match[1].decode(), file), file)
    stream = io.BytesIO(data)
    parts: list[bytes] = []
    try:
        while len(parts) < 5:
            begin = stream.tell()
            for _ in pickletools.genops(stream):
                pass
            parts.append(data[begin : stream.tell()])
    except (ValueError, LookupError) as e:
        raise FormatError(f"a storage in an extra state is damaged: {e}", file=file) from e
    node = pickle_reader.decode(parts[-2], file=file)
    pid = node.id if isinstance(node, PersistentRef) else None
    if not (isinstance(pid, tuple) and len(pid) > 4 and pickle_reader.is_global(pid[1])):
        raise FormatError("a storage in an extra state is in an unknown form", file=file)
    return _read_elements(data, stream.tell(), _parse_dtype(pid[1].qualname, file), file)


def _read_elements(data: bytes, offset: int, kind: DType, file: str | Path) -> NDArray[Any]:
    """The elements of a stream whose pickles end at `offset`: a count, then their bytes."""
    offset += 8
    count = int.from_bytes(data[offset - 8 : offset], "little")
    if len(data) != offset + count * kind.itemsize:
        raise FormatError(
            f"a storage in an extra state claims {count} elements in {max(len(data) - offset, 0)} "
            "bytes",
            file=file,
        )
    return _to_numpy(data[offset:], kind, file)


def _parse_dtype(name: str, file: str | Path) -> DType:
    kind = from_storage(name)
    if not kind.is_float:
        raise FormatError(f"a tensor in an extra state is of {kind.name}", file=file)
    return kind


def _to_numpy(data: bytes, kind: DType, file: str | Path) -> NDArray[Any]:
    if len(data) % kind.itemsize:
        raise FormatError("a storage in an extra state is truncated", file=file)
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
