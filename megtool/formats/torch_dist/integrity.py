"""The integrity.json of Megatron-Core 0.18 and later: checksums of whole files.

`{"algorithm": "sha256", "files": {"__0_0.distcp": "9f86...", ...}}`, of the files directly in
an iteration's folder. megtool checks but never writes them: its own digests need no second pass
over the files.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from megtool.digests.files import FileMismatch
from megtool.errors import FormatError
from megtool.formats.header_reader import check_inside, parse_json, read_exact
from megtool.process.threads import map_in_threads
from megtool.storage.files import Files

INTEGRITY_FILE = "integrity.json"

_ALGORITHMS = ("sha256", "sha512", "sha1", "md5", "blake2b")
_MAX_BYTES = 64 << 20
_PART_BYTES = 1 << 20
_HEX = re.compile(r"[0-9a-f]{32,128}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Integrity:
    """The contents of integrity.json: hexadecimal checksums by file name."""

    algorithm: str
    files: dict[str, str]


def read_integrity(folder: Path) -> Integrity | None:
    """Read the integrity.json of an iteration's folder; None if there is none.

    Raises:
        FormatError: the file is invalid, or its algorithm is unknown.
    """
    path = folder / INTEGRITY_FILE
    if not path.is_file():
        return None
    check_inside(folder, INTEGRITY_FILE)
    size = path.stat().st_size
    if size > _MAX_BYTES:
        raise FormatError(f"the checksums have {size:,} bytes, which is too much", file=path)
    value = parse_json(read_exact(path, 0, size), path)
    algorithm = value.get("algorithm") if isinstance(value, dict) else None
    files = value.get("files") if isinstance(value, dict) else None
    if not isinstance(algorithm, str) or algorithm.lower() not in _ALGORITHMS:
        raise FormatError(
            f"the checksum algorithm {algorithm!r:.40} is unknown",
            file=path,
            hint=f"known: {', '.join(_ALGORITHMS)}",
        )
    if not isinstance(files, dict):
        raise FormatError("it lists no files", file=path)
    for name, checksum in files.items():
        inside = name and name not in (".", "..") and not set(name) & set("/\\\0")
        if not inside or not isinstance(checksum, str) or not _HEX.fullmatch(checksum.lower()):
            raise FormatError(
                f"the checksum {checksum!r:.40} of the file {name!r:.80} is damaged", file=path
            )
    return Integrity(algorithm=algorithm.lower(), files={n: c.lower() for n, c in files.items()})


def check_integrity(folder: Path, *, threads: int = 2) -> list[FileMismatch] | None:
    """Compare every listed file; returns those that differ, None if there is no integrity.json.

    All bytes are read once, through a buffer of 1 MiB per thread.

    Raises:
        FormatError: integrity.json is invalid.
        StorageError: a read failed.
    """
    integrity = read_integrity(folder)
    if integrity is None:
        return None

    def check(item: tuple[str, str]) -> FileMismatch | None:
        name, expected = item
        if not (folder / name).is_file():
            return FileMismatch(file=name, reason="listed in integrity.json, but missing")
        check_inside(folder, name)
        actual = _checksum(folder / name, integrity.algorithm)
        if actual == expected:
            return None
        return FileMismatch(
            file=name, reason=f"{integrity.algorithm} is {actual[:12]}..., not {expected[:12]}..."
        )

    checked = map_in_threads(check, sorted(integrity.files.items()), threads=threads)
    return [u for u in checked if u is not None]


def _checksum(path: Path, algorithm: str) -> str:
    files, checksum = Files(), hashlib.new(algorithm, usedforsecurity=False)
    fd = files.open_read(path)
    try:
        remaining, offset = path.stat().st_size, 0
        buffer = bytearray(min(remaining, _PART_BYTES))
        while remaining:
            part = memoryview(buffer)[: min(remaining, _PART_BYTES)]
            files.pread_into(fd, part, offset)
            checksum.update(part)
            offset, remaining = offset + len(part), remaining - len(part)
    finally:
        files.close(fd)
    return checksum.hexdigest()
