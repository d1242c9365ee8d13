"""A folder that several processes write together, and that appears complete or not at all.

They use a staging folder inside the save folder, `.megtool/iter_0000010.3/`. Its `tree` becomes the
iteration, and a mark file of every rank shows its progress. Processes do not communicate
otherwise, so this works in threads while training communicates.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from stat import S_ISDIR
from typing import Any

import torch
from torch import Tensor

from megtool.digests.crc32c import (
    SIDECAR,
    TOOL,
    FileDigest,
    Sidecar,
    StoredDigest,
    encode_sidecar,
    parse_sidecar,
)
from megtool.digests.files import FileDigests, digest_tree
from megtool.dtypes import DType
from megtool.errors import StorageError
from megtool.formats.save_folder import TRACKER, folder_name
from megtool.storage.files import Files

STAGING = ".megtool"
_CHUNK = 2 << 20  # elements converted at a time
_BATCH = 8 << 20  # bytes to collect before they are written
_GAP = 4096  # gaps in a file up to this many bytes are written as zeros

Elements = tuple[int, DType, Callable[[], Tensor]]
"""The offset of elements in a file, their stored dtype, and a function that reads them."""


class StagedIteration:
    """One rank's view of an iteration that is being written; `number` counts the saves of a run.

    All ranks call `begin`, `write` and `mark_done`; then rank 0 calls `commit`, the others `wait`.
    If one of these raises, the rank calls `mark_failed`. All bytes are digested as they are
    written; a rank's mark holds its digests, which rank 0 collects in the sidecar.
    """

    def __init__(
        self,
        files: Files,
        folder: Path,
        iteration: int,
        *,
        number: int,
        rank: int,
        size: int,
        fsync: bool,
        timeout_s: float,
    ) -> None:
        self.files, self.folder, self.iteration = files, folder, iteration
        self.final = folder / folder_name(iteration)
        self.staging = folder / STAGING / f"{self.final.name}.{number}"
        self.tree = self.staging / "tree"
        self._digests, self._stored = FileDigests(), dict[str, StoredDigest]()
        self._rank, self._size = rank, size
        self._fsync, self._timeout_s = fsync, timeout_s

    # ---- every rank

    def begin(self) -> None:
        """Create the staging folder, and this rank's mark while there is space for it."""
        for path in (self.staging.parent, self.staging, self.tree):
            self.files.make_own_folder(path)
        self.files.close(self.files.open_write(self._mark(self._rank, "busy")))

    def mark_done(self) -> None:
        """Mark this rank's files as complete; the mark holds their digests."""
        data = encode_sidecar(self._own_sidecar())
        fd = self.files.open_write(self._mark(self._rank, "busy"))
        try:
            self.files.pwrite_all(fd, data, 0)
        finally:
            self.files.close(fd)
        self._set_mark("done")

    def _own_sidecar(self) -> Sidecar:
        """The digests of what this rank has written."""
        files = {
            path.relative_to(self.tree).as_posix(): digest
            for path in self._digests.paths()
            if (digest := self._digests.get(path)) is not None
        }
        sidecar = Sidecar(names="stored", tool=TOOL, tensors={}, files=files)
        return replace(sidecar, stored_tensors=self._stored)

    def mark_failed(self) -> None:
        """Mark this rank as failed."""
        self._set_mark("failed")

    def write(
        self,
        name: str,
        size: int,
        fragments: Iterable[tuple[int, bytes]],
        rows: Iterable[Elements],
        shards: Mapping[str, StoredDigest] | None = None,
    ) -> None:
        """Write a file of `size` bytes: fragments and elements, each in ascending order.

        `shards` are the parts of tensors in it, whose digests are not known yet.
        """
        full = self._create(name, size)
        fd = self.files.open_write(full)
        parts = shards or {}
        cuts = sorted({c for p in parts.values() for c in (p.begin, p.begin + p.size)})
        try:
            self.files.truncate(fd, size)
            self._digests.register(full, size, cuts)
            self.files.recorder = self._digests
            writer = _Writer(self.files, fd)
            ahead = iter(fragments)
            bytes_at = next(ahead, None)
            for offset, kind, read in rows:
                while bytes_at is not None and bytes_at[0] < offset:
                    writer.add(*bytes_at)
                    bytes_at = next(ahead, None)
                writer.add_elements(offset, getattr(torch, kind.name), read())
            while bytes_at is not None:
                writer.add(*bytes_at)
                bytes_at = next(ahead, None)
            writer.flush()
        finally:
            self.files.recorder = None
            self.files.close(fd)
        for label, part in parts.items():
            crc = self._digests.section(full, part.begin, part.begin + part.size)
            if crc is not None:
                self._stored[label] = replace(part, crc32c=crc)
        if self._fsync:
            self.files.fsync(full)

    def wait(self) -> None:
        """Wait until rank 0 has committed.

        Raises:
            StorageError: it has not, or it failed.
        """
        self._wait_until(self._is_over, "rank 0 commits")
        self.files.refresh(self.folder)
        tracker = self.files.read_whole(self.folder / TRACKER, at_most=100)
        if tracker is None or tracker.strip() != str(self.iteration).encode():
            raise StorageError(
                f"saving iteration {self.iteration} failed on another rank, which reports why",
                file=self.final,
                hint=self._hint(),
            )

    def _is_over(self) -> bool:
        return self.files.lstat(self.staging) is None

    def _hint(self) -> str:
        has_earlier = self.files.lstat(self.folder / TRACKER) is not None
        prefix = "an earlier iteration still exists; " if has_earlier else ""
        return f"{prefix}free some space, or give another save folder"

    # ---- rank 0

    def require_space(self, num_bytes: int) -> None:
        """Check that there is space for so many bytes.

        Raises:
            StorageError: there is not.
        """
        free = self.files.free_space(self.tree)
        if num_bytes > free:
            raise StorageError(
                f"there is not enough space for iteration {self.iteration}: {num_bytes:,} bytes "
                f"are needed, {free:,} are free",
                file=self.folder,
                hint=self._hint(),
                error_id="no-space",
            )

    def commit(
        self, small: Mapping[str, bytes | Path], *, rotation: Mapping[str, Any] | None = None
    ) -> None:
        """When all ranks are done, write the small files and rename the folder.

        A value that is a path is a file, which is moved. The last of `small` marks the folder as
        complete. `rotation` is the record of what weights are multiplied by. The tracker is
        replaced in a step of its own.

        Raises:
            StorageError: a rank or a system call failed; earlier iterations stay.
        """
        self._wait_for_ranks()
        for name, data in small.items():
            if isinstance(data, Path):
                self._move(data, name)
            else:
                self.write(name, len(data), [(0, data)], ())
        self._write_digests(rotation)
        files = self.files
        if self._fsync:
            _, folders = files.own_tree(self.tree)
            for folder in [*reversed(folders), self.tree]:
                files.fsync_dir(folder)
        tracker = self.staging / TRACKER
        self._write_tracker(tracker)  # before the iteration appears: the disk may be full
        self._rename()
        files.rename(tracker, self.folder / TRACKER)
        if self._fsync:
            files.fsync_dir(self.folder)
        files.remove(self.staging)

    def _wait_for_ranks(self) -> None:
        """Wait until all ranks have written.

        Raises:
            StorageError: one has failed.
        """
        self._wait_until(
            lambda: not self._ranks_in_state("busy", but_for=0), "all ranks have written"
        )
        if failed := self._ranks_in_state("failed"):
            raise StorageError(
                f"rank {failed[0]} could not write its part of iteration {self.iteration}",
                file=self.final,
                hint=self._hint(),
            )

    def _write_digests(self, rotation: Mapping[str, Any] | None) -> None:
        """Write the sidecar: digests of all ranks' files, and of small files."""
        known, stored = dict[str, FileDigest](), dict(self._stored)
        for rank in range(self._size):
            if rank == self._rank:
                continue
            mark = self._mark(rank, "done")
            sidecar = parse_sidecar(self.files.read_whole(mark) or b"", mark)
            known |= sidecar.files
            stored |= sidecar.stored_tensors
        rest = digest_tree(self.files, self.tree, self._digests, excluded=known)
        sidecar = Sidecar(
            names="stored",
            tool=TOOL,
            tensors={},
            stored_tensors=stored,
            files={**known, **rest},
            rotation=rotation,
        )
        data = encode_sidecar(sidecar)
        self.write(SIDECAR, len(data), [(0, data)], ())

    def discard(self) -> None:
        """Remove the staging folder once no rank writes to it."""
        try:
            self._wait_until(
                lambda: not self._ranks_in_state("busy", but_for=0), "all ranks have stopped"
            )
        finally:
            self.files.remove(self.staging)

    def _move(self, path: Path, name: str) -> None:
        if self._fsync:
            self.files.fsync(path)
        self.files.rename(path, self._prepare_path(name))

    def _rename(self) -> None:
        files = self.files
        if files.lstat(self.final) is None:
            files.rename(self.tree, self.final)
        elif not files.exchange(self.tree, self.final):
            files.rename(self.final, self.staging / "old")
            files.rename(self.tree, self.final)
        if self._fsync:
            files.fsync_dir(self.folder)

    def _write_tracker(self, path: Path) -> None:
        data = str(self.iteration).encode()
        fd = self.files.open_write(path)
        try:
            self.files.pwrite_all(fd, data, 0)
        finally:
            self.files.close(fd)
        if self._fsync:
            self.files.fsync(path)

    # ---- marks

    def _mark(self, rank: int, state: str) -> Path:
        return self.staging / f"rank_{rank}.{state}"

    def _set_mark(self, state: str) -> None:
        self.files.rename(self._mark(self._rank, "busy"), self._mark(self._rank, state))

    def _ranks_in_state(self, state: str, *, but_for: int | None = None) -> list[int]:
        """The ranks in a state; those without a mark have not started, and count as busy."""
        names = self._marks()
        ranks = [r for r in range(self._size) if r != but_for]
        if state == "busy":
            over = ("done", "failed")
            return [r for r in ranks if not any(f"rank_{r}.{s}" in names for s in over)]
        return [r for r in ranks if f"rank_{r}.{state}" in names]

    def _marks(self) -> set[str]:
        return set(self.files.names(self.staging))

    def _wait_until(self, is_reached: Callable[[], bool], goal: str) -> None:
        began, pause = time.monotonic(), 0.001
        while not is_reached():
            if time.monotonic() - began > self._timeout_s:
                raise StorageError(
                    f"{self._timeout_s:.0f} s of iteration {self.iteration} passed before {goal}",
                    file=self.final,
                    hint="a process may have ended, or the save folder is not shared by all",
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.05)

    def _create(self, name: str, size: int) -> Path:
        """The path at which to open a file of this size for writing."""
        return self._prepare_path(name)

    def _prepare_path(self, name: str) -> Path:
        full = self.tree / name
        for folder in reversed(full.relative_to(self.tree).parents):
            self.files.make_own_folder(self.tree / folder)
        return full


class _Writer:
    """Writes bytes of a file in ascending order, many buffers at a time."""

    def __init__(self, files: Files, fd: int) -> None:
        self._files, self._fd = files, fd
        self._buffers: list[Any] = []
        self._start = self._end = 0

    def add(self, offset: int, data: Any) -> None:
        """Add bytes at `offset`, and write when enough are collected."""
        gap = offset - self._end
        if self._buffers and (gap > _GAP or self._end - self._start > _BATCH):
            self.flush()
        if not self._buffers:
            self._start = offset
        elif gap:
            self._buffers.append(memoryview(bytes(gap)))
        view = memoryview(data)
        self._buffers.append(view)
        self._end = offset + view.nbytes

    def add_elements(self, offset: int, kind: torch.dtype, elements: Tensor) -> None:
        """Add elements at `offset`, converted to `kind` in parts if they have another dtype."""
        if elements.dtype == kind:
            if elements.numel():
                self.add(offset, elements.contiguous().view(torch.uint8).numpy().data)
            return
        for start in range(0, elements.numel(), _CHUNK):
            part = elements[start : start + _CHUNK].to(kind)
            self.add(offset + start * kind.itemsize, part.view(torch.uint8).numpy().data)

    def flush(self) -> None:
        """Write the collected buffers."""
        if self._buffers:
            self._files.pwrite_gather(self._fd, self._buffers, self._start)
            self._buffers = []


def remove_unfinished(files: Files, folder: Path) -> list[str]:
    """Remove unfinished saves from a save folder; returns their names.

    Only the run that has locked the folder may call it.

    Raises:
        DestinationError: a run of this user cannot have made the staging folder.
        StorageError: a system call failed.
    """
    staging = folder / STAGING
    removed: list[str] = []
    if files.lstat(staging) is None:
        return removed
    files.make_own_folder(staging)
    for name in files.names(staging):
        if name == "lock":
            continue
        old, final = staging / name / "old", folder / name.rpartition(".")[0]
        status = files.lstat(old)
        if status is not None and S_ISDIR(status.st_mode) and files.lstat(final) is None:
            files.rename(old, final)  # interrupted between the two renames of a replacement
        files.remove(staging / name)
        removed.append(name)
    return removed
