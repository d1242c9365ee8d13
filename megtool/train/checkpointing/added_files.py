"""The base of savers that add files of a feature's own to the iterations of another saver."""

from __future__ import annotations

import tempfile
from pathlib import Path

from megtool.formats.save_folder import folder_name
from megtool.storage.files import Files
from megtool.storage.location.path import is_remote, location
from megtool.train.checkpointing.protocol import CheckpointSaver
from megtool.train.checkpointing.retention import find_newest_iteration
from megtool.train.checkpointing.staged_iteration import STAGING


def find_iteration(checkpoint: Path, name: str) -> Path:
    """The iteration's folder in which a feature saved `name`: `checkpoint` itself, or the newest
    one of a save folder."""
    if (checkpoint / name).exists():
        return checkpoint
    newest = find_newest_iteration(checkpoint)
    return checkpoint if newest is None else checkpoint / folder_name(newest)


class SaverWithFiles:
    """Passes on what it does not change to `saver`, and has a folder for files that it writes.

    A saver moves larger files from there into an iteration, or uploads them into a store.
    """

    def __init__(self, saver: CheckpointSaver) -> None:
        self._saver = saver
        self._temporary: tempfile.TemporaryDirectory[str] | None = None

    def _spool_folder(self) -> Path:
        """Where files are written before the saver moves them, or uploads them into a store."""
        if not is_remote(self._saver.folder):
            return self._saver.folder / STAGING
        if self._temporary is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="megtool-")
        return location(self._temporary.name)

    @property
    def folder(self) -> Path:
        """The save folder."""
        return self._saver.folder

    @property
    def files(self) -> Files:
        """The access to its file system."""
        return self._saver.files

    def wait_for_copy(self) -> float:
        """Wait until the state may change; returns the seconds it took."""
        return self._saver.wait_for_copy()

    def check(self) -> None:
        """Raise an error of the background thread, if there was one."""
        self._saver.check()

    def finish(self) -> None:
        """Wait until no save is under way."""
        self._saver.finish()
