"""The zip container torch.save writes, laid out ahead of its data and without torch.

Tensor data of 64 KiB and more starts at a multiple of 4096 bytes of the file, so that file systems
that share blocks can share it; smaller data at a multiple of 64, as torch itself does.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from megtool.checkpoint import pickled
from megtool.checkpoint.pickle_writer import encode, integer, text
from megtool.dtypes import DType
from megtool.tensors.box import strides

LARGE_BYTES = 64 << 10
LARGE_ALIGNMENT = 4096
SMALL_ALIGNMENT = 64

_ROOT = "archive/"
_UTF8 = 0x0800
_WIDE = 0xFFFFFFFF


class TensorItem(NamedTuple):
    """A container around one tensor: bytes before and after its data, which starts at `offset`.

    `offset` and `length` count from the start of the container.
    """

    prefix: bytes
    offset: int
    suffix: bytes
    length: int


def tensor_item(kind: DType, shape: Sequence[int], *, at: int = 0) -> TensorItem:
    """Lay out a container that starts at byte `at` of its file and holds one row-major tensor.

    Checksums of the data are left zero: torch does not verify them, and they are not known yet.
    """
    num_bytes = kind.itemsize
    for n in shape:
        num_bytes *= n
    alignment = LARGE_ALIGNMENT if num_bytes >= LARGE_BYTES else SMALL_ALIGNMENT
    return _tensor_item(kind, tuple(shape), at % alignment, alignment, num_bytes)


@lru_cache(maxsize=4096)
def _tensor_item(
    kind: DType, shape: tuple[int, ...], phase: int, alignment: int, num_bytes: int
) -> TensorItem:
    pickle = tensor_pickle(kind, shape)
    small = {"data.pkl": pickle, "byteorder": b"little", "version": b"3\n"}
    parts: list[bytes] = []
    entries: list[bytes] = []
    at = 0
    for name, data in small.items():
        header = _local(name, zlib.crc32(data), len(data), b"")
        entries.append(_central(name, zlib.crc32(data), len(data), at))
        parts += [header, data]
        at += len(header) + len(data)
    bare = len(_local("data/0", 0, num_bytes, b""))
    padding = _padding(phase + at + bare, alignment)
    header = _local("data/0", 0, num_bytes, padding)
    entries.append(_central("data/0", 0, num_bytes, at))
    offset = at + len(header)
    suffix = _directory(entries, offset + num_bytes)
    return TensorItem(
        b"".join([*parts, header]), offset, suffix, offset + num_bytes + len(suffix)
    )


def tensor_pickle(kind: DType, shape: Sequence[int]) -> bytes:
    """The pickle torch.save writes for one row-major tensor in storage `0`."""
    size = tuple(shape)
    numel = 1
    for n in size:
        numel *= n
    zero_or_row_major = strides([max(n, 1) for n in size])
    tail = b"\x89ccollections\nOrderedDict\n)R"
    if kind.storage:
        what, storage, count = "_rebuild_tensor_v2", f"torch\n{kind.storage}", numel
    else:
        what, storage = "_rebuild_tensor_v3", "torch.storage\nUntypedStorage"
        count = numel * kind.itemsize
        tail += f"ctorch\n{kind.name}\n".encode()
    return b"".join(
        (
            b"\x80\x02ctorch._utils\n",
            what.encode(),
            b"\n((",
            text("storage"),
            f"c{storage}\n".encode(),
            text("0"),
            text("cpu"),
            integer(count),
            b"tQ",
            integer(0),
            _numbers(size),
            _numbers(zero_or_row_major),
            tail,
            b"tR.",
        )
    )


def _numbers(values: tuple[int, ...]) -> bytes:
    if not values:
        return b")"
    return b"(" + b"".join(integer(v) for v in values) + b"t"


def object_item(tree: Any) -> bytes:
    """A whole container that holds a tree of plain values and inert nodes.

    Storages that the tree refers to must have their bytes attached, as `zipped.load_object` does.

    Raises:
        ValueError: a reference without bytes.
    """
    members: dict[str, bytes] = {"data.pkl": encode(tree), "byteorder": b"little"}
    for node in pickled.references(tree):
        if node.data is None:
            raise ValueError(f"{node!r} has no bytes attached")
        members[f"data/{node.id[2]}"] = node.data
    return archive(members | {"version": b"3\n"})


def archive(members: Mapping[str, bytes]) -> bytes:
    """A whole container of the given members, with checksums."""
    parts: list[bytes] = []
    entries: list[bytes] = []
    at = 0
    for name, data in members.items():
        crc = zlib.crc32(data)
        bare = len(_local(name, crc, len(data), b""))
        extra = _padding(at + bare, SMALL_ALIGNMENT) if name.startswith("data/") else b""
        header = _local(name, crc, len(data), extra)
        entries.append(_central(name, crc, len(data), at))
        parts += [header, data]
        at += len(header) + len(data)
    return b"".join([*parts, _directory(entries, at)])


def _padding(at: int, alignment: int) -> bytes:
    """An extra field that moves what follows from `at` to a multiple of `alignment`.

    Its tag is the one torch uses; a field is at least four bytes long.
    """
    short = -at % alignment
    if not short:
        return b""
    if short < 4:
        short += alignment
    return b"FB" + (short - 4).to_bytes(2, "little") + bytes(short - 4)


def _local(name: str, crc: int, size: int, extra: bytes) -> bytes:
    raw = (_ROOT + name).encode()
    wide = struct.pack("<HHQQ", 1, 16, size, size) if size >= _WIDE else b""
    short = min(size, _WIDE)
    extra = wide + extra
    head = struct.pack(
        "<4s5H3I2H", b"PK\3\4", 45 if wide else 20, _UTF8, 0, 0, 0, crc, short, short,
        len(raw), len(extra),
    )  # fmt: skip
    return head + raw + extra


def _central(name: str, crc: int, size: int, header: int) -> bytes:
    raw = (_ROOT + name).encode()
    values = [size, size] if size >= _WIDE else []
    values += [header] if header >= _WIDE else []
    wide = struct.pack(f"<HH{len(values)}Q", 1, 8 * len(values), *values) if values else b""
    short = min(size, _WIDE)
    version = 45 if wide else 20
    head = struct.pack(
        "<4s6H3I5H2I", b"PK\1\2", version, version, _UTF8, 0, 0, 0, crc, short, short, len(raw),
        len(wide), 0, 0, 0, 0, min(header, _WIDE),
    )  # fmt: skip
    return head + raw + wide


def _directory(entries: list[bytes], at: int) -> bytes:
    """The central directory at offset `at`, and the end records, zip64 first as torch has them."""
    body = b"".join(entries)
    count, size = len(entries), len(body)
    end64 = struct.pack(
        "<4sQ2H2I4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, size, at
    )
    locator = struct.pack("<4sIQI", b"PK\6\7", 0, at + size, 1)
    few = min(count, 0xFFFF)
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, few, few, min(size, _WIDE), min(at, _WIDE), 0)
    return body + end64 + locator + end
