"""The `.metadata` of torch.distributed.checkpoint, written without torch and without its classes.

A pickle whose opcodes are put together directly: a million chunks take seconds and no objects.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from megtool.checkpoint.pickle_writer import integer, text
from megtool.tensors.box import Ints
from megtool.tensors.sharded import GlobalTensor, Shards

_METADATA = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"


class _Memo:
    """Opcodes of globals and strings: in full at first use, by memo index after it."""

    def __init__(self) -> None:
        self._index: dict[Any, bytes] = {}

    def name(self, value: str) -> bytes:
        return self._get(value, text(value))

    def class_(self, module: str, name: str) -> bytes:
        return self._get((module, name), f"c{module}\n{name}\n".encode())

    def value(self, key: str, code: bytes) -> bytes:
        return self._get(("value", key), code)

    def _get(self, key: Any, code: bytes) -> bytes:
        found = self._index.get(key)
        if found is not None:
            return found
        n = len(self._index)
        short = n < 256
        raw = bytes((n,)) if short else n.to_bytes(4, "little")
        self._index[key] = (b"h" if short else b"j") + raw
        return code + (b"q" if short else b"r") + raw


def write_metadata(
    tensors: Sequence[GlobalTensor],
    shards: Shards,
    paths: Sequence[str],
    file: Sequence[int],
    offset: Sequence[int],
    length: Sequence[int],
    objects: Mapping[str, tuple[int, int, int]],
    *,
    planner_data: bool,
) -> bytes:
    """The bytes of a `.metadata`.

    Item `i` holds shard `i` in `length[i]` bytes at `offset[i]` of `paths[file[i]]`; `objects`
    lie at `(file, offset, length)`. With `planner_data` every name is told to be a flat key, as
    plain checkpoints do.
    """
    memo = _Memo()
    out = [b"\x80\x02", memo.class_(_METADATA, "Metadata"), b")\x81}("]
    out += [memo.name("state_dict_metadata"), b"}"]
    _describe(tensors, shards, objects, memo, out)
    out.append(memo.name("planner_data"))
    if planner_data:
        out.append(b"}")
        for name in (*objects, *(t.name for t in tensors)):
            out += [memo.name(name), memo.name(name), b"\x85s"]
    else:
        out.append(b"N")
    out += [memo.name("storage_data"), b"}"]
    _store(tensors, shards, paths, file, offset, length, objects, memo, out)
    out += [memo.name("storage_meta"), memo.class_(_METADATA, "StorageMeta"), b")\x81}("]
    for key in ("checkpoint_id", "save_id", "load_id"):
        out += [memo.name(key), b"N"]
    out += [memo.name("modules"), b"]ub"]
    out += [memo.name("version"), text("1.0.0"), b"ub."]
    return b"".join(out)


def _describe(
    tensors: Sequence[GlobalTensor],
    shards: Shards,
    objects: Mapping[str, Any],
    memo: _Memo,
    out: list[bytes],
) -> None:
    for name in objects:
        out += [memo.name(name), memo.class_(_METADATA, "BytesStorageMetadata"), b")\x81s"]
    size = memo.class_("torch", "Size")
    for i, t in enumerate(tensors):
        out += [memo.name(t.name), memo.class_(_METADATA, "TensorStorageMetadata"), b")\x81}("]
        out += [memo.name("properties"), memo.class_(_METADATA, "TensorProperties"), b")\x81("]
        out += [memo.class_("torch", t.dtype.name), _layout(memo), b"\x89", _format(memo)]
        out += [b"\x89tb", memo.name("size"), size]
        size = memo.class_("torch", "Size")
        out += [_numbers(t.shape), b"\x85R", memo.name("chunks"), b"]("]
        rows = shards.of(i)
        ndim = len(t.shape)
        lo = shards.boxes.lo[rows, :ndim]
        sizes = shards.boxes.hi[rows, :ndim] - lo
        chunk = memo.class_(_METADATA, "ChunkStorageMetadata")
        for a, b in zip(_tuples(lo), _tuples(sizes), strict=True):
            out += [chunk, b")\x81}(", memo.name("offsets"), size, _numbers(a), b"\x85R"]
            out += [memo.name("sizes"), size, _numbers(b), b"\x85Rub"]
            chunk = memo.class_(_METADATA, "ChunkStorageMetadata")
        out.append(b"eubs")


def _store(
    tensors: Sequence[GlobalTensor],
    shards: Shards,
    paths: Sequence[str],
    file: Sequence[int],
    offset: Sequence[int],
    length: Sequence[int],
    objects: Mapping[str, tuple[int, int, int]],
    memo: _Memo,
    out: list[bytes],
) -> None:
    def index(fqn: str, at: bytes, number: bytes) -> list[bytes]:
        head = [memo.class_(_METADATA, "MetadataIndex"), b")\x81}(", memo.name("fqn")]
        head += [memo.name(fqn), at, memo.name("index"), number]
        return [*head, b"ub"]

    def info(path: str, at: int, size: int) -> list[bytes]:
        head = [memo.class_(_FILESYSTEM, "_StorageInfo"), b")\x81}(", memo.name("relative_path")]
        head += [memo.name(path), memo.name("offset"), integer(at), memo.name("length")]
        return [*head, integer(size), b"ubs"]

    for name, (number, at, size) in objects.items():
        out += index(name, b"", b"N")
        out += info(paths[number], at, size)
    torch_size = memo.class_("torch", "Size")
    for i, t in enumerate(tensors):
        rows = shards.of(i)
        for k, a in enumerate(_tuples(shards.boxes.lo[rows, : len(t.shape)])):
            row = rows.start + k
            where = memo.name("offset") + torch_size + _numbers(a) + b"\x85R"
            torch_size = memo.class_("torch", "Size")
            out += index(t.name, where, integer(k))
            out += info(paths[file[row]], offset[row], length[row])


def _tuples(rows: Ints) -> list[tuple[int, ...]]:
    return list(map(tuple, rows.tolist()))


@lru_cache(maxsize=1 << 14)
def _numbers(values: tuple[int, ...]) -> bytes:
    if not values:
        return b")"
    return b"(" + b"".join(map(integer, values)) + b"t"


def _layout(memo: _Memo) -> bytes:
    code = b"ctorch.serialization\n_get_layout\n" + text("torch.strided") + b"\x85R"
    return memo.value("layout", code)


def _format(memo: _Memo) -> bytes:
    code = f"c{_METADATA}\n_MEM_FORMAT_ENCODING\n".encode() + integer(0) + b"\x85R"
    return memo.value("memory_format", code)
