"""The `.metadata` of torch.distributed.checkpoint, written without torch and without its classes.

A pickle assembled from opcodes. All chunks of a tensor have records of one length that differ only
in numbers, so they are one byte array with the numbers filled in by column.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from megtool.pickles.allow_list import is_allowed
from megtool.pickles.writer import encode_int, encode_text, refuse_globals
from megtool.tensors.box import Ints
from megtool.tensors.sharded import GlobalTensor, Shards

_METADATA = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
_CLASSES = {
    "Metadata": _METADATA,
    "TensorStorageMetadata": _METADATA,
    "BytesStorageMetadata": _METADATA,
    "ChunkStorageMetadata": _METADATA,
    "TensorProperties": _METADATA,
    "MetadataIndex": _METADATA,
    "StorageMeta": _METADATA,
    "_MEM_FORMAT_ENCODING": _METADATA,
    "_StorageInfo": _FILESYSTEM,
    "Size": "torch",
    "_get_layout": "torch.serialization",
}
_KEYS = (
    "properties",
    "size",
    "chunks",
    "offsets",
    "sizes",
    "fqn",
    "index",
    "offset",
    "relative_path",
    "length",
    "torch.strided",
)

KeyPaths = Mapping[str, tuple[str | int, ...]]


def write_metadata(
    tensors: Sequence[GlobalTensor],
    shards: Shards,
    paths: Sequence[str],
    file: NDArray[np.int32],
    offset: Ints,
    length: Ints,
    objects: Mapping[str, tuple[int, int, int]],
    *,
    key_paths: KeyPaths | None,
) -> bytes:
    """The bytes of a `.metadata`.

    Item `i` holds shard `i` in `length[i]` bytes at `offset[i]` of `paths[file[i]]`; `objects`
    are at `(file, offset, length)`. `key_paths` give the position of each name in a nested state
    dict; other names are keys of the state dict itself. None omits them, as Megatron does.
    """
    return b"".join(_Writer(tensors, shards, paths, objects).write(file, offset, length, key_paths))


class _Writer:
    def __init__(
        self,
        tensors: Sequence[GlobalTensor],
        shards: Shards,
        paths: Sequence[str],
        objects: Mapping[str, tuple[int, int, int]],
    ) -> None:
        self._tensors, self._shards, self._objects = tensors, shards, objects
        self._paths = paths
        self._memo: dict[tuple[str, str], bytes] = {}
        self._out: list[bytes] = [b"\x80\x02"]
        for name, module in _CLASSES.items():
            self._keep(("class", name), f"c{module}\n{name}\n".encode())
        for kind in dict.fromkeys(t.dtype.name for t in tensors):
            if not is_allowed("torch", kind):
                raise refuse_globals([f"torch.{kind}"])
            self._keep(("dtype", kind), f"ctorch\n{kind}\n".encode())
        for key in _KEYS:
            self._keep(("key", key), encode_text(key))
        for path in paths:
            self._keep(("path", path), encode_text(path))

    def _keep(self, key: tuple[str, str], code: bytes) -> None:
        """Push a value, memoize it, and pop it: later uses are references."""
        n = len(self._memo)
        short = n < 256
        raw = bytes((n,)) if short else n.to_bytes(4, "little")
        self._memo[key] = (b"h" if short else b"j") + raw
        self._out += [code, b"q" if short else b"r", raw, b"0"]

    def _key(self, name: str) -> bytes:
        return self._memo["key", name]

    def _new(self, name: str) -> bytes:
        """Begin an object of a class with a dict as its state."""
        return self._memo["class", name] + b")\x81}("

    def write(
        self,
        file: NDArray[np.int32],
        offset: Ints,
        length: Ints,
        key_paths: KeyPaths | None,
    ) -> list[bytes]:
        out = self._out
        for name in (*self._objects, *(t.name for t in self._tensors)):
            self._keep(("name", name), encode_text(name))
        out += [self._new("Metadata"), encode_text("state_dict_metadata"), b"}"]
        self._describe()
        out.append(encode_text("planner_data"))
        if key_paths is None:
            out.append(b"N")
        else:
            out.append(b"}")
            for kind, name in [k for k in self._memo if k[0] == "name"]:
                parts = key_paths.get(name, (name,))
                codes = [encode_int(p) if isinstance(p, int) else encode_text(p) for p in parts]
                out += [self._memo[kind, name], b"(", *codes, b"ts"]
        out += [encode_text("storage_data"), b"}"]
        self._store(file, offset, length)
        out += [encode_text("storage_meta"), self._new("StorageMeta")]
        for key in ("checkpoint_id", "save_id", "load_id"):
            out += [encode_text(key), b"N"]
        out += [
            encode_text("modules"),
            b"]ub",
            encode_text("version"),
            encode_text("1.0.0"),
            b"ub.",
        ]
        return out

    def _describe(self) -> None:
        out = self._out
        for name in self._objects:
            out += [self._memo["name", name], self._memo["class", "BytesStorageMetadata"]]
            out.append(b")\x81s")
        layout = self._memo["class", "_get_layout"] + self._key("torch.strided") + b"\x85R"
        memory = self._memo["class", "_MEM_FORMAT_ENCODING"] + encode_int(0) + b"\x85R"
        size = self._memo["class", "Size"]
        for i, t in enumerate(self._tensors):
            out += [self._memo["name", t.name], self._new("TensorStorageMetadata")]
            out += [self._key("properties"), self._memo["class", "TensorProperties"], b")\x81("]
            out += [self._memo["dtype", t.dtype.name], layout, b"\x89", memory, b"\x89tb"]
            out += [self._key("size"), size, b"(", *map(encode_int, t.shape), b"t\x85R"]
            out += [self._key("chunks"), b"]("]
            rows = self._shards.of(i)
            lo = self._shards.boxes.lo[rows, : len(t.shape)]
            hi = self._shards.boxes.hi[rows, : len(t.shape)]
            record: list[bytes | Ints] = [self._new("ChunkStorageMetadata"), self._key("offsets")]
            record += [size, b"(", *lo.T, b"t\x85R", self._key("sizes")]
            record += [size, b"(", *(hi - lo).T, b"t\x85Rub"]
            out += [_records(record, len(lo)), b"eubs"]

    def _store(self, file: NDArray[np.int32], offset: Ints, length: Ints) -> None:
        out = self._out
        for name, (number, start, size) in self._objects.items():
            out += [self._new("MetadataIndex"), self._key("fqn"), self._memo["name", name]]
            out += [self._key("index"), b"Nub", self._new("_StorageInfo")]
            out += [self._key("relative_path"), self._memo["path", self._paths[number]]]
            out += [
                self._key("offset"),
                encode_int(start),
                self._key("length"),
                encode_int(size),
                b"ubs",
            ]
        codes = [self._memo["path", p] for p in self._paths]
        path = np.array([int.from_bytes(c[1:], "little") for c in codes], np.int64)
        for i, t in enumerate(self._tensors):
            rows = self._shards.of(i)
            lo = self._shards.boxes.lo[rows, : len(t.shape)]
            record: list[bytes | Ints] = [self._new("MetadataIndex"), self._key("fqn")]
            record += [self._memo["name", t.name], self._key("offset")]
            record += [self._memo["class", "Size"], b"(", *lo.T, b"t\x85R", self._key("index")]
            record += [np.arange(len(lo), dtype=np.int64), b"ub", self._new("_StorageInfo")]
            record += [self._key("relative_path"), b"j", _reference(path[file[rows]])]
            record += [self._key("offset"), offset[rows], self._key("length"), length[rows]]
            out.append(_records([*record, b"ubs"], len(lo)))


class _Reference(np.ndarray[tuple[int], np.dtype[np.int64]]):
    """A column of memo indices: four bytes each, after their opcode."""


def _reference(column: Ints) -> Ints:
    return column.view(_Reference)


_WIDTHS = ((1 << 8, b"K", 1), (1 << 16, b"M", 2), (1 << 31, b"J", 4), (1 << 63, b"\x8a\x08", 8))


def _records(parts: Sequence[bytes | Ints], count: int) -> bytes:
    """`count` consecutive records of constant bytes and one number of each column."""
    if not count:
        return b""
    template = bytearray()
    columns: list[tuple[int, int, Ints]] = []
    for part in parts:
        if isinstance(part, bytes):
            template += part
            continue
        width = 4
        if not isinstance(part, _Reference):
            largest = int(part.max())
            code, width = next((code, width) for limit, code, width in _WIDTHS if largest < limit)
            template += code
        columns.append((len(template), width, part))
        template += bytes(width)
    table = np.empty((count, len(template)), np.uint8)
    table[:] = np.frombuffer(template, np.uint8)
    for position, width, column in columns:
        raw = np.ascontiguousarray(column, dtype="<i8").view(np.uint8).reshape(count, 8)
        table[:, position : position + width] = raw[:, :width]
    return table.tobytes()
