"""Records of checks: files that were read whole once need not be read whole at each start.

A record has size, times and inode of each file, and the CRC-32C of each of its blocks. It is
believed while the former are the same and a few blocks, chosen by chance at each use, still have
their checksums. A write changes the time that only the system sets (ctime); what changes below the
file system is found by the blocks, some of it at each start.
"""

from __future__ import annotations

import json
import logging
import os
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megtool.digests.crc32c import crc32c
from megtool.errors import MegtoolError
from megtool.storage.files import Files
from megtool.storage.location.path import is_remote, resolve_links

_LOG = logging.getLogger(__name__)
_VERSION = 1
_BLOCK_BYTES = 4 << 20
_NUM_SAMPLES = 16
_SETTLED_NS = 2_000_000_000
"""A file that changed so shortly before its check may change again without another time."""

_MAX_RECORD_BYTES = 64 << 20


class CheckRecord:
    """The record at `path` of a check of `files`, made before the check begins.

    Files in stores have none.
    """

    def __init__(self, path: Path, files: Sequence[Path]) -> None:
        self._path, self._files = path, files
        self._states = None if any(map(is_remote, (path, *files))) else _read_states(files)

    def recall(self) -> Mapping[str, Any] | None:
        """Return what the check found; None if it has to be done (again)."""
        if self._states is None:
            return None
        try:
            data = Files().read_whole(self._path, at_most=_MAX_RECORD_BYTES)
            if data is None:
                return None
            record = json.loads(data)
            is_current = record["version"] == _VERSION and record["states"] == self._states
            facts, checksums = record["facts"], record["checksums"]
            if is_current and isinstance(facts, dict) and self._samples_agree(checksums):
                return facts
        except (MegtoolError, OSError, ValueError, KeyError, TypeError, RecursionError) as e:
            _LOG.debug("the record %s is not used: %s", self._path, e)
        return None

    def note(self, facts: Mapping[str, Any]) -> None:
        """Write what the check found, if the files have not changed since before it.

        A folder that cannot be written is no error: the next start checks again.
        """
        if self._states is None or self._states != _read_states(self._files):
            return
        newest = max(max(state[2:]) for state in self._states.values())
        if time.time_ns() - newest < _SETTLED_NS:
            return
        record = {
            "version": _VERSION,
            "facts": dict(facts),
            "states": self._states,
            "checksums": [[crc32c(block) for block in _read_blocks(f)] for f in self._files],
        }
        try:
            temporary = f".{self._path.name}.{os.getpid()}.tmp"
            Files().replace_file(self._path, json.dumps(record).encode(), temporary, fsync=False)
        except MegtoolError as e:
            _LOG.debug("the check is not recorded: %s", e)

    def _samples_agree(self, checksums: Sequence[Sequence[int]]) -> bool:
        places = [(file, n) for file, sums in enumerate(checksums) for n in range(len(sums))]
        for file, n in random.sample(places, min(_NUM_SAMPLES, len(places))):
            block = next(_read_blocks(self._files[file], n), b"")
            if crc32c(block) != checksums[file][n]:
                return False
        return True


def _read_states(files: Sequence[Path]) -> dict[str, list[int]] | None:
    """Inode, size and times of each file; None if one is missing."""
    states = {}
    for file in files:
        status = Files().stat(file)
        if status is None:
            return None
        states[str(resolve_links(file))] = [
            status.st_ino,
            status.st_size,
            status.st_mtime_ns,
            status.st_ctime_ns,
        ]
    return states


def _read_blocks(file: Path, first: int = 0) -> Iterator[bytes]:
    with file.open("rb") as source:
        source.seek(first * _BLOCK_BYTES)
        while block := source.read(_BLOCK_BYTES):
            yield block
