"""A folder, or a file, of this machine: staged beside it, and renamed to it atomically."""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from collections.abc import Container, Sequence
from pathlib import Path

from megtool.digests.files import FileDigests
from megtool.errors import DestinationError, MegtoolError, StorageError
from megtool.process.threads import map_in_threads
from megtool.staging.destination.check import DestinationCheck
from megtool.staging.folder import journal
from megtool.staging.manifest import (
    MANIFEST,
    PUBLISHED,
    list_run_files,
    refuse_workers,
)
from megtool.staging.nested_runs import LOCK, check_runs_above, staging_folder, wait_for
from megtool.staging.place import SharedRun, check_inside
from megtool.storage.file_kinds import describe_kind
from megtool.storage.files import Files
from megtool.storage.lock import LockFile
from megtool.storage.tree_state import describe_state

_TRANSIENT_S = 2.0  # a run that is refused holds its lock for less


class FolderPlace:
    """See `Place`: the folder `.NAME.megtool` next to a destination is its staging area.

    It holds `tree` (renamed to the destination at the end), `journal` (finished units) and `lock`
    (one run at a time). After any interruption the destination is absent or complete. With
    `overwrite` it is the old or the new checkpoint if the file system can exchange two names
    (ext4, XFS, Btrfs, tmpfs and others). Otherwise it is absent between two renames, and the next
    run restores the old one.

    A run that ends early leaves its staging folder, and the next run with the same `fingerprint`
    resumes: `resumed` are the finished units and `notes` the notes stored with them. The caller
    verifies what it relies on. `digests` follows what is written to the tree, unless the run
    resumes.

    The staging folder is closed to other users, and only regular files of this user are opened in
    it: links, FIFOs, devices, and files with a second name are refused. Runs whose destinations
    are inside each other exclude each other (see `nested_runs`).

    A symbolic link as destination is followed: its target is created or replaced, and the link
    stays. Missing parent folders are created. An existing empty folder counts as absent.
    """

    def __init__(
        self,
        destination: Path,
        *,
        files: Files,
        fingerprint: str,
        overwrite: bool = False,
        is_file: bool = False,
        sources: Sequence[Path] = (),
    ) -> None:
        self.files = files
        self.destination = Path(os.path.realpath(destination))
        self.staging = staging_folder(self.destination)
        self.tree = self.staging / "tree"
        self.resumed: set[int] = set()
        self.notes: dict[int, str] = {}
        self.messages: list[str] = []
        self.digests = FileDigests()
        self.is_file = is_file
        self.fingerprint = fingerprint
        self.run: SharedRun | None = None
        self.destination_check = DestinationCheck(
            files=files,
            path=self.destination,
            staging=self.staging,
            is_file=is_file,
            overwrite=overwrite,
            sources=sources,
        )
        self.num_finished = 0
        self.is_renamed = self.is_over = False
        self.is_cleared = False  # no finished unit of an earlier run is staged
        self.former = self.staging / "old"
        self._new_folders: list[Path] = []  # parent folders created, outermost first
        self._folders: set[Path] = set()
        self._mutex = threading.Lock()
        self.lock: LockFile | None = None
        self.journal: journal.Journal | None = None

    # ---- before the first byte

    def check(self) -> None:
        """See `Place`.

        Raises:
            DestinationError: it exists, has the wrong kind, cannot be replaced, is inside a source,
                holds one, or cannot be written.
        """
        self.destination_check.check_surroundings()
        self.destination_check.check_free()

    def check_early(self) -> None:
        """See `Place`; what a completed run has left is removed.

        Raises:
            DestinationError: see `check`.
        """
        if self.run is not None:
            self.run.check()
            return
        try:
            self.check()
        except DestinationError:
            if self.files.lstat(self.staging) is not None:
                with contextlib.suppress(MegtoolError):
                    self.enter()
                    self.leave()
            raise

    def enter(self) -> None:
        self.destination_check.check_surroundings()
        if self.files.lstat(self.staging) is None:
            self.destination_check.check_free()
        try:
            self.lock = self._acquire()
            self.is_cleared = self.files.names(self.staging) == [LOCK]
            self.check_in_place()
            self._recover()
        except BaseException:
            with contextlib.suppress(MegtoolError):
                self._leave(keep=not self.is_cleared)
            raise

    def require_space(self, num_bytes: int) -> None:
        """See `Place`: on the disk, where bytes already staged count as free.

        Raises:
            StorageError: there is not enough space.
        """
        files, _ = self.files.own_tree(self.tree)
        staged = sum(status.st_blocks * 512 for f in files if (status := self.files.lstat(f)))
        free = self.files.free_space(self.staging)
        if num_bytes - staged > free:
            raise StorageError(
                f"there is not enough space: {num_bytes - staged:,} bytes are needed, {free:,} "
                "are free",
                file=self.destination,
                hint="free some space or choose a destination on another disk",
                error_id="no-space",
            )

    # ---- entering

    def _acquire(self) -> LockFile:
        lock = LockFile(self.files, self.staging / LOCK, self.make_staging)
        if not lock.is_certain:
            self.messages.append(
                f"{self.staging} is on a file system without locks: make sure that no second run "
                "writes the same destination"
            )
        return lock

    def make_staging(self) -> None:
        """Create the staging folder, and the folders above it."""
        missing = [p for p in self.destination.parents if self.files.stat(p) is None]
        for folder in reversed(missing):
            if self.files.mkdir(folder):
                self._new_folders.append(folder)
        self.files.make_own_folder(self.staging, is_private=True)

    def check_in_place(self) -> None:
        """Refuse to write where another run is about to replace a folder above.

        Raises:
            DestinationError: another run does, or has done so with this staging folder in it.
        """
        check_runs_above(self.files, self.destination)
        if self.lock is not None and not self.lock.is_in_place():
            raise DestinationError(
                "the staging folder was moved or removed while this run wrote in it",
                file=self.staging,
                hint="another program replaced a folder above: run the same command again",
            )

    def _recover(self) -> None:
        """Resume or discard what an earlier run left."""
        record = journal.read_journal(self.files, self.staging / "journal")
        has_workers = self.files.lstat(self.staging / MANIFEST) is not None
        self.is_cleared = not (record and record.finished) and not has_workers
        self.put_old_back(record)
        staged = self.staged_inode()
        if record and record.commit is not None and record.commit != staged:
            # The run was stopped after the rename: anything staged is the old checkpoint.
            current = self.files.stat(self.destination)
            self.is_renamed = current is not None and record.commit == current.st_ino
            self.clear()
            record = None
        else:
            refuse_workers(self.files, self.staging)
        self.destination_check.check_free(completed=self.is_renamed)
        self.is_renamed = False
        if record and record.fingerprint != self.fingerprint:
            self.messages.append(
                f"discarded {len(record.finished)} finished parts of an earlier run with another "
                "source or other options"
            )
            record = None
        if record and record.lost:
            self.messages.append(
                f"the machine was restarted since: {record.lost} parts may not have reached the "
                "disk and are written again"
            )
        if record is None or not record.finished:
            self.clear()
            record = None
        self.files.make_own_folder(self.tree)
        self.files.own_tree(self.tree)  # refuses what no run has made
        record = record or journal.JournalRecord(fingerprint=self.fingerprint)
        self.journal = journal.Journal(self.files, self.staging / "journal", record)
        self.notes = record.finished
        self.resumed = set(record.finished)
        if self.resumed:
            self.messages.append(f"resuming: {len(self.resumed)} parts are finished already")
        else:
            self.files.recorder = self.digests

    def put_old_back(self, record: journal.JournalRecord | None) -> None:
        """Undo the first of two renames, if an earlier run was stopped between them."""
        former = self.files.lstat(self.former)
        if former is None:
            return
        if not stat.S_ISDIR(former.st_mode):
            raise DestinationError(
                f"{describe_kind(former.st_mode)} is in the place of the former contents",
                file=self.former,
                hint="no run has made it: remove it",
            )
        current = self.files.stat(self.destination)
        if current is None:
            self.files.rename(self.former, self.destination)
            self.files.fsync_dir(self.destination.parent)
        elif record is None or record.commit != current.st_ino:
            raise DestinationError(
                f"an interrupted run left the former contents in {str(self.former)!r}",
                file=self.destination,
                hint="move or remove that folder first",
                error_id="interrupted-run",
            )

    def staged_inode(self) -> int | None:
        """Return the inode that is renamed to the destination; None if there is none."""
        status = self.files.lstat(self.path("") if self.is_file else self.tree)
        return None if status is None else status.st_ino

    # ---- writing

    def path(self, relative: str) -> Path:
        """See `Place`; creates parent folders.

        Raises:
            FormatError: the path is outside the checkpoint.
        """
        if self.is_file and relative in ("", self.destination.name):
            return self.tree / self.destination.name
        full = self.tree / check_inside(relative, self.destination)
        if full.parent not in self._folders:
            for folder in reversed(full.relative_to(self.tree).parents):
                self.files.make_own_folder(self.tree / folder)
            with self._mutex:
                self._folders.add(full.parent)
        return full

    def create(self, relative: str, num_bytes: int, cuts: Sequence[int] | None = ()) -> Path:
        """See `Place`; keeps data of an earlier run."""
        full = self.path(relative)
        fd = self.files.open_write(full)
        try:
            self.files.truncate(fd, num_bytes)
        finally:
            self.files.close(fd)
        if cuts is not None and not self.resumed:
            self.digests.register(full, num_bytes, cuts)
        return full

    def write(self, relative: str, data: bytes) -> Path:
        full = self.path(relative)
        fd = self.files.open_write(full)
        try:
            self.files.truncate(fd, len(data))
            if not self.resumed:
                self.digests.register(full, len(data))
            self.files.pwrite_all(fd, data, 0)
        finally:
            self.files.close(fd)
        return full

    def follow(self, context: object) -> Container[int]:
        """No unit: those of earlier runs are compared with the source (see `resumed`)."""
        return ()

    def finish(self, unit: int, note: str = "") -> None:
        """See `Place`. Thread-safe."""
        self.require_journal().finish(unit, note)
        with self._mutex:
            self.num_finished += 1

    def flush(self, *, threads: int = 1) -> None:
        """Make the data written so far survive a crash of the machine.

        It calls fsync on every file, so use it rarely. Units finished while it runs are not
        covered: call it when no unit is in progress. If it fails, the staged data is discarded,
        that of all workers.
        """
        files, folders = self.files.own_tree(self.tree)
        try:
            map_in_threads(self.files.fsync, files, threads=threads)
            for folder in reversed(folders):
                self.files.fsync_dir(folder)
        except StorageError:
            # Data that did not reach the disk may look intact in the page cache, and a second fsync
            # would succeed: no staged data can be trusted.
            self.num_finished, self.resumed = 0, set()
            if self.run is not None:
                with contextlib.suppress(StorageError):
                    self.discard()
            raise
        self.require_journal().durable()

    def require_journal(self) -> journal.Journal:
        """Return the journal, which is open inside `with`."""
        if self.journal is None:
            raise RuntimeError("a stage is used inside `with`")
        return self.journal

    # ---- the end

    def count_copied(self, planned: int) -> int:
        """The bytes that did not pass through this process: all that were planned."""
        return planned

    def complete_data(self, *, threads: int = 1) -> None:
        """Nothing: staged files can be read, and written again, until the commit."""

    def commit(self, *, fsync: bool = True, threads: int = 1) -> None:
        """See `Place`: rename the tree to the destination and remove the staging folder.

        With `fsync`, every file and folder is durable before the rename, and so is the rename.
        The overwritten checkpoint is removed last.

        Raises:
            DestinationError: another process created something at the destination.
            StorageError: a system call failed; the destination is unchanged, unless only the last
                fsync of its name failed.
        """
        record = self.require_journal()
        if fsync:
            self.flush(threads=threads)
        staged = self.staged_inode()
        if staged is None:
            raise ValueError(f"nothing was written to {self.tree}")
        record.commit(staged, "" if self.run is None else self._describe_staged())
        if fsync:
            self.files.fsync(self.staging / "journal")
            self.files.fsync_dir(self.staging)
        wait_for(self._check_before_rename, _TRANSIENT_S)
        self._rename()
        self.is_renamed = True
        if fsync:
            outermost = (
                self._new_folders[0].parent if self._new_folders else self.destination.parent
            )
            for folder in self.destination.parents:
                self.files.fsync_dir(folder)
                if folder == outermost:
                    break
            self.files.fsync_dir(self.staging)
        self.is_over = True
        try:
            if self.run is not None:
                self.run.leave_trace()
            else:
                self.remove_staged()
        except StorageError as e:
            self.messages.append(f"the checkpoint is complete, but left-overs remain: {e.message}")
            with contextlib.suppress(StorageError):
                self.release()

    def _describe_staged(self) -> str:
        return describe_state(self.files, self.path("") if self.is_file else self.tree)

    def _check_before_rename(self) -> None:
        self.check_in_place()
        self.destination_check.check_free()

    def _rename(self) -> None:
        destination, files = self.destination, self.files
        current = files.stat(destination)
        if self.is_file:
            files.rename(self.path(""), destination, replace=current is not None)
        elif current is None or not files.names(destination):
            files.rename(self.tree, destination)
        elif not files.exchange(self.tree, destination):
            files.rename(destination, self.former)
            try:
                files.rename(self.tree, destination)
            except BaseException:
                files.rename(self.former, destination)
                raise

    def leave(self) -> None:
        keep = self.is_renamed or self.has_progress
        if keep and not self.is_renamed:
            self.messages.append(self.describe_resume())
        self._leave(keep=keep)

    @property
    def has_progress(self) -> bool:
        """Whether this run, or one that it resumes, has finished some units."""
        return bool(self.num_finished or self.resumed)

    def _leave(self, *, keep: bool) -> None:
        """End without a commit; empty folders are removed in any case."""
        try:
            if self.lock is not None and not keep and self.lock.is_in_place():
                self.remove_staged()
        finally:
            self.release()
            self.remove_folders()

    def describe_resume(self) -> str:
        return (
            f"{self.num_finished + len(self.resumed)} finished parts are kept in {self.staging}: "
            "run the same command again to resume, or remove that folder"
        )

    def discard(self) -> None:
        self.remove_staged()
        self.is_over = True  # nothing is left to keep

    def remove_staged(self) -> None:
        """Remove the staging folder; the lock last, because other runs may wait for it."""
        self.clear()
        self.files.remove(self.staging / LOCK)
        self.release()
        self.remove_folders()

    def remove_folders(self) -> None:
        """Remove the staging folder and new folders above it, as far as they are empty."""
        if self.files.remove_empty(self.staging) and not self.is_renamed:
            for folder in reversed(self._new_folders):
                self.files.remove_empty(folder)

    def clear(self) -> None:
        """Empty the staging folder except for the lock."""
        if self.is_renamed:
            self._remove_former()
        else:
            self.put_old_back(None)
        self.close_journal()
        names = [] if self.files.lstat(self.staging) is None else self.files.names(self.staging)
        run_files = list_run_files(names)
        for name in run_files:
            self.files.remove(self.staging / name)
        self.files.remove(self.staging / "journal")  # it vouches for the tree
        if run_files:  # and so do the records of workers, which are to be gone first
            self.files.fsync_dir(self.staging)
        self.files.remove(self.tree)
        self.files.remove(self.staging / PUBLISHED)
        self.is_cleared = True

    def _remove_former(self) -> None:
        """Remove the former checkpoint, durably before the journal, which says that it may go."""
        if self.files.lstat(self.former) is not None:
            self.files.remove(self.former)
            self.files.fsync_dir(self.staging)

    def close_journal(self) -> None:
        """Close the journal; a second call does nothing."""
        record, self.journal = self.journal, None
        if record is not None:
            record.close()

    def release(self) -> None:
        """Release all locks, and close the journal."""
        try:
            if self.run is not None:
                self.run.release()
        finally:
            lock, self.lock = self.lock, None
            self.files.recorder = None
            try:
                self.close_journal()
            finally:
                if lock is not None:
                    lock.release()
