"""What a folder or a store does for megtool: copies, locks and renames, or conditions of stores."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megtool.errors import StorageError
from megtool.storage.files import Files
from megtool.storage.location.path import StorePath, resolve_links
from megtool.storage.objects.probe import find_store_faults

_SAMPLE_BYTES = 1 << 20
_NUM_REQUESTS = 5
_FICLONE = 0x40049409
"""The request of ioctl_ficlone(2)."""

_OCTAL = re.compile(r"\\([0-7]{3})")
"""How /proc/self/mountinfo writes spaces and tabs."""

_NETWORK = ("nfs", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb", "fuse", "9p", "wekafs")


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderProbe:
    """A folder of this machine.

    `copies` says how bytes are copied between its files: `shared blocks` (nothing is moved),
    `kernel` or `buffer`. Where it `has_exchange`, a destination is replaced in one step; where it
    `has_locks`, two runs cannot write one destination.
    """

    location: str
    kind: str
    is_network: bool
    free_bytes: int
    is_writable: bool
    copies: str = ""
    has_exchange: bool = False
    has_locks: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreProbe:
    """A prefix of an object store: what it does not keep, and how long a small request takes."""

    location: str
    is_writable: bool
    faults: tuple[str, ...]
    seconds: float


def probe_location(location: Path) -> FolderProbe | StoreProbe:
    """Try what megtool does there, with small files that are removed again.

    Raises:
        StorageError: there is no such folder, or a store refused.
    """
    if isinstance(location, StorePath):
        return _probe_store(location)
    return _probe_folder(location)


def _probe_store(location: StorePath) -> StoreProbe:
    store, times = location.store, []
    for _ in range(_NUM_REQUESTS):
        began = time.perf_counter()
        store.head((location / ".megtool-doctor").key)
        times.append(time.perf_counter() - began)
    return StoreProbe(
        location=str(location),
        is_writable=store.can_write,
        faults=find_store_faults(location) if store.can_write else (),
        seconds=statistics.median(times),
    )


def _probe_folder(location: Path) -> FolderProbe:
    folder = resolve_links(location)
    if not folder.is_dir():
        raise StorageError(
            "it is no folder", file=location, hint="name a folder that exists, or a store's URL"
        )
    kind = _file_system(folder)
    facts: dict[str, Any] = {
        "location": str(location),
        "kind": kind,
        "is_network": kind.startswith(_NETWORK),
        "free_bytes": shutil.disk_usage(folder).free,
    }
    if not os.access(folder, os.W_OK | os.X_OK):
        return FolderProbe(**facts, is_writable=False)
    try:
        with tempfile.TemporaryDirectory(prefix=".megtool-doctor-", dir=folder) as scratch:
            return FolderProbe(**facts, is_writable=True, **_try_out(Path(scratch)))
    except OSError:  # read-only, or full
        return FolderProbe(**facts, is_writable=False)


def _try_out(scratch: Path) -> dict[str, Any]:
    """Copy, lock and rename small files in a folder."""
    files = Files()
    first, second = scratch / "first", scratch / "second"
    first.write_bytes(os.urandom(_SAMPLE_BYTES))
    second.touch()
    source, target = files.open_read(first), os.open(second, os.O_RDWR | os.O_CLOEXEC)
    try:
        has_locks = files.lock(target) is not None
        copies = _way_of_copying(source, target)
    finally:
        files.close(source)
        os.close(target)
    return {
        "copies": copies,
        "has_exchange": files.exchange(first, second),
        "has_locks": has_locks,
    }


def _way_of_copying(source: int, target: int) -> str:
    """How bytes go from one file to another."""
    try:
        fcntl.ioctl(target, _FICLONE, source)
    except OSError:
        pass
    else:
        return "shared blocks"
    try:
        copied = os.copy_file_range(source, target, _SAMPLE_BYTES, 0, 0)
    except OSError:
        copied = 0
    return "kernel" if copied else "buffer"


def _file_system(folder: Path) -> str:
    """The kind of file system that a folder is on, such as `ext4`; empty where none is told."""
    best, kind = "", ""
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        mount, _, source = line.partition(" - ")
        place = _OCTAL.sub(lambda m: chr(int(m[1], 8)), mount.split()[4])
        if len(place) >= len(best) and folder.is_relative_to(place):
            best, kind = place, source.split()[0]
    return kind
