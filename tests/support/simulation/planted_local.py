"""Bugs in the recovery of staging folders, each a small patch that a simulation must find."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from megtool.errors import StorageError
from megtool.plan import execute
from megtool.plan.worker import Worker
from megtool.staging.folder import journal
from megtool.staging.folder.place import FolderPlace
from megtool.storage.files import Files

Plant = Callable[[], AbstractContextManager[Any]]


def _files_not_flushed() -> AbstractContextManager[Any]:
    """The commit flushes folders only."""

    def fsync(self: Files, path: Path) -> None:
        fd = self.open_read(path)
        try:
            if not os.path.splitext(path.name)[1]:
                self.call(path, "flush", os.fsync, fd)
        finally:
            self.close(fd)

    return patch.object(Files, "fsync", fsync)


def _folders_not_flushed() -> AbstractContextManager[Any]:
    """The commit flushes files only."""
    return patch.object(Files, "fsync_dir", lambda self, path: None)


def _name_not_flushed() -> AbstractContextManager[Any]:
    """The folder that the checkpoint is renamed into is not flushed."""
    original = Files.fsync_dir

    def fsync_dir(self: Files, path: Path) -> None:
        if ".megtool" in str(path):
            original(self, path)

    return patch.object(Files, "fsync_dir", fsync_dir)


def _inner_folders_not_flushed() -> AbstractContextManager[Any]:
    """Names in folders inside the checkpoint are not flushed."""
    original = Files.fsync_dir

    def fsync_dir(self: Files, path: Path) -> None:
        if path.name != "deep":
            original(self, path)

    return patch.object(Files, "fsync_dir", fsync_dir)


def _journal_not_flushed() -> AbstractContextManager[Any]:
    """The line of the commit need not be on the disk before the rename."""
    original = Files.fsync

    def fsync(self: Files, path: Path) -> None:
        if path.name not in ("journal", ".out.megtool"):
            original(self, path)

    return patch.object(Files, "fsync", fsync)


def _second_fsync_counts() -> AbstractContextManager[Any]:
    """A failed fsync is repeated, and believed."""
    original = Files.fsync

    def fsync(self: Files, path: Path) -> None:
        try:
            original(self, path)
        except StorageError:
            original(self, path)

    return patch.object(Files, "fsync", fsync)


def _restart_not_noticed() -> AbstractContextManager[Any]:
    """The journal is believed after a crash of the machine."""
    return patch.object(journal, "boot_id", lambda files: "the same")


@contextmanager
def _journal_believed() -> Iterator[None]:
    """Finished units are not compared, even if the machine was restarted."""
    original = Worker.do

    def do(self: Worker, unit: Any, *, verify: bool) -> None:
        if not verify:
            original(self, unit, verify=False)

    with _restart_not_noticed(), patch.object(Worker, "do", do):
        yield


def _fingerprint_ignored() -> AbstractContextManager[Any]:
    """Work of another plan is resumed."""
    original = journal.read_journal

    def read_journal(files: Files, path: Path) -> Any:
        record = original(files, path)
        if record is not None:
            record.fingerprint = _Any(record.fingerprint)
        return record

    return patch.object(journal, "read_journal", read_journal)


class _Any(str):
    """A text that equals every other."""

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False


def _finished_too_early() -> AbstractContextManager[Any]:
    """A unit is in the journal before its bytes are in the file."""
    original = execute._run_units

    def run_units(run: Any, stage: Any, todo: Any, threads: int, resumed: Any) -> None:
        for number, _ in todo:
            stage.finish(number)
        original(run, stage, todo, threads, resumed)

    return patch.object(execute, "_run_units", run_units)


def _no_lock() -> AbstractContextManager[Any]:
    """Every run gets the lock."""
    return patch.object(Files, "lock", lambda self, fd, *, shared=False: True)


def _rename_before_journal() -> AbstractContextManager[Any]:
    """The journal does not say that a rename is about to come."""
    return patch.object(journal.Journal, "commit", lambda self, inode, state="": None)


def _removes_before_rename() -> AbstractContextManager[Any]:
    """The old checkpoint is removed, then the new one renamed."""

    def exchange(self: Files, first: Path, second: Path) -> bool:
        self.remove(second)
        self.rename(first, second)
        return True

    return patch.object(Files, "exchange", exchange)


def _old_not_restored() -> AbstractContextManager[Any]:
    """What an interrupted run has moved away is removed with the rest."""

    def forget(self: FolderPlace, record: object) -> None:
        self.files.remove(self.former)

    return patch.object(FolderPlace, "put_old_back", forget)


def _short_writes_believed() -> AbstractContextManager[Any]:
    """A write of half the bytes counts as a whole one."""

    def pwrite_all(self: Files, fd: int, data: Any, offset: int) -> None:
        self._write(fd, data, offset, len(bytes(data)))

    return patch.object(Files, "pwrite_all", pwrite_all)


def _stale_tree_kept() -> AbstractContextManager[Any]:
    """Files of an earlier run with other options stay in the tree."""
    original = Files.remove

    def remove(self: Files, path: Path) -> None:
        if path.name != "tree":
            original(self, path)

    return patch.object(Files, "remove", remove)


LOCAL_PLANTS: dict[str, Plant] = {
    re.sub("^_", "", plant.__name__): plant
    for plant in (
        _files_not_flushed,
        _folders_not_flushed,
        _name_not_flushed,
        _inner_folders_not_flushed,
        _journal_not_flushed,
        _second_fsync_counts,
        _restart_not_noticed,
        _journal_believed,
        _fingerprint_ignored,
        _finished_too_early,
        _no_lock,
        _rename_before_journal,
        _removes_before_rename,
        _old_not_restored,
        _short_writes_believed,
        _stale_tree_kept,
    )
}
