"""The zip container of torch.save, planned before its data is written, without torch.

Tensor data of 64 KiB and more starts at a multiple of 4096 bytes of the file, so that file systems
that share blocks can share it; smaller data at a multiple of 64, as torch itself does.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from megtool.dtypes import DType
from megtool.pickles import reader as pickle_reader
from megtool.pickles.rewrite import encode_payloads
from megtool.pickles.writer import encode, encode_int, encode_text
from megtool.tensors.box import strides

LARGE_BYTES = 64 << 10
LARGE_ALIGNMENT = 4096
SMALL_ALIGNMENT = 64

_ROOT = "archive/"
_UTF8 = 0x0800
_WIDE = 0xFFFFFFFF


class TensorItem(NamedTuple):
    """A container around one tensor: bytes before and after its data, which starts at `offset`.

    `offset` and `length` count from the start of the container. The bytes between the end of
    `prefix` and `offset` are zeros, which need not be written to a new file.
    """

    prefix: bytes
    offset: int
    suffix: bytes
    length: int


class TensorFrame:
    """Containers around tensors of one dtype and shape; only their padding differs.

    `head_bytes` come before the padding, `num_bytes` of data after it, then `tail_bytes`.
    """

    __slots__ = (
        "_central",
        "_head",
        "_items",
        "alignment",
        "head_bytes",
        "num_bytes",
        "tail_bytes",
    )

    def __init__(self, kind: DType, shape: tuple[int, ...]) -> None:
        self.num_bytes = kind.itemsize
        for n in shape:
            self.num_bytes *= n
        self.alignment = LARGE_ALIGNMENT if self.num_bytes >= LARGE_BYTES else SMALL_ALIGNMENT
        parts: list[bytes] = []
        entries: list[bytes] = []
        offset = 0
        small = {
            "data.pkl": encode_tensor_pickle(kind, shape),
            "byteorder": b"little",
            "version": b"3\n",
        }
        for name, data in small.items():
            crc = zlib.crc32(data)
            entries.append(central_entry(name, crc, len(data), offset))
            parts += [local_header(name, crc, len(data), 0), data]
            offset += len(parts[-2]) + len(data)
        entries.append(central_entry("data/0", 0, self.num_bytes, offset))
        self._head, self._central = b"".join(parts), entries
        self.head_bytes = offset + len(local_header("data/0", 0, self.num_bytes, 0))
        self.tail_bytes = len(directory(entries, 0))
        self._items: dict[int, TensorItem] = {}

    def padding(self, offset: int) -> int:
        """Bytes of padding of a container that starts at byte `offset` of its file."""
        return alignment_padding(offset + self.head_bytes, self.alignment)

    def item(self, padding: int) -> TensorItem:
        """The container with this padding; the same object each time."""
        cached = self._items.get(padding)
        if cached is None:
            offset = self.head_bytes + padding
            end = offset + self.num_bytes
            cached = self._items[padding] = TensorItem(
                self._head + local_header("data/0", 0, self.num_bytes, padding),
                offset,
                directory(self._central, end),
                end + self.tail_bytes,
            )
        return cached


@lru_cache(maxsize=4096)
def tensor_frame(kind: DType, shape: tuple[int, ...]) -> TensorFrame:
    """The frame of one dtype and shape. Checksums of data are zero, because torch verifies none."""
    return TensorFrame(kind, shape)


def plan_tensor_item(kind: DType, shape: Sequence[int], *, offset: int = 0) -> TensorItem:
    """Plan a container with one row-major tensor, which starts at byte `offset` of its file."""
    frame = tensor_frame(kind, tuple(shape))
    return frame.item(frame.padding(offset))


def encode_tensor_pickle(kind: DType, shape: Sequence[int]) -> bytes:
    """The pickle torch.save writes for one row-major tensor in storage `0`."""
    size = tuple(shape)
    numel = 1
    for n in size:
        numel *= n
    zero_or_row_major = strides([max(n, 1) for n in size])
    tail = b"\x89ccollections\nOrderedDict\n)R"
    if kind.storage:
        function, storage, count = "_rebuild_tensor_v2", f"torch\n{kind.storage}", numel
    else:
        function, storage = "_rebuild_tensor_v3", "torch.storage\nUntypedStorage"
        count = numel * kind.itemsize
        tail += f"ctorch\n{kind.name}\n".encode()
    return b"".join(
        (
            b"\x80\x02ctorch._utils\n",
            function.encode(),
            b"\n((",
            encode_text("storage"),
            f"c{storage}\n".encode(),
            encode_text("0"),
            encode_text("cpu"),
            encode_int(count),
            b"tQ",
            encode_int(0),
            _encode_tuple(size),
            _encode_tuple(zero_or_row_major),
            tail,
            b"tR.",
        )
    )


def _encode_tuple(values: tuple[int, ...]) -> bytes:
    if not values:
        return b")"
    return b"(" + b"".join(encode_int(v) for v in values) + b"t"


def encode_object(tree: Any) -> bytes:
    """A whole container that holds a tree of plain values and inert nodes.

    Storages that the tree refers to must have their bytes attached, as `zip_reader.load_object`
    does. Pickles in its bytes are decoded and encoded again.

    Raises:
        FormatError: the tree names what no checkpoint needs.
        ValueError: a reference without bytes.
    """
    tree = encode_payloads(tree, encode_object)
    members: dict[str, bytes] = {"data.pkl": encode(tree), "byteorder": b"little"}
    for node in pickle_reader.find_references(tree):
        if node.data is None:
            raise ValueError(f"{node!r} has no bytes attached")
        members[f"data/{node.id[2]}"] = node.data
    return write_archive(members | {"version": b"3\n"})


def write_archive(members: Mapping[str, bytes]) -> bytes:
    """A whole container of the given members, with checksums."""
    parts: list[bytes] = []
    entries: list[bytes] = []
    offset = 0
    for name, data in members.items():
        crc = zlib.crc32(data)
        bare = len(local_header(name, crc, len(data), 0))
        padding = (
            alignment_padding(offset + bare, SMALL_ALIGNMENT) if name.startswith("data/") else 0
        )
        header = local_header(name, crc, len(data), padding)
        header += bytes(bare + padding - len(header))
        entries.append(central_entry(name, crc, len(data), offset))
        parts += [header, data]
        offset += len(header) + len(data)
    return b"".join([*parts, directory(entries, offset)])


def alignment_padding(offset: int, alignment: int) -> int:
    """Padding at `offset` up to a multiple of `alignment`: none, or at least four bytes."""
    short = -offset % alignment
    return short + alignment if 0 < short < 4 else short


def local_header(name: str, crc: int, size: int, padding: int) -> bytes:
    """A local header without the zeros of its padding, an extra field tagged as torch's."""
    raw = (_ROOT + name).encode()
    extra = struct.pack("<HHQQ", 1, 16, size, size) if size >= _WIDE else b""
    length = len(extra) + padding
    version = 45 if extra else 20
    if padding:
        extra += b"FB" + (padding - 4).to_bytes(2, "little")
    short = min(size, _WIDE)
    head = struct.pack(
        "<4s5H3I2H", b"PK\3\4", version, _UTF8, 0, 0, 0, crc, short, short, len(raw), length
    )
    return head + raw + extra


def central_entry(name: str, crc: int, size: int, header: int) -> bytes:
    """A member's entry in the directory; its local header starts at `header`."""
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


def directory(entries: list[bytes], offset: int) -> bytes:
    """The central directory at `offset`, and the end records, zip64 first as in torch."""
    body = b"".join(entries)
    count, size = len(entries), len(body)
    end64 = struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, size, offset)
    locator = struct.pack("<4sIQI", b"PK\6\7", 0, offset + size, 1)
    few = min(count, 0xFFFF)
    end = struct.pack(
        "<4s4H2IH", b"PK\5\6", 0, 0, few, few, min(size, _WIDE), min(offset, _WIDE), 0
    )
    return body + end64 + locator + end
