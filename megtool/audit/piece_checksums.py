"""Checksums of byte ranges that are read in pieces, in any order: zip's CRC-32, and CRC-32C."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megtool.errors import MegtoolError
from megtool.pickles.zip_reader import ZipArchive
from megtool.storage.files import Files
from megtool.transport.strided import Array

_ONES = 0xFFFFFFFF
_GAP_BYTES = 1 << 20


@functools.cache
def _checksums() -> Any:
    from awscrt import checksums

    return checksums


@dataclass(frozen=True, slots=True)
class ChecksumKind:
    """A checksum whose linear part can be chained and shifted: CRC-32 or CRC-32C."""

    is_castagnoli: bool

    def chain(self, linear: int, data: Array | memoryview | bytes) -> int:
        """The linear part of some bytes followed by `data`, given that of those (0 of none)."""
        update = _checksums().crc32c if self.is_castagnoli else _checksums().crc32
        return int(update(data, linear ^ _ONES)) ^ _ONES

    def shift(self, linear: int, num_bytes: int) -> int:
        """The linear part after `num_bytes` more zeros."""
        library = _checksums()
        combine = library.combine_crc32c if self.is_castagnoli else library.combine_crc32
        return int(combine(linear, 0, num_bytes))

    def finish(self, linear: int, num_bytes: int) -> int:
        """The checksum of `num_bytes` bytes with this linear part."""
        return linear ^ self.shift(_ONES, num_bytes) ^ _ONES


ZIP_CRC, CRC32C = ChecksumKind(False), ChecksumKind(True)


@dataclass(slots=True)
class ByteRange:
    """A range of a file whose checksum is known, and what was added of it so far."""

    path: Path
    start: int
    size: int
    expected: int
    kind: ChecksumKind
    label: str = ""
    linear: int = 0
    pieces: list[tuple[int, int]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, offset: int, num_bytes: int, linear: int) -> None:
        """Add bytes at a file offset by the linear part of their checksum."""
        after = self.start + self.size - offset - num_bytes
        moved = self.kind.shift(linear, after) if after else linear
        with self.lock:
            self.linear ^= moved
            self.pieces.append((offset, offset + num_bytes))

    def gaps(self) -> Iterator[tuple[int, int]]:
        """The ranges of the file that nothing has added."""
        position = self.start
        for begin, end in sorted(self.pieces):
            if begin > position:
                yield position, begin
            position = max(position, end)
        if position < self.start + self.size:
            yield position, self.start + self.size

    def complete(self, read: Callable[[int, int], memoryview]) -> bool:
        """Read what is missing, and tell whether the checksum is as expected."""
        for begin, end in list(self.gaps()):
            linear = 0
            for start in range(begin, end, _GAP_BYTES):
                linear = self.kind.chain(linear, read(start, min(_GAP_BYTES, end - start)))
            self.add(begin, end - begin, linear)
        return self.kind.finish(self.linear, self.size) == self.expected


def zip_ranges(fd: int, path: Path, offset: int, length: int) -> list[ByteRange]:
    """The data of a torch.save container with the CRC-32 of the zip's directory; none of those
    that were saved without (torch.serialization.set_crc32_options)."""
    try:
        archive = ZipArchive(fd, offset, length, file=path)
        ranges = []
        for name, member in archive.members.items():
            if member.crc32 and member.size and name.startswith("data/"):
                start, size = archive.locate(name)
                ranges.append(
                    ByteRange(
                        path=path, start=start, size=size, expected=member.crc32, kind=ZIP_CRC
                    )
                )
    except MegtoolError:
        return []  # opening the checkpoint says what is wrong with it
    return ranges


def read_bytes(fd: int, offset: int, num_bytes: int) -> memoryview:
    """Some bytes of an open file."""
    view = memoryview(bytearray(num_bytes))
    Files().pread_into(fd, view, offset)
    return view
