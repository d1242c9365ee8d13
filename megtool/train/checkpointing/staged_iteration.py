"""Iteration folder: how several processes write one folder that appears whole or not at all.

They meet in a staging folder inside the save folder, `.megtool/iter_0000010.3/`: its `tree` is what
becomes the iteration, and a mark of every rank says how far it is. Nothing is sent between
processes, so this works in threads while training communicates.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megtool.checkpoint.formats.save_folder import TRACKER, folder_name
from megtool.checkpoint.storage.files import Files
from megtool.dtypes import DType
from megtool.errors import StorageError

STAGING = ".megtool"
_CHUNK = 2 << 20  # elements converted at a time
_BATCH = 8 << 20  # bytes after which what is gathered is written
_GAP = 4096  # bytes between two parts of a file that are written as zeros, not skipped

Elements = tuple[int, DType, Callable[[], Tensor]]
"""Where elements begin in a file, the type they are stored in, and what reads them."""


class StagedIteration:
    """One rank's view of an iteration under way; `number` tells the attempts of a run apart.

    Rank 0 calls `commit`, the others `wait`, all after `begin` and, once written, `done`; or
    `failed`, where one of these raises.
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
        self._rank, self._size = rank, size
        self._fsync, self._timeout_s = fsync, timeout_s

    # ---- every rank

    def begin(self) -> None:
        """Make the staging folder, and this rank's mark while there is space for it."""
        for path in (self.staging.parent, self.staging, self.tree):
            self.files.mkdir(path)
        self.files.close(self.files.open_write(self._mark(self._rank, "busy")))

    def mark_done(self) -> None:
        """All that this rank writes is written."""
        self._set_mark("done")

    def mark_failed(self) -> None:
        """This rank gives up."""
        self._set_mark("failed")

    def write(
        self,
        name: str,
        size: int,
        fragments: Iterable[tuple[int, bytes]],
        rows: Iterable[Elements],
    ) -> None:
        """Write a file of `size` bytes: fragments and elements, each in ascending order."""
        full = self._prepare_path(name)
        fd = self.files.open_write(full)
        try:
            self.files.truncate(fd, size)
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
            self.files.close(fd)
        if self._fsync:
            self.files.fsync(full)

    def wait(self) -> None:
        """Wait until rank 0 has committed.

        Raises:
            StorageError: it has not.
        """
        self._wait_until(lambda: self.files.lstat(self.staging) is None, "rank 0 commits")
        tracker = self.files.read_whole(self.folder / TRACKER, at_most=100)
        if tracker is None or tracker.strip() != str(self.iteration).encode():
            raise StorageError(
                f"iteration {self.iteration} was given up by another rank, whose message says why",
                file=self.final,
                hint=self._hint(),
            )

    def _hint(self) -> str:
        has_earlier = self.files.lstat(self.folder / TRACKER) is not None
        prefix = "an earlier iteration is there still; " if has_earlier else ""
        return f"{prefix}free some space, or give another save folder"

    # ---- rank 0

    def require_space(self, num_bytes: int) -> None:
        """Make sure that so many bytes fit.

        Raises:
            StorageError: they do not.
        """
        free = self.files.free_space(self.tree)
        if num_bytes > free:
            raise StorageError(
                f"not enough space for iteration {self.iteration}: {num_bytes:,} bytes needed, "
                f"{free:,} free",
                file=self.folder,
                hint=self._hint(),
            )

    def commit(self, small: Mapping[str, bytes | Path]) -> None:
        """When all ranks are done, write the small files and let the folder take its name.

        A path among them is that of a file, which is moved.

        The last of `small` marks the folder as complete for those who look at it alone. The tracker
        follows, in one step of its own.

        Raises:
            StorageError: a rank failed, or the system refused; what there was before stays.
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
        for name, data in small.items():
            if isinstance(data, Path):
                self._move(data, name)
            else:
                self.write(name, len(data), [(0, data)], ())
        files = self.files
        if self._fsync:
            _, folders = files.tree(self.tree)
            for folder in [*reversed(folders), self.tree]:
                files.fsync_dir(folder)
        self._rename()
        tracker = self.staging / TRACKER
        self._write_tracker(tracker)
        files.rename(tracker, self.folder / TRACKER)
        if self._fsync:
            files.fsync_dir(self.folder)
        files.remove(self.staging)

    def discard(self) -> None:
        """Remove all of it, once no rank writes any more."""
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
        """The ranks in a state; those without a mark have not begun, and are as good as busy."""
        names = set(self.files.names(self.staging))
        ranks = [r for r in range(self._size) if r != but_for]
        if state == "busy":
            over = ("done", "failed")
            return [r for r in ranks if not any(f"rank_{r}.{s}" in names for s in over)]
        return [r for r in ranks if f"rank_{r}.{state}" in names]

    def _wait_until(self, is_reached: Callable[[], bool], goal: str) -> None:
        began, pause = time.monotonic(), 0.001
        while not is_reached():
            if time.monotonic() - began > self._timeout_s:
                raise StorageError(
                    f"iteration {self.iteration}: {self._timeout_s:.0f} s passed before {goal}",
                    file=self.final,
                    hint="a process may have ended, or the save folder is not one that all share",
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.05)

    def _prepare_path(self, name: str) -> Path:
        full = self.tree / name
        for folder in reversed(full.relative_to(self.tree).parents):
            self.files.mkdir(self.tree / folder)
        return full


class _Writer:
    """Bytes of one file in ascending order, written many buffers at a time."""

    def __init__(self, files: Files, fd: int) -> None:
        self._files, self._fd = files, fd
        self._buffers: list[Any] = []
        self._start = self._end = 0

    def add(self, offset: int, data: Any) -> None:
        """Bytes at `at`, kept until enough are there."""
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
        """Elements at `at`, as another type where it is one; of those a part is kept at a time."""
        if elements.dtype == kind:
            if elements.numel():
                self.add(offset, elements.contiguous().view(torch.uint8).numpy().data)
            return
        for start in range(0, elements.numel(), _CHUNK):
            part = elements[start : start + _CHUNK].to(kind)
            self.add(offset + start * kind.itemsize, part.view(torch.uint8).numpy().data)

    def flush(self) -> None:
        """Write what is kept."""
        if self._buffers:
            self._files.pwrite_gather(self._fd, self._buffers, self._start)
            self._buffers = []


def remove_unfinished(files: Files, folder: Path) -> list[str]:
    """Remove what unfinished saves left in a save folder; returns what was there.

    To be called by the one run that holds the folder.

    Raises:
        StorageError: the system refused.
    """
    staging = folder / STAGING
    removed = []
    for name in files.names(staging) if files.lstat(staging) is not None else ():
        if name == "lock":
            continue
        old, final = staging / name / "old", folder / name.rpartition(".")[0]
        if files.lstat(old) is not None and files.lstat(final) is None:
            files.rename(old, final)  # stopped between the two renames of a replacement
        files.remove(staging / name)
        removed.append(name)
    return removed
