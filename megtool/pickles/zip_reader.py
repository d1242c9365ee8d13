"""A strict reader of torch.save's zip containers: members and the offsets of their raw bytes.

A `.pt` file is one such container; each item of a `.distcp` file is one at an offset of a larger
file. All members are uncompressed, so tensor data can be copied in place.
"""

from __future__ import annotations

import os
import struct
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megtool.errors import FormatError
from megtool.pickles import reader as pickle_reader
from megtool.storage.files import Files
from megtool.storage.objects.open_objects import is_object

_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_LOCATOR = struct.Struct("<4sIQI")
_END64 = struct.Struct("<4sQ2H2I4Q")

_FILES = Files()
_TAIL_BYTES = 1024
_HEAD_BYTES = 1024
_MAX_MEMBERS = 1 << 22
_MAX_PICKLE_BYTES = 1 << 30
_ENCRYPTED, _DESCRIPTOR = 0x0001, 0x0008
_UNIX_SYMLINK = 0o120000


def header_ranges(offset: int, length: int) -> list[tuple[int, int]]:
    """What opening a container of `length` bytes at `offset` reads: its beginning and its end."""
    end = offset + length
    if length <= _HEAD_BYTES + _TAIL_BYTES:
        return [(offset, end)]
    return [(offset, offset + _HEAD_BYTES), (end - _TAIL_BYTES, end)]


@dataclass(frozen=True, slots=True)
class ZipMember:
    """One stored file of a container: where its local header starts, its size and its CRC-32, which
    is 0 if it was saved without."""

    name: str
    header: int
    size: int
    crc32: int = 0


class ZipArchive:
    """A container in `length` bytes of a file from `offset`; returned offsets are absolute.

    Opening reads the tail with the central directory and the first kilobyte: two small reads.

    Raises:
        FormatError: anything a torch.save file does not have: compression, encryption, links,
            duplicate names, members that overlap or exceed the region, inconsistent sizes, bytes
            after the end.
    """

    __slots__ = (
        "_directory",
        "_fd",
        "_head",
        "_headers",
        "file",
        "length",
        "members",
        "offset",
        "prefix",
    )

    def __init__(self, fd: int, offset: int, length: int, *, file: str | Path) -> None:
        self._fd, self.offset, self.length, self.file = fd, offset, length, file
        if length < _END.size:
            raise self._error(f"{length} bytes are too few for a zip container")
        tail_at = max(0, length - _TAIL_BYTES)
        tail = self._read(tail_at, length - tail_at)
        self._head = b"" if tail_at else tail
        self._directory, size, count = self._end(tail, tail_at)
        if self._directory >= tail_at:
            start = self._directory - tail_at
            directory = tail[start : start + size]
        else:
            directory = self._read(self._directory, size)
        self.members, self.prefix = self._list(directory, count)
        self._headers = sorted(m.header for m in self.members.values())
        if not self._head:
            self._head = self._read(0, min(length, _HEAD_BYTES))

    def prefetch(self) -> None:
        """Request the headers of all members of a container in a store, many at a time."""
        if not is_object(self._fd):
            return
        fixed = _LOCAL.size + len(self.prefix) + 1
        _FILES.prefetch_open(
            self._fd,
            [
                (self.offset + m.header, self.offset + m.header + fixed + len(m.name.encode()))
                for m in self.members.values()
                if m.header >= len(self._head)
            ],
        )

    def _error(self, message: str, error_id: str | None = None) -> FormatError:
        text = f"it is not a torch.save container: {message}"
        return FormatError(text, file=self.file, error_id=error_id)

    def _read(self, position: int, size: int) -> bytes:
        if position < 0 or size < 0 or position + size > self.length:
            raise self._error(f"bytes {position}+{size} are outside its {self.length} bytes")
        if is_object(self._fd):
            data = bytearray(size)
            _FILES.pread_into(self._fd, memoryview(data), self.offset + position)
            return bytes(data)
        parts, end = [], self.offset + position + size
        position += self.offset
        while position < end:
            part = os.pread(self._fd, end - position, position)
            if not part:
                raise self._error("the file ends inside it")
            parts.append(part)
            position += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _end(self, tail: bytes, tail_at: int) -> tuple[int, int, int]:
        """Offset, size and number of entries of the central directory."""
        position = len(tail) - _END.size
        sign, disk, disk_cd, on_disk, count, size, start, comment = _END.unpack_from(tail, position)
        if sign != b"PK\5\6" or comment or disk or disk_cd or on_disk != count:
            is_zip = self._read(0, 4) == b"PK\3\4"
            raise self._error(
                "no end record in its last 22 bytes (truncated, or bytes follow it)",
                error_id="truncated-file" if is_zip else None,
            )
        end = tail_at + position
        position -= _LOCATOR.size
        if position >= 0 and tail[position : position + 4] == b"PK\6\7":
            _, disk, record, disks = _LOCATOR.unpack_from(tail, position)
            position -= _END64.size
            if disk or disks != 1 or position < 0 or record != tail_at + position:
                raise self._error(f"zip64 end record claimed at {record}")
            sign, length, _, _, disk, disk_cd, on_disk, count64, size64, start64 = (
                _END64.unpack_from(tail, position)
            )
            if sign != b"PK\6\6" or length != _END64.size - 12 or disk or disk_cd:
                raise self._error("damaged zip64 end record")
            for short, long, full in (
                (count, count64, 0xFFFF),
                (size, size64, 0xFFFFFFFF),
                (start, start64, 0xFFFFFFFF),
            ):
                if short not in (long, full):
                    raise self._error(f"end records disagree: {short} and {long}")
            if on_disk != count64:
                raise self._error(f"end record counts {on_disk} and {count64} entries")
            count, size, start, end = count64, size64, start64, record
        if start + size != end or count * _CENTRAL.size > size or count > _MAX_MEMBERS:
            raise self._error(f"a directory of {count} entries cannot be at {start}+{size}")
        return start, size, count

    def _list(self, directory: bytes, count: int) -> tuple[dict[str, ZipMember], str]:
        members: dict[str, ZipMember] = {}
        position, prefix = 0, ""
        for _ in range(count):
            if position + _CENTRAL.size > len(directory):
                raise self._error("directory ends early")
            (sign, made_by, _, flags, method, _, _, crc32, packed, size, n_name, n_extra, n_comment,
             _, _, mode, header) = _CENTRAL.unpack_from(directory, position)  # fmt: skip
            position += _CENTRAL.size
            raw = directory[position : position + n_name]
            extra = directory[position + n_name : position + n_name + n_extra]
            position += n_name + n_extra + n_comment
            if sign != b"PK\1\2" or position > len(directory):
                raise self._error("a directory entry is damaged")
            if packed == 0xFFFFFFFF or size == 0xFFFFFFFF or header == 0xFFFFFFFF:
                size, packed, header = self._wide(extra, size, packed, header)
            if method or packed != size:
                raise self._error(f"member {raw!r} is compressed")
            if flags & _ENCRYPTED:
                raise self._error(f"member {raw!r} is encrypted")
            if made_by >> 8 == 3 and (mode >> 16) & 0o170000 == _UNIX_SYMLINK:
                raise self._error(f"member {raw!r} is a link")
            try:
                folder, _, name = raw.decode().partition("/")
            except UnicodeDecodeError as e:
                raise self._error(f"member name {raw!r}") from e
            if not name or "\0" in name or (members and folder != prefix):
                raise self._error(f"member name {raw!r}")
            if name in members:
                raise self._error(f"two members are called {name!r}")
            prefix = folder
            members[name] = ZipMember(name, header, size, crc32)
        if position != len(directory):
            raise self._error("directory has bytes after its entries")
        self._check_disjoint(members, len(prefix) + 1)
        return members, prefix

    def _wide(self, extra: bytes, size: int, packed: int, header: int) -> tuple[int, int, int]:
        """Sizes and offset of an entry with a zip64 field."""
        position = 0
        while position + 4 <= len(extra):
            tag, length = struct.unpack_from("<HH", extra, position)
            body = extra[position + 4 : position + 4 + length]
            position += 4 + length
            if tag != 1:
                continue
            values = [v for (v,) in struct.iter_unpack("<Q", body[: len(body) // 8 * 8])]
            out = []
            for short in (size, packed, header):
                if short == 0xFFFFFFFF:
                    if not values:
                        break
                    out.append(values.pop(0))
                else:
                    out.append(short)
            if len(out) == 3:
                return out[0], out[1], out[2]
        raise self._error("an entry claims zip64 sizes but has none")

    def _check_disjoint(self, members: dict[str, ZipMember], n_prefix: int) -> None:
        end, last = 0, ""
        for member in sorted(members.values(), key=lambda m: m.header):
            if member.header < end:
                raise self._error(f"members {last!r} and {member.name!r} overlap")
            end = member.header + _LOCAL.size + n_prefix + len(member.name) + member.size
            last = member.name
        if end > self._directory:
            raise self._error(f"member {last!r} overlaps the directory")

    def locate(self, name: str) -> tuple[int, int]:
        """Absolute offset of a member's bytes, and their number.

        Raises:
            FormatError: there is no such member, or its local header disagrees with the directory.
        """
        member = self.members.get(name)
        if member is None:
            raise self._error(f"it has no member {name!r}")
        full = f"{self.prefix}/{name}".encode()
        need = _LOCAL.size + len(full)
        if member.header + need <= len(self._head):
            local = self._head[member.header : member.header + need]
        else:
            local = self._read(member.header, need)
        sign, _, flags, method, _, _, _, packed, size, n_name, n_extra = _LOCAL.unpack_from(local)
        if sign != b"PK\3\4" or method or flags & _ENCRYPTED or local[_LOCAL.size :] != full:
            raise self._error(f"local header of {name!r} disagrees with the directory")
        allowed = (member.size, 0xFFFFFFFF) if not flags & _DESCRIPTOR else None
        if n_name != len(full) or (allowed and (packed not in allowed or size not in allowed)):
            raise self._error(f"local header of {name!r} disagrees with the directory")
        start = member.header + need + n_extra
        follows = bisect_right(self._headers, member.header)
        after = self._headers[follows] if follows < len(self._headers) else self._directory
        if start + member.size > after:
            raise self._error(f"member {name!r} overlaps what follows it")
        return self.offset + start, member.size

    def read(self, name: str) -> bytes:
        """All bytes of a member."""
        position, size = self.locate(name)
        position -= self.offset
        if position + size <= len(self._head):
            return self._head[position : position + size]
        return self._read(position, size)

    def read_pickle(self) -> bytes:
        """Read the pickle of the saved value, after checking the byte order."""
        if "byteorder" in self.members and (order := self.read("byteorder")) != b"little":
            raise self._error(f"the byte order {order!r} is not supported")
        member = self.members.get("data.pkl")
        if member is not None and member.size > _MAX_PICKLE_BYTES:
            raise self._error(f"a pickle has {member.size} bytes, which is too much")
        return self.read("data.pkl")


def load_object(fd: int, offset: int, length: int, *, file: str | Path) -> Any:
    """The inert tree of a saved value, with the bytes of its storages attached.

    For small values: everything is read.
    """
    return _load_tree(ZipArchive(fd, offset, length, file=file), file)


class _MemoryArchive(ZipArchive):
    """A container in memory."""

    __slots__ = ("_data",)

    def __init__(self, data: bytes, *, file: str | Path) -> None:
        self._data = data
        super().__init__(-1, 0, len(data), file=file)

    def _read(self, position: int, size: int) -> bytes:
        if position < 0 or size < 0 or position + size > len(self._data):
            raise self._error(f"bytes {position}+{size} are outside its {self.length} bytes")
        return self._data[position : position + size]


def load_object_bytes(
    data: bytes,
    *,
    file: str | Path,
    stub_classes: Mapping[tuple[str, str], Any] | None = None,
) -> Any:
    """Like `load_object`, for a saved value in memory; `stub_classes` as in `decode`."""
    return _load_tree(_MemoryArchive(data, file=file), file, stub_classes)


def read_pickle_bytes(data: bytes, *, file: str | Path) -> bytes:
    """The pickle of a saved value in memory, without its storages."""
    return _MemoryArchive(data, file=file).read_pickle()


def _load_tree(
    archive: ZipArchive,
    file: str | Path,
    stub_classes: Mapping[tuple[str, str], Any] | None = None,
) -> Any:
    tree = pickle_reader.decode(archive.read_pickle(), file=file, stub_classes=stub_classes)
    for node in pickle_reader.find_references(tree):
        if isinstance(node.id, tuple) and len(node.id) > 2 and node.id[0] == "storage":
            node.data = archive.read(f"data/{node.id[2]}")
    pickle_reader.check_expansion(tree, file=file)
    return tree
