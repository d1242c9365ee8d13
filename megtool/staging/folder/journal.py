"""The journal of a staged checkpoint: one line for each finished unit of work."""

from __future__ import annotations

import re
import threading
import zlib
from dataclasses import dataclass, field
from pathlib import Path

from megtool.errors import StorageError
from megtool.storage.files import Files

VERSION = 1
MAX_BYTES = 1 << 30


@dataclass(slots=True, kw_only=True)
class JournalRecord:
    """The contents of a journal.

    `finished` maps units to their notes. `lost` counts units that were finished before the machine
    crashed and may never have reached the disk. `commit` is the inode that was about to be
    renamed to the destination, and `state` that of its files (see `describe_state`), if it was
    recorded. `num_bytes` is the length of the intact lines.
    """

    fingerprint: str
    finished: dict[int, str] = field(default_factory=dict)
    lost: int = 0
    commit: int | None = None
    state: str = ""
    num_bytes: int = 0


class Journal:
    """Appends to a journal; lines torn by a kill are overwritten. Thread-safe.

    Every line has a checksum, so torn, zeroed or edited lines are rejected. A finished unit
    survives the process as soon as `finish` returns, and a crash of the machine once `durable` was
    called after it: `read_journal` drops later lines if the machine was restarted.
    """

    def __init__(self, files: Files, path: Path, record: JournalRecord) -> None:
        self._files = files
        self._lock = threading.Lock()
        self._end = record.num_bytes
        self._fd = files.open_write(path)
        try:
            files.truncate(self._fd, self._end)
            if not self._end:
                self._append(f"megtool-journal {VERSION} {record.fingerprint}")
            self._append(f"run {boot_id(files)}")
        except BaseException:
            self.close()
            raise

    def finish(self, unit: int, note: str = "") -> None:
        """Record that a unit is finished, with a note."""
        if "\n" in note:
            raise ValueError(f"a note is one line: {note!r}")
        self._append(f"done {unit} {note}")

    def durable(self) -> None:
        """Record that all finished units were flushed to the disk."""
        self._append("durable")

    def commit(self, inode: int, state: str = "") -> None:
        """Record that the file or folder with this inode is about to become the destination."""
        self._append(f"commit {inode} {state}".rstrip())

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            self._files.close(fd)

    def _append(self, text: str) -> None:
        data = text.encode()
        line = b"%08x %s\n" % (zlib.crc32(data), data)
        with self._lock:
            self._files.pwrite_all(self._fd, line, self._end)
            self._end += len(line)


_HEADER = re.compile(rf"megtool-journal {VERSION} (\S+)")
_LINE = re.compile(r"(?:run (\S+)|done (\d+) (.*)|commit (\d+)(?: (\S+))?|(durable))")


def read_journal(files: Files, path: Path) -> JournalRecord | None:
    """Read the journal at `path` up to its first damaged line; None if there is no journal."""
    data = files.read_whole(path, at_most=MAX_BYTES, is_own=True)
    lines = (data or b"").split(b"\n")[:-1]
    texts: list[str] = []
    end = 0
    for line in lines:
        if line[:9] != b"%08x " % zlib.crc32(line[9:]):
            break
        texts.append(line[9:].decode())
        end += len(line) + 1
    header = _HEADER.fullmatch(texts[0]) if texts else None
    if header is None:
        return None
    record = JournalRecord(fingerprint=header[1], num_bytes=end)
    pending: dict[int, str] = {}  # finished, but perhaps not on the disk
    boot = ""
    for text in [*texts[1:], f"run {boot_id(files)}"]:
        match = _LINE.fullmatch(text)
        if match is None:
            continue
        if match[1]:
            if match[1] != boot or boot == "unknown":
                record.lost += len(pending)
                pending.clear()
            boot = match[1]
        elif match[2]:
            pending[int(match[2])] = match[3]
            record.finished.pop(int(match[2]), None)
        elif match[4]:
            record.commit, record.state = int(match[4]), match[5] or ""
        else:
            record.finished |= pending
            pending.clear()
    record.finished |= pending
    return record


def boot_id(files: Files) -> str:
    """The boot id of this machine: its page cache survives until the next boot."""
    try:
        fd = files.open_read(Path("/proc/sys/kernel/random/boot_id"))
    except StorageError:
        return "unknown"
    try:
        data = bytearray(36)
        files.pread_into(fd, memoryview(data), 0)
    finally:
        files.close(fd)
    return bytes(data).decode()
