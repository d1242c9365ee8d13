"""Digests inside a checkpoint that is one file (`.safetensors`, `.gguf`), in its own metadata.

The header holds one string of a fixed length, so that it can be completed after the data:
`crc32c outside=XXXXXXXX tensors=XXXXXXXX...`. It has one CRC-32C per tensor that has bytes, in the
order of the data, and one of all other bytes of the file, in which its own digits count as zeros.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megtool.digests.crc32c import chain_crc, finish_crc
from megtool.digests.files import FileMismatch, read_sections
from megtool.errors import FormatError
from megtool.storage.files import Files
from megtool.tensors.catalogue import Catalogue
from megtool.transport.reading.shared_scan import ScanPart, run_scan

METADATA_KEY = "megtool.digests"

_TEXT = re.compile(r"crc32c outside=([0-9a-f]{8}) tensors=((?:[0-9a-f]{8})*)")
_IN_HEADER = re.compile(rb"crc32c outside=([0-9a-f]{8}) tensors=((?:[0-9a-f]{8})*)")
_MAX_GAP_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class EmbeddedDigests:
    """CRC-32C of the bytes outside tensors, and of each tensor in the order of the data."""

    outside: int
    tensors: tuple[int, ...]

    def __str__(self) -> str:
        return f"crc32c outside={self.outside:08x} tensors=" + "".join(
            f"{crc:08x}" for crc in self.tensors
        )


def reserve_digests(sizes: Sequence[int]) -> str:
    """The string to put into a header until the digests of tensors of these sizes are known."""
    return str(EmbeddedDigests(0, (0,) * sum(size > 0 for size in sizes)))


def check_reserved(head: bytes, file: str) -> None:
    """Refuse a header in which something else looks like the reserved string.

    Raises:
        FormatError: it has such a name, so its digests could not be completed.
    """
    if len(_IN_HEADER.findall(head)) > 1:
        raise FormatError(
            f"a name or a value looks like the digests, {METADATA_KEY!r}",
            file=file,
            hint="rename the tensor: --rename OLD=NEW",
        )


def parse_embedded(text: object, path: Path) -> EmbeddedDigests | None:
    """Parse the string of a header; None if it has no digests.

    Raises:
        FormatError: it is damaged.
    """
    if isinstance(text, str) and text.isspace():
        return None
    match = _TEXT.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise FormatError(
            "the digests in the header are damaged", file=path, error_id="damaged-digests"
        )
    digits = match[2]
    return EmbeddedDigests(
        int(match[1], 16), tuple(int(digits[i : i + 8], 16) for i in range(0, len(digits), 8))
    )


def find_embedded(catalogue: Catalogue, path: Path) -> EmbeddedDigests | None:
    """The digests in the header of the checkpoint `path`, if it is one file and has any.

    Raises:
        FormatError: they are damaged, or have another key.
    """
    section = {"safetensors": "header", "gguf": "gguf"}.get(catalogue.format)
    if section is None or not path.is_file() or len(catalogue.files) != 1:
        return None
    values = catalogue.metadata.get(section, {})
    if METADATA_KEY in values:
        return parse_embedded(values[METADATA_KEY], path)
    if any(isinstance(value, str) and _TEXT.fullmatch(value) for value in values.values()):
        raise FormatError(f"the header has digests, but not as {METADATA_KEY!r}", file=path)
    return None


def list_sections(catalogue: Catalogue) -> list[tuple[str, int, int]]:
    """Name, begin and end of each tensor of a file that has bytes, in the order of the data."""
    extents = catalogue.extents
    names = [catalogue.tensors[n].name for n in catalogue.shards.tensor.tolist()]
    rows = zip(names, extents.offset.tolist(), extents.length.tolist(), strict=True)
    return sorted(((n, a, a + k) for n, a, k in rows if k), key=lambda row: row[1])


def embed_digests(
    files: Files, path: Path, catalogue: Catalogue, head: bytes, tensors: Sequence[int]
) -> None:
    """Complete the reserved string of a written file, whose header `head` still has zeros.

    `tensors` are the digests of `list_sections`. Bytes between tensors are zeros.
    """
    sections = list_sections(catalogue)
    filled = _fill(head, EmbeddedDigests(0, tuple(tensors)), path)
    outside = _digest_outside(files, path, filled, sections, catalogue.files[0].size)
    _write_head(files, path, _fill(head, EmbeddedDigests(outside, tuple(tensors)), path))


def embed_nothing(files: Files, path: Path, head: bytes) -> None:
    """Fill the reserved string of a written file with spaces: it has no digests."""
    _write_head(files, path, _IN_HEADER.sub(lambda match: b" " * len(match[0]), head))


def _write_head(files: Files, path: Path, head: bytes) -> None:
    fd = files.open_write(path)
    try:
        files.pwrite_all(fd, head, 0)
    finally:
        files.close(fd)


def _fill(head: bytes, digests: EmbeddedDigests, path: Path) -> bytes:
    """The header with these digests; a header has the string once."""
    text = str(digests).encode()
    out, count = _IN_HEADER.subn(lambda _: text, head)
    if count != 1 or len(out) != len(head):
        raise FormatError(
            f"{count} strings of the header look like digests, not one",
            file=path,
            error_id="damaged-digests",
        )
    return out


def _digest_outside(
    files: Files, path: Path, head: bytes, sections: Sequence[tuple[str, int, int]], size: int
) -> int:
    """The CRC-32C of all bytes outside of tensors, with `head` instead of the file's first bytes.

    Raises:
        FormatError: more than 1 MiB lies between two tensors.
    """
    linear, num_bytes = chain_crc(0, head), len(head)
    ends = [len(head), *(end for _, _, end in sections)]
    begins = [*(begin for _, begin, _ in sections), size]
    fd = files.open_read(path)
    try:
        for gap_begin, gap_end in zip(ends, begins, strict=True):
            if not 0 <= gap_end - gap_begin <= _MAX_GAP_BYTES:
                raise FormatError("too many bytes are outside of tensors", file=path)
            if gap_begin == gap_end:
                continue
            gap = bytearray(gap_end - gap_begin)
            files.pread_into(fd, memoryview(gap), gap_begin)
            linear, num_bytes = chain_crc(linear, bytes(gap)), num_bytes + len(gap)
    finally:
        files.close(fd)
    return finish_crc(linear, num_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedCheck:
    """What differs in one file: tensors, and the bytes outside of them."""

    differing: tuple[str, ...]
    outside: FileMismatch | None


def check_embedded(
    catalogue: Catalogue,
    digests: EmbeddedDigests,
    *,
    threads: int = 1,
    progress: Callable[[int], None] | None = None,
    scan: ScanPart | None = None,
) -> EmbeddedCheck:
    """Compare a file with the digests in its header; all bytes are read once.

    With `scan`, workers share it out; of a tensor that another one reads, nothing is known.

    Raises:
        FormatError: the header has digests of another number of tensors.
        StorageError: a read failed.
    """
    path, files = catalogue.path(0), Files()
    size, sections = catalogue.files[0].size, list_sections(catalogue)
    if len(sections) != len(digests.tensors):
        raise FormatError(
            f"the header has {len(digests.tensors)} digests of {len(sections)} tensors",
            file=path,
            error_id="damaged-digests",
        )
    actual: Sequence[int | None]
    ranges = [(a, b) for _, a, b in sections]
    if scan is None:
        actual = read_sections(files, path, ranges, threads=threads, progress=progress)
    else:
        actual = run_scan(
            scan,
            ranges,
            lambda section: read_sections(files, path, [section], progress=progress)[0],
            name=repr,
            size=lambda section: section[1] - section[0],
            threads=threads,
        )
    head = bytearray(min((a for _, a, _ in sections), default=size))
    fd = files.open_read(path)
    try:
        files.pread_into(fd, memoryview(head), 0)
    finally:
        files.close(fd)
    zeroed = _fill(bytes(head), EmbeddedDigests(0, digests.tensors), path)
    outside = _digest_outside(files, path, zeroed, sections, size)
    mismatch = None
    if outside != digests.outside:
        reason = f"has the CRC-32C {outside:08x} outside of tensors, not {digests.outside:08x}"
        mismatch = FileMismatch(file=path.name, reason=reason)
    return EmbeddedCheck(
        differing=tuple(
            name
            for (name, _, _), expected, crc in zip(sections, digests.tensors, actual, strict=True)
            if crc is not None and crc != expected
        ),
        outside=mismatch,
    )
