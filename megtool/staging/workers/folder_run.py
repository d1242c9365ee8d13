"""A run of workers in the staging folder of a destination that they write together."""

from __future__ import annotations

import contextlib
import random
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from megtool.digests.files import FileDigests
from megtool.errors import DestinationError, FormatError, MegtoolError, StorageError
from megtool.process.threads import map_in_threads
from megtool.process.worker_identity import WorkerIdentity
from megtool.staging.folder import journal
from megtool.staging.folder.place import FolderPlace
from megtool.staging.manifest import (
    PUBLISH_LOCK,
    PUBLISHED,
    PUBLISHER,
    Manifest,
    clean_command,
    find_worker_files,
    is_running_already,
    list_run_files,
    read_manifest,
    worker_file,
)
from megtool.staging.nested_runs import LOCK
from megtool.staging.record import (
    MAX_RECORD_BYTES,
    WorkerRecord,
    encode_record,
    parse_record_of,
)
from megtool.storage.lock import LockFile, find_holder
from megtool.storage.tree_state import describe_state

_JOIN_S = 20.0  # others hold the lock alone for moments only
_PAUSE_S = 0.05
_FSYNC_THREADS = 4


class FolderRun:
    """See `SharedRun`: the staging folder `.NAME.megtool` of several workers.

    Besides `tree` and `lock`, which all workers share, it holds the manifest of the run
    (`workers`), and of every worker a lock, a journal, and when its share is complete the record
    with which it signs off. Whoever holds `publish.lock` and finds all records commits; `journal`
    is its own. Of a committed run `published` stays: a worker that is started later finds there
    that the destination `is_published`, as long as its files are those that were committed.

    `rewrites_data`: a publication may change what workers wrote. The run is left without removing
    what others have finished.
    """

    def __init__(
        self, place: FolderPlace, worker: WorkerIdentity, *, rewrites_data: bool = False
    ) -> None:
        self.place, self.worker, self.rewrites_data = place, worker, rewrites_data
        self.is_repeated = False
        self.record: WorkerRecord | None = None
        self.is_published = False
        self.publisher: int | None = None
        self._files, self._staging = place.files, place.staging
        self._manifest = Manifest(fingerprint=place.fingerprint, count=worker.count)
        self._own_lock: LockFile | None = None
        self._publish_lock: LockFile | None = None
        place.run = self

    # ---- before the first byte

    def check(self) -> None:
        self.place.destination_check.check_surroundings()
        if self._read_publication() is None:
            self.place.destination_check.check_free()

    def enter(self) -> None:
        self.place.destination_check.check_surroundings()
        self.is_published = self.is_complete()
        if self.is_published:
            self._remove_leftovers()
            return
        if self._files.lstat(self._staging) is None:
            self.place.destination_check.check_free()
        try:
            self._join()
            if not self.is_published:
                self._take_part()
        except BaseException:
            with contextlib.suppress(MegtoolError):
                self.leave(is_failed=False)
            raise

    def is_complete(self) -> bool:
        """See `SharedRun`: its files are still those that were committed."""
        record = self._read_publication()
        if record is None or record.fingerprint != self._manifest.fingerprint:
            return False
        # The process that renamed may have been killed before it made the name durable.
        self._files.fsync_dir(self.place.destination.parent)
        return True

    def _read_publication(self) -> journal.JournalRecord | None:
        """The journal of the publication that made the current destination, if workers made it."""
        files, destination = self._files, self.place.destination
        target = files.stat(destination)
        if target is None or files.lstat(self._staging) is None:
            return None
        for name in ("journal", PUBLISHED):
            record = journal.read_journal(files, self._staging / name)
            if record is None or not record.state or record.commit != target.st_ino:
                continue
            if record.state == describe_state(files, destination):
                return record
        return None

    def _join(self) -> None:
        """Share the lock of a run with this manifest; begin one if there is none.

        Raises:
            DestinationError: another run writes the destination, or has left its work.
        """
        end = time.monotonic() + _JOIN_S
        while True:
            if self._try_lock(end, shared=True):
                manifest = read_manifest(self._files, self._staging)
                if manifest is not None:
                    self.is_published = self.is_complete()
                    if not self.is_published:
                        self._manifest.check(manifest, self._staging)
                        self.place.check_in_place()
                    self._warn_without_locks()
                    return
                self._release_lock()
                if self._try_lock(end, shared=False):
                    self._begin()
                    self._release_lock()
                    if self.is_published:
                        return
            time.sleep(_PAUSE_S * random.random())

    def _try_lock(self, end: float, *, shared: bool) -> bool:
        """Try to lock the run; False if others hold it, who may be about to release it.

        Raises:
            DestinationError: they still do at the time `end`.
        """
        try:
            self.place.lock = LockFile(
                self._files, self._staging / LOCK, self.place.make_staging, shared=shared
            )
        except DestinationError as e:
            if e.id != "destination-locked" or time.monotonic() > end:
                raise
            return False
        return True

    def _warn_without_locks(self) -> None:
        if self.place.lock is not None and not self.place.lock.is_certain:
            self.place.messages.append(
                f"{self._staging} is on a file system without locks: make sure that no worker is "
                "started twice, and no second run writes the same destination"
            )

    def _begin(self) -> None:
        """Begin a run in a staging folder that this process holds alone.

        Raises:
            DestinationError: an earlier run has left its work, or the destination is not free.
        """
        if read_manifest(self._files, self._staging) is not None:
            return
        self.is_published = self.is_complete()
        if self.is_published:
            return
        if set(self._files.names(self._staging)) - {LOCK, PUBLISHED}:
            self._clear_earlier()
        self.place.destination_check.check_free()
        self.place.check_in_place()
        self._manifest.create(self._files, self._staging, self.worker.index)

    def _clear_earlier(self) -> None:
        """Remove what an earlier run has left that is worth nothing.

        Raises:
            DestinationError: it has finished parts.
        """
        place = self.place
        record = journal.read_journal(self._files, self._staging / "journal")
        staged = place.staged_inode()
        place.is_cleared = not (record and record.finished)
        place.put_old_back(record)
        if record and record.commit is not None and record.commit != staged:
            current = self._files.stat(place.destination)
            place.is_renamed = current is not None and record.commit == current.st_ino
            place.is_cleared = True
        elif record and record.finished:
            raise DestinationError(
                f"an interrupted run without workers has left {len(record.finished)} finished "
                "parts here",
                file=self._staging,
                hint="run its command again to finish it; or remove what it left: "
                f"{clean_command(self._staging)}",
                error_id="interrupted-run",
            )
        place.clear()
        place.is_renamed = False

    def _take_part(self) -> None:
        """Take the place of this worker, and read what it has finished already."""
        own = self._staging / worker_file(self.worker.index, "lock")
        try:
            self._own_lock = LockFile(self._files, own, _no_folder)
        except DestinationError as e:
            if e.id != "destination-locked":
                raise
            raise is_running_already(self.worker, own, e) from e
        if self._read_publication() is None:  # else it is being published
            self.place.destination_check.check_free()
        self.record = self.read_record(self.worker.index)
        if self.record is None:
            self._resume()

    def _resume(self) -> None:
        place = self.place
        self._files.make_own_folder(place.tree)
        path = self._staging / worker_file(self.worker.index, "journal")
        record = journal.read_journal(self._files, path)
        if record is not None and record.fingerprint != self._manifest.fingerprint:
            record = None
            self._files.remove(path)
        if record and record.lost:
            place.messages.append(
                f"the machine was restarted since, or is another one: {record.lost} parts may not "
                "have reached the disk and are written again"
            )
        record = record or journal.JournalRecord(fingerprint=self._manifest.fingerprint)
        place.journal = journal.Journal(self._files, path, record)
        place.resumed = set(record.finished)
        if place.resumed:
            place.messages.append(
                f"resuming: {len(place.resumed)} parts of this worker are finished already"
            )
        elif record.num_bytes == 0:
            self._files.recorder = place.digests

    # ---- the end of a share

    @property
    def has_all_digests(self) -> bool:
        return self._files.recorder is self.place.digests

    def sign_off(self, record: WorkerRecord, paths: Sequence[Path], *, fsync: bool) -> None:
        """See `SharedRun`.

        Raises:
            StorageError: the files did not reach the disk; this worker starts from the beginning.
        """
        place = self.place
        if fsync:
            try:
                map_in_threads(self._files.fsync, paths, threads=_FSYNC_THREADS)
                self._flush_names(paths)
            except StorageError:
                place.close_journal()
                self._files.remove(self._staging / worker_file(self.worker.index, "journal"))
                place.num_finished, place.resumed = 0, set()
                raise
            place.require_journal().durable()
        self._files.recorder = None
        place.close_journal()
        path = self._staging / worker_file(self.worker.index, "record")
        temporary = worker_file(self.worker.index, "new")
        self._files.replace_file(path, encode_record(record), temporary, fsync=fsync)
        if fsync:
            self._files.fsync_dir(self._staging)
        self.record = record

    def _flush_names(self, paths: Sequence[Path]) -> None:
        """Make the names of files durable: without them, others would create them anew, empty."""
        folders = {folder for path in paths for folder in path.parents}
        for folder in sorted(folders | {self.place.tree}, reverse=True):
            if folder.is_relative_to(self._staging):
                self._files.fsync_dir(folder)

    def names(self) -> list[str]:
        try:
            return self._files.names(self._staging) if self._is_in_place() else []
        except StorageError:
            if self._is_in_place():
                raise
            return []  # removed just now

    def _is_in_place(self) -> bool:
        return self.place.lock is not None and self.place.lock.is_in_place()

    def check_files(self, record: WorkerRecord, sizes: Mapping[str, int]) -> None:
        """See `SharedRun`.

        Raises:
            FormatError: one is missing, or has another size.
        """
        for name in record.files:
            status = self._files.lstat(self.place.path(name))
            if status is None or status.st_size != sizes.get(name):
                raise FormatError(
                    f"worker {record.index} has written this file, and it is not there as it was",
                    file=self.place.tree / name,
                    hint="another program has removed or changed it: start again after "
                    f"{clean_command(self._staging)}",
                )

    def read_record(self, index: int) -> WorkerRecord | None:
        path = self._staging / worker_file(index, "record")
        data = self._files.read_whole(path, at_most=MAX_RECORD_BYTES, is_own=True)
        return None if data is None else parse_record_of(self._manifest, index, data, path)

    # ---- publication

    def lock_publication(self) -> bool:
        try:
            self._publish_lock = LockFile(self._files, self._staging / PUBLISH_LOCK, _no_folder)
        except DestinationError:  # held, or the folder is gone
            return False
        return True

    def begin_publication(self) -> None:
        place, path = self.place, self._staging / "journal"
        self.is_repeated = self._files.lstat(path) is not None
        record = journal.JournalRecord(fingerprint=self._manifest.fingerprint)
        place.journal = journal.Journal(self._files, path, record)
        self._files.fsync(path)  # what is changed from here on must be known to be
        self._files.fsync_dir(self._staging)
        place.resumed, place.digests = set(), FileDigests()
        self._files.recorder = place.digests

    def claim_publication(self) -> bool:
        """See `SharedRun`: locks may exclude processes of one host alone.

        Only the worker that has claimed it goes on with it. Another one may if that is not running
        any more, on the same host, where locks say so.

        Raises:
            DestinationError: the destination is not free, or a folder above was replaced.
        """
        if not self._claim():
            return False
        self.place.check_in_place()
        self.place.destination_check.check_free()
        return True

    def _claim(self) -> bool:
        path, host = self._staging / PUBLISHER, socket.gethostname()
        own = f"{self.worker.index} {host}\n".encode()
        temporary = worker_file(self.worker.index, "claim")
        if self._files.create_file(path, own, temporary):
            return True
        claim = (self._files.read_whole(path, at_most=1000) or b"").decode(errors="replace")
        index, _, name = claim.partition(" ")
        self.publisher = int(index) if index.isdecimal() else None
        if self.publisher == self.worker.index:
            return True
        if name.strip() != host or self._is_running(worker_file(self.publisher or 0, "lock")):
            return False
        self._files.replace_file(path, own, temporary, fsync=True)
        return True

    def _is_running(self, lock: str) -> bool:
        """Whether a worker of this host holds its lock."""
        return find_holder(self._files, self._staging / lock) is not None

    def leave_trace(self) -> None:
        """See `SharedRun`: a committed run leaves its journal."""
        self.place.close_journal()
        self._remove_run(self._files.names(self._staging))
        self.place.release()

    def _remove_run(self, names: Sequence[str]) -> None:
        """Remove what a committed run has left, except for its trace.

        Until the end, its journal vouches for what is at the destination.
        """
        self._files.remove(self.place.former)
        for name in list_run_files(names):
            self._files.remove(self._staging / name)
        self._files.remove(self.place.tree)
        if "journal" in names:
            self._files.rename(self._staging / "journal", self._staging / PUBLISHED)
        self._files.remove(self._staging / LOCK)

    def _remove_leftovers(self) -> None:
        """Remove what a publisher has left that was stopped after its rename."""
        names = self._files.names(self._staging)
        if names == [PUBLISHED]:
            return
        with contextlib.suppress(MegtoolError):
            lock = LockFile(self._files, self._staging / LOCK, _no_folder)
            try:
                if self.is_complete():
                    self._remove_run(self._files.names(self._staging))
            finally:
                lock.release()

    # ---- leaving

    def leave(self, *, is_failed: bool) -> None:
        """See `SharedRun`; a run that has nothing that is worth keeping is removed."""
        place = self.place
        is_idle = self.record is None and not place.has_progress
        if is_failed and self.record is None and place.has_progress:
            place.messages.append(self.describe_resume())
        try:
            place.close_journal()
            own = self._own_lock is not None and self._is_in_place()
            if own and is_idle:
                self._files.remove(self._staging / worker_file(self.worker.index, "journal"))
            if own:
                self._files.remove(self._staging / worker_file(self.worker.index, "lock"))
        finally:
            place.release()
        if is_idle and not self.is_published:
            self._remove_if_empty()

    def _remove_if_empty(self) -> None:
        """Remove a run of which no worker has anything, if this is the last process in it."""
        if self._files.lstat(self._staging) is None:
            self.place.remove_folders()
            return
        with contextlib.suppress(DestinationError):
            self.place.lock = LockFile(self._files, self._staging / LOCK, _no_folder)
            names = self._files.names(self._staging)
            is_new = set(names) <= {LOCK}
            is_ours = read_manifest(self._files, self._staging) == self._manifest
            has_work = find_worker_files(names, "lock", "journal", "record")
            if is_new or (is_ours and not has_work and "journal" not in names):
                self.place.remove_staged()
        self.place.release()
        self.place.remove_folders()

    def describe_resume(self) -> str:
        count = self.place.num_finished + len(self.place.resumed)
        return (
            f"{count} finished parts of {self.worker} are kept in {self._staging}: start it "
            "again to resume, or remove what all have left: "
            f"{clean_command(self._staging)}"
        )

    def _release_lock(self) -> None:
        lock, self.place.lock = self.place.lock, None
        if lock is not None:
            lock.release()

    def unlock_publication(self) -> None:
        lock, self._publish_lock = self._publish_lock, None
        if lock is None:
            return
        try:
            if lock.is_in_place():  # without locks, it would name this process as long as it lives
                self._files.remove(self._staging / PUBLISH_LOCK)
        finally:
            lock.release()

    def release(self) -> None:
        lock, self._own_lock = self._own_lock, None
        try:
            self.unlock_publication()
        finally:
            if lock is not None:
                lock.release()


def _no_folder() -> None:
    """The folder of the lock is there, or nothing is to be locked."""
