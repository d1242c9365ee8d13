"""CRC-32C digests of whole files, computed while they are staged, and checked afterwards."""

from __future__ import annotations

import stat
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from megtool.digests.crc32c import FileDigest, chain_crc, finish_crc, shift_crc
from megtool.errors import FormatError
from megtool.process.threads import map_in_threads, run_jobs
from megtool.storage.files import Files
from megtool.storage.location.path import choose_by_latency, resolve_links
from megtool.storage.objects.open_objects import Buffer
from megtool.transport.reading.parallel_scan import STORE_TILE_BYTES
from megtool.transport.reading.shared_scan import ScanPart, run_scan

_PART_BYTES = 64 << 20
"""What one thread reads at a time: large files are read by several threads."""

_BUFFER_BYTES = 256 << 10


@dataclass(slots=True)
class _StagedFile:
    """The linear CRC of each section of a file; `ends` are the ends of the sections."""

    size: int
    ends: list[int]
    sections: list[int]
    known: bool = True
    unknown: set[int] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, number: int, linear: int) -> None:
        """Add the linear CRC of bytes of a section, followed by zeros up to its end."""
        with self.lock:
            self.sections[number] ^= linear


class FileDigests:
    """CRC-32C of registered files, computed from their writes in any order. Thread-safe.

    The CRC without its start value and final inversion is linear, so a file's is the xor of those
    of its writes, each shifted by the bytes that follow it. A registered file is all zeros at
    first; bytes that are never written add nothing. Each byte is written once, or its former
    contents are recorded again before it is overwritten, which cancels them. `observer` is called
    with what a write adds to a section: see `add_sections`.
    """

    def __init__(self) -> None:
        self._files: dict[Path, _StagedFile] = {}
        self.observer: Callable[[Path, int, int], None] | None = None

    def register(self, path: Path, size: int, cuts: Sequence[int] = ()) -> None:
        """Follow the writes to a new file; `cuts` (ascending offsets) divide it into sections."""
        ends = sorted({*(c for c in cuts if 0 < c < size), size})
        self._files[path] = _StagedFile(size, ends, [0] * len(ends))

    def record(self, path: Path | None, offset: int, buffers: Iterable[bytes | Buffer]) -> None:
        """Add bytes that were written at `offset`; files that are not registered are ignored."""
        staged = None if path is None else self._files.get(path)
        if staged is None:
            return
        linear = 0
        number = bisect_right(staged.ends, offset)
        for buffer in buffers:
            view = memoryview(cast(Any, buffer))
            if not view.nbytes:
                continue
            view = view if view.format == "B" and view.ndim == 1 else view.cast("B")
            while view.nbytes:
                if number == len(staged.ends):
                    staged.known = False  # beyond the registered size
                    return
                part = view[: staged.ends[number] - offset]
                linear = chain_crc(linear, part)
                view, offset = view[part.nbytes :], offset + part.nbytes
                if offset == staged.ends[number]:
                    self._add(path, staged, number, linear)
                    linear, number = 0, number + 1
        if linear:
            self._add(path, staged, number, shift_crc(linear, staged.ends[number] - offset))

    def _add(self, path: Path | None, staged: _StagedFile, number: int, linear: int) -> None:
        staged.add(number, linear)
        if self.observer is not None and path is not None:
            self.observer(path, number, linear)

    def forget(self, path: Path | None, offset: int = 0, num_bytes: int | None = None) -> None:
        """Bytes of this file were written that nobody has seen: some of them, or any."""
        staged = None if path is None else self._files.get(path)
        if staged is None:
            return
        if num_bytes is None:
            staged.known = False
        elif num_bytes:
            first = bisect_right(staged.ends, offset)
            last = bisect_right(staged.ends, offset + num_bytes - 1)
            staged.unknown.update(range(first, last + 1))

    def sections_of(self, path: Path) -> list[int] | None:
        """The linear CRC of each section of a file so far; None if it is not known."""
        staged = self._files.get(path)
        is_known = staged is not None and staged.known and not staged.unknown
        return list(staged.sections) if staged is not None and is_known else None

    def add_sections(self, path: Path, first: int, sections: Sequence[int]) -> None:
        """Add what another process wrote to sections of a registered file, from `first` on.

        Raises:
            ValueError: the file has fewer sections, or is not registered.
        """
        staged = self._files.get(path)
        if staged is None or not 0 <= first <= first + len(sections) <= len(staged.ends):
            raise ValueError(f"there are no {len(sections)} sections from {first} on")
        for number, linear in enumerate(sections, first):
            staged.add(number, linear)

    def paths(self) -> list[Path]:
        """The registered files."""
        return list(self._files)

    def get(self, path: Path) -> FileDigest | None:
        """The digest of a file, or None if it is not known."""
        staged = self._files.get(path)
        if staged is None or not staged.known or staged.unknown:
            return None
        linear = 0
        for end, section in zip(staged.ends, staged.sections, strict=True):
            linear ^= shift_crc(section, staged.size - end) if section else 0
        return FileDigest(size=staged.size, crc32c=finish_crc(linear, staged.size))

    def section(self, path: Path, begin: int, end: int) -> int | None:
        """The CRC-32C of bytes `begin:end`, which are whole sections; None if it is not known."""
        staged = self._files.get(path)
        if staged is None or not staged.known:
            return None
        if begin == end:
            return 0
        first, last = bisect_right(staged.ends, begin), bisect_right(staged.ends, end - 1)
        if (staged.ends[first - 1] if first else 0) != begin or staged.ends[last] != end:
            return None
        if staged.unknown and not staged.unknown.isdisjoint(range(first, last + 1)):
            return None
        linear = 0
        for number in range(first, last + 1):
            linear ^= shift_crc(staged.sections[number], end - staged.ends[number])
        return finish_crc(linear, end - begin)


def read_sections(
    files: Files,
    path: Path,
    sections: Sequence[tuple[int, int]],
    *,
    threads: int = 1,
    progress: Callable[[int], None] | None = None,
) -> list[int]:
    """The CRC-32C of byte ranges `begin, end` of a file, read through small buffers.

    Raises:
        FormatError: the file is shorter, or not a regular file.
        StorageError: a read failed.
    """
    parts = [
        (number, start, min(start + _PART_BYTES, end))
        for number, (begin, end) in enumerate(sections)
        for start in range(begin, end, _PART_BYTES)
    ]
    linear = [0] * len(sections)
    step = choose_by_latency(path, _BUFFER_BYTES, STORE_TILE_BYTES)
    lock = threading.Lock()
    local = threading.local()
    fd = files.open_read(path)
    try:
        _check_regular(files, fd, path)

        def read(part: tuple[int, int, int]) -> None:
            number, start, end = part
            if not hasattr(local, "buffer"):
                local.buffer = memoryview(bytearray(step))
            crc = 0
            for offset in range(start, end, step):
                view = local.buffer[: min(step, end - offset)]
                files.pread_into(fd, view, offset)
                crc = chain_crc(crc, view)
            moved = shift_crc(crc, sections[number][1] - end)
            with lock:
                linear[number] ^= moved
                if progress is not None:
                    progress(end - start)

        run_jobs(parts, read, threads=threads)
    finally:
        files.close(fd)
    return [
        finish_crc(crc, end - begin) for crc, (begin, end) in zip(linear, sections, strict=True)
    ]


def _check_regular(files: Files, fd: int, path: Path) -> None:
    if not stat.S_ISREG(files.fstat(fd).st_mode):
        raise FormatError("it is not a regular file", file=path, hint="remove or replace it")


def digest_tree(
    files: Files,
    tree: Path,
    recorded: FileDigests,
    *,
    excluded: Iterable[str] = (),
    threads: int = 1,
) -> dict[str, FileDigest]:
    """Digests of all files below a folder by relative path; those not recorded are read.

    Files named in `excluded` (relative paths) have no digest.
    """
    out: dict[str, FileDigest] = {}
    skipped = set(excluded)
    for path in files.tree(tree)[0]:
        name = path.relative_to(tree).as_posix()
        if name in skipped:
            continue
        digest = recorded.get(path)
        if digest is None:
            digest = read_file_digest(files, path, threads=threads)
        out[name] = digest
    return out


def read_file_digest(files: Files, path: Path, *, threads: int = 1) -> FileDigest:
    """The digest of one file, read whole."""
    status = files.stat(path)
    size = 0 if status is None else status.st_size
    (crc,) = read_sections(files, path, [(0, size)], threads=threads)
    return FileDigest(size=size, crc32c=crc)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileMismatch:
    """A file that differs from its checksum, and the reason."""

    file: str
    reason: str


def check_files(
    root: Path,
    expected: Mapping[str, FileDigest],
    *,
    threads: int = 1,
    progress: Callable[[int], None] | None = None,
    scan: ScanPart | None = None,
) -> list[FileMismatch]:
    """Compare files below `root` with their digests; returns those that differ, in order.

    All bytes are read once, through a buffer of 256 KiB per thread. `progress` receives numbers of
    bytes. With `scan`, workers share it out in parts of files; of a file of which others read a
    part, nothing is known.

    Raises:
        StorageError: a read failed.
    """
    files = Files()
    files.load_tree(root)
    home = resolve_links(root)
    at_once = choose_by_latency(root, 1, threads)  # many files, where each is waited for
    shared = None if scan is None else _read_shared(files, root, expected, threads, progress, scan)

    def find_fault(name: str) -> str | None:
        path, digest = root / name, expected[name]
        status = files.stat(path)
        if status is None:
            return "has a digest, but is missing"
        if not stat.S_ISREG(status.st_mode) or not resolve_links(path).is_relative_to(home):
            return "is not a regular file inside the checkpoint any more"
        if status.st_size != digest.size:
            return f"has {status.st_size:,} bytes, but {digest.size:,} were written"
        if shared is not None:
            actual = shared.get(name, digest.crc32c)
        else:
            (actual,) = read_sections(
                files, path, [(0, digest.size)], threads=threads // at_once, progress=progress
            )
        if actual == digest.crc32c:
            return None
        return f"has the CRC-32C {actual:08x}, but {digest.crc32c:08x} was written"

    names = sorted(expected)
    faults = map_in_threads(find_fault, names, threads=at_once)
    return [
        FileMismatch(file=n, reason=r) for n, r in zip(names, faults, strict=True) if r is not None
    ]


def _read_shared(
    files: Files,
    root: Path,
    expected: Mapping[str, FileDigest],
    threads: int,
    progress: Callable[[int], None] | None,
    scan: ScanPart,
) -> dict[str, int]:
    """The CRC-32C of files of which all parts are known, by path; workers share out the parts."""
    sizes = {
        name: digest.size
        for name, digest in sorted(expected.items())
        if (status := files.stat(root / name)) is not None
        and stat.S_ISREG(status.st_mode)
        and status.st_size == digest.size
    }
    jobs = [
        (name, begin, min(begin + _PART_BYTES, size))
        for name, size in sizes.items()
        for begin in range(0, max(size, 1), _PART_BYTES)
    ]

    def work(job: tuple[str, int, int]) -> int:
        name, begin, end = job
        (crc,) = read_sections(files, root / name, [(begin, end)], progress=progress)
        return crc

    results = run_scan(
        scan,
        jobs,
        work,
        name=repr,
        size=lambda job: job[2] - job[1],
        threads=threads,
    )
    linear = dict.fromkeys(sizes, 0)
    unknown = set()
    for (name, begin, end), crc in zip(jobs, results, strict=True):
        if crc is None:
            unknown.add(name)
        else:
            part = finish_crc(crc, end - begin)  # the inverse of itself: the linear CRC
            linear[name] ^= shift_crc(part, sizes[name] - end)
    return {n: finish_crc(crc, sizes[n]) for n, crc in linear.items() if n not in unknown}
