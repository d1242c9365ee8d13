"""The staging folder of a destination that several workers write together."""

from __future__ import annotations

import contextlib
import hashlib
import random
import socket
import stat
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from megtool.digests.files import FileDigests
from megtool.errors import DestinationError, FormatError, MegtoolError, StorageError
from megtool.process.threads import map_in_threads
from megtool.process.worker_identity import WorkerIdentity
from megtool.staging.folder import journal
from megtool.staging.folder.stage import StagingFolder
from megtool.staging.manifest import (
    PUBLISH_LOCK,
    PUBLISHED,
    PUBLISHER,
    Manifest,
    clean_command,
    find_missing_workers,
    find_worker_files,
    is_running_already,
    list_run_files,
    read_manifest,
    worker_file,
)
from megtool.staging.nested_runs import LOCK
from megtool.staging.workers.record import (
    MAX_RECORD_BYTES,
    WorkerRecord,
    encode_record,
    parse_record_of,
)
from megtool.storage.files import Files
from megtool.storage.location.path import is_remote
from megtool.storage.lock import LockFile, find_holder

_JOIN_S = 20.0  # others hold the lock alone for moments only
_PAUSE_S = 0.05
_FSYNC_THREADS = 4


class SharedStaging(StagingFolder):
    """The staging folder `.NAME.megtool` of one worker of several, each in a process of its own.

    Besides `tree` and `lock`, which all workers share, it holds the manifest of the run
    (`workers`), and of every worker a lock, a journal, and when its share is complete the record
    with which it signs off. Whoever holds `publish.lock` and finds all records commits; `journal`
    is its own. Of a committed run `published` stays: a worker that is started later finds there
    that the destination `is_published`, as long as its files are those that were committed.

    `record` is the worker's own, if it has signed off in an earlier run. A
    publication `is_repeated` if an earlier one was interrupted, which with `rewrites_data` may have
    changed what workers wrote.

    The run is left by leaving the `with`; nobody removes what others have finished.
    """

    def __init__(
        self,
        destination: Path,
        *,
        worker: WorkerIdentity,
        files: Files,
        fingerprint: str,
        overwrite: bool = False,
        is_file: bool = False,
        sources: Sequence[Path] = (),
        rewrites_data: bool = False,
    ) -> None:
        super().__init__(
            destination,
            files=files,
            fingerprint=fingerprint,
            overwrite=overwrite,
            is_file=is_file,
            sources=sources,
        )
        self.worker = worker
        self.record: WorkerRecord | None = None
        self.is_published = False
        self.is_repeated = False
        self.publisher: int | None = None  # another worker that has begun to publish
        self.rewrites_data = rewrites_data
        self._manifest = Manifest(fingerprint=fingerprint, count=worker.count)
        self._own_lock: LockFile | None = None
        self._publish_lock: LockFile | None = None
        self._is_publisher = False

    # ---- before the first byte

    def check(self) -> None:
        """Refuse a destination that cannot be written, unless workers have completed it."""
        self._destination_check.check_surroundings()
        if self._read_publication() is None:
            self._destination_check.check_free()

    def __enter__(self) -> SharedStaging:
        self._destination_check.check_surroundings()
        self.is_published = self._is_complete()
        if self.is_published:
            self._remove_leftovers()
            return self
        if self.files.lstat(self.staging) is None:
            self._destination_check.check_free()
        try:
            self._join()
            if not self.is_published:
                self._take_part()
        except BaseException:
            with contextlib.suppress(MegtoolError):
                self._leave_run()
            raise
        return self

    def _is_complete(self) -> bool:
        """Whether workers have committed this plan, and its files are still those."""
        record = self._read_publication()
        if record is None or record.fingerprint != self._manifest.fingerprint:
            return False
        self.files.fsync_dir(self.destination.parent)  # the one that renamed may have been killed
        return True

    def _read_publication(self) -> journal.JournalRecord | None:
        """The journal of the publication that made the current destination, if workers made it."""
        target = self.files.stat(self.destination)
        if target is None or self.files.lstat(self.staging) is None:
            return None
        for name in ("journal", PUBLISHED):
            record = journal.read_journal(self.files, self.staging / name)
            if record is None or not record.state or record.commit != target.st_ino:
                continue
            if record.state == describe_state(self.files, self.destination):
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
                manifest = read_manifest(self.files, self.staging)
                if manifest is not None:
                    if not self._has_ended():
                        self._manifest.check(manifest, self.staging)
                        self._check_in_place()
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
            self._lock = LockFile(
                self.files, self.staging / LOCK, self._make_staging, shared=shared
            )
        except DestinationError as e:
            if e.id != "destination-locked" or time.monotonic() > end:
                raise
            return False
        return True

    def _has_ended(self) -> bool:
        self.is_published = self._is_complete()
        return self.is_published

    def _warn_without_locks(self) -> None:
        if self._lock is not None and not self._lock.is_certain:
            self.messages.append(
                f"{self.staging} is on a file system without locks: make sure that no worker is "
                "started twice, and no second run writes the same destination"
            )

    def _begin(self) -> None:
        """Begin a run in a staging folder that this process holds alone.

        Raises:
            DestinationError: an earlier run has left its work, or the destination is not free.
        """
        if read_manifest(self.files, self.staging) is not None or self._has_ended():
            return
        if set(self.files.names(self.staging)) - {LOCK, PUBLISHED}:
            self._clear_earlier()
        self._destination_check.check_free()
        self._check_in_place()
        self._manifest.create(self.files, self.staging, self.worker.index)

    def _clear_earlier(self) -> None:
        """Remove what an earlier run has left that is worth nothing.

        Raises:
            DestinationError: it has finished parts.
        """
        record = journal.read_journal(self.files, self.staging / "journal")
        staged = self._staged_inode()
        self._cleared = not (record and record.finished)
        self._put_old_back(record)
        if record and record.commit is not None and record.commit != staged:
            current = self.files.stat(self.destination)
            self._renamed = current is not None and record.commit == current.st_ino
            self._cleared = True
        elif record and record.finished:
            raise DestinationError(
                f"an interrupted run without workers has left {len(record.finished)} finished "
                "parts here",
                file=self.staging,
                hint="run its command again to finish it; or remove what it left: "
                f"{clean_command(self.staging)}",
                error_id="interrupted-run",
            )
        self._clear()
        self._renamed = False

    def _take_part(self) -> None:
        """Take the place of this worker, and read what it has finished already."""
        own = self.staging / worker_file(self.worker.index, "lock")
        try:
            self._own_lock = LockFile(self.files, own, _no_folder)
        except DestinationError as e:
            if e.id != "destination-locked":
                raise
            raise is_running_already(self.worker, own, e) from e
        self._check_destination()
        self.record = self._read_record(self.worker.index)
        if self.record is not None:
            return
        self.files.make_own_folder(self.tree)
        path = self.staging / worker_file(self.worker.index, "journal")
        record = journal.read_journal(self.files, path)
        if record is not None and record.fingerprint != self._manifest.fingerprint:
            record = None
            self.files.remove(path)
        if record and record.lost:
            self.messages.append(
                f"the machine was restarted since, or is another one: {record.lost} parts may not "
                "have reached the disk and are written again"
            )
        record = record or journal.JournalRecord(fingerprint=self._manifest.fingerprint)
        self._journal = journal.Journal(self.files, path, record)
        self.resumed = set(record.finished)
        if self.resumed:
            self.messages.append(
                f"resuming: {len(self.resumed)} parts of this worker are finished already"
            )
        elif record.num_bytes == 0:
            self.files.recorder = self.digests

    def _check_destination(self) -> None:
        """Refuse a destination that appeared since the run began, unless it is being published."""
        if self._read_publication() is None:
            self._destination_check.check_free()

    # ---- the end of a share

    @property
    def has_all_digests(self) -> bool:
        """Whether `digests` has followed everything that this worker wrote."""
        return self.files.recorder is self.digests

    def sign_off(self, record: WorkerRecord, paths: Sequence[Path], *, fsync: bool) -> None:
        """Record that the share of this worker is complete, in these files.

        Raises:
            StorageError: the files did not reach the disk; this worker starts from the beginning.
        """
        if fsync:
            try:
                map_in_threads(self.files.fsync, paths, threads=_FSYNC_THREADS)
                self._flush_names(paths)
            except StorageError:
                self._close_journal()
                self.files.remove(self.staging / worker_file(self.worker.index, "journal"))
                self._finished, self.resumed = 0, set()
                raise
            self._require_journal().durable()
        self.files.recorder = None
        self._close_journal()
        path = self.staging / worker_file(self.worker.index, "record")
        temporary = worker_file(self.worker.index, "new")
        self.files.replace_file(path, encode_record(record), temporary, fsync=fsync)
        if fsync:
            self.files.fsync_dir(self.staging)
        self.record = record

    def _flush_names(self, paths: Sequence[Path]) -> None:
        """Make the names of files durable: without them, others would create them anew, empty."""
        folders = {folder for path in paths for folder in path.parents}
        for folder in sorted(folders | {self.tree}, reverse=True):
            if folder.is_relative_to(self.staging):
                self.files.fsync_dir(folder)

    def find_missing(self) -> list[int]:
        """The workers that have not signed off; all of them if the run was given up."""
        try:
            names = self.files.names(self.staging) if self._is_in_place() else []
        except StorageError:
            if self._is_in_place():
                raise
            names = []  # removed just now
        return find_missing_workers(names, self.worker.count)

    def _is_in_place(self) -> bool:
        return self._lock is not None and self._lock.is_in_place()

    def check_files(self, record: WorkerRecord, sizes: Mapping[str, int]) -> None:
        """Refuse a record of files that are not there as its worker left them.

        Raises:
            FormatError: one is missing, or has another size.
        """
        for name in record.files:
            status = self.files.lstat(self.path(name))
            if status is None or status.st_size != sizes.get(name):
                raise FormatError(
                    f"worker {record.index} has written this file, and it is not there as it was",
                    file=self.tree / name,
                    hint="another program has removed or changed it: start again after "
                    f"{clean_command(self.staging)}",
                )

    def _read_record(self, index: int) -> WorkerRecord | None:
        path = self.staging / worker_file(index, "record")
        data = self.files.read_whole(path, at_most=MAX_RECORD_BYTES, is_own=True)
        return None if data is None else parse_record_of(self._manifest, index, data, path)

    # ---- publication

    def begin_publication(self) -> list[WorkerRecord] | None:
        """Become the one that publishes, and read all records; None if another one does or has.

        Raises:
            FormatError: a record is damaged, or of another run.
        """
        if self.find_missing():
            self.is_published = self._is_complete()
            return None
        try:
            self._publish_lock = LockFile(self.files, self.staging / PUBLISH_LOCK, _no_folder)
        except DestinationError:  # held, or the folder is gone
            self.is_published = self._is_complete()
            return None
        if self.find_missing() or self._has_ended() or not self._claim():
            self.is_published = self._is_complete()
            self._release_publication()
            return None
        self._check_in_place()
        self._destination_check.check_free()
        records = [self._read_record(n) for n in range(self.worker.count)]
        path = self.staging / "journal"
        self.is_repeated = self.files.lstat(path) is not None
        record = journal.JournalRecord(fingerprint=self._manifest.fingerprint)
        self._journal = journal.Journal(self.files, path, record)
        self.files.fsync(path)  # what is changed from here on must be known to be
        self.files.fsync_dir(self.staging)
        self.resumed, self.digests = set(), FileDigests()
        self.files.recorder = self.digests
        self._is_publisher = True
        return [r for r in records if r is not None]

    def _claim(self) -> bool:
        """Claim the publication for this worker, as locks may exclude processes of one host alone.

        Only the worker that has claimed it goes on with it. Another one may if that is not running
        any more, on the same host, where locks say so.
        """
        path, host = self.staging / PUBLISHER, socket.gethostname()
        own = f"{self.worker.index} {host}\n".encode()
        temporary = worker_file(self.worker.index, "claim")
        if self.files.create_file(path, own, temporary):
            return True
        index, _, name = (self.files.read_whole(path, at_most=1000) or b"").decode().partition(" ")
        self.publisher = int(index) if index.isdecimal() else None
        if self.publisher == self.worker.index:
            return True
        if name.strip() != host or self._is_running(worker_file(self.publisher or 0, "lock")):
            return False
        self.files.replace_file(path, own, temporary, fsync=True)
        return True

    def _is_running(self, lock: str) -> bool:
        """Whether a worker of this host holds its lock."""
        return find_holder(self.files, self.staging / lock) is not None

    def finish(self, unit: int, note: str = "") -> None:
        """Record that a unit is finished; the publisher's are not recorded."""
        if not self._is_publisher:
            super().finish(unit, note)

    def _committed_state(self) -> str:
        return describe_state(self.files, self.path("") if self.is_file else self.tree)

    def commit(self, *, fsync: bool = True, threads: int = 1) -> None:
        """Commit what all workers have staged; see `StagingFolder.commit`."""
        if not self._is_publisher:
            raise RuntimeError("only the worker that publishes commits")
        super().commit(fsync=fsync, threads=threads)
        self.is_published = True

    def _discard(self) -> None:
        """Remove what is staged; a committed run leaves a trace for workers that are late."""
        if self._renamed and self._committed:
            self._close_journal()
            self._remove_run(self.files.names(self.staging))
            self._release()
        else:
            super()._discard()

    def _remove_run(self, names: Sequence[str]) -> None:
        """Remove what a committed run has left, except for its trace.

        Until the end, its journal vouches for what is at the destination.
        """
        self.files.remove(self._replaced)
        for name in list_run_files(names):
            self.files.remove(self.staging / name)
        self.files.remove(self.tree)
        if "journal" in names:
            self.files.rename(self.staging / "journal", self.staging / PUBLISHED)
        self.files.remove(self.staging / LOCK)

    def _remove_leftovers(self) -> None:
        """Remove what a publisher has left that was stopped after its rename."""
        names = self.files.names(self.staging)
        if names == [PUBLISHED]:
            return
        with contextlib.suppress(MegtoolError):
            lock = LockFile(self.files, self.staging / LOCK, _no_folder)
            try:
                if self._is_complete():
                    self._remove_run(self.files.names(self.staging))
            finally:
                lock.release()

    # ---- leaving

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._committed:
            return
        if error is not None and self.record is None and (self._finished or self.resumed):
            self.messages.append(self.describe_resume())
        with contextlib.suppress(*[MegtoolError] if error else []):
            self._leave_run()

    def _leave_run(self) -> None:
        """Release all locks; remove the run if it has nothing that is worth keeping."""
        idle = self.record is None and not (self._finished or self.resumed)
        index, self._is_publisher = self.worker.index, False
        try:
            self._close_journal()
            own = self._own_lock is not None and self._is_in_place()
            if own and idle:
                self.files.remove(self.staging / worker_file(index, "journal"))
            if own:
                self.files.remove(self.staging / worker_file(index, "lock"))
        finally:
            self._release()
        if idle and not self.is_published:
            self._remove_if_empty()

    def _remove_if_empty(self) -> None:
        """Remove a run of which no worker has anything, if this is the last process in it."""
        if self.files.lstat(self.staging) is None:
            self._remove_folders()
            return
        with contextlib.suppress(DestinationError):
            self._lock = LockFile(self.files, self.staging / LOCK, _no_folder)
            names = self.files.names(self.staging)
            is_new = set(names) <= {LOCK}
            is_ours = read_manifest(self.files, self.staging) == self._manifest
            has_work = find_worker_files(names, "lock", "journal", "record")
            if is_new or (is_ours and not has_work and "journal" not in names):
                self._discard()
        self._release()
        self._remove_folders()

    def discard(self) -> None:
        """Remove everything that was staged, of all workers.

        Raises:
            RuntimeError: this worker does not publish, so others may be at work.
        """
        if not self._is_publisher:
            raise RuntimeError("only the worker that publishes discards the work of all")
        super().discard()

    def flush(self, *, threads: int = 1) -> None:
        """Make all data survive a crash; if that fails, the work of all workers is discarded."""
        try:
            super().flush(threads=threads)
        except StorageError:
            with contextlib.suppress(StorageError):
                self.discard()
            raise

    def describe_resume(self) -> str:
        """The message about a worker that ended early."""
        return (
            f"{self._finished + len(self.resumed)} finished parts of {self.worker} are kept in "
            f"{self.staging}: start it again to resume, or remove what all have left: "
            f"{clean_command(self.staging)}"
        )

    def _release_lock(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()

    def _release_publication(self) -> None:
        lock, self._publish_lock = self._publish_lock, None
        if lock is None:
            return
        try:
            if lock.is_in_place():  # without locks, it would name this process as long as it lives
                self.files.remove(self.staging / PUBLISH_LOCK)
        finally:
            lock.release()

    def _release(self) -> None:
        lock, self._own_lock = self._own_lock, None
        try:
            self._release_publication()
        finally:
            try:
                if lock is not None:
                    lock.release()
            finally:
                super()._release()


def describe_state(files: Files, path: Path) -> str:
    """A hash of the names, sizes and times of the files of a checkpoint; in stores, of versions."""
    h = hashlib.sha256()
    status = files.stat(path)
    is_folder = status is not None and stat.S_ISDIR(status.st_mode)
    for file in sorted(files.tree(path)[0]) if is_folder else [path]:
        status = files.stat(file)
        name = str(file.relative_to(path))
        version = status.st_ino if status and is_remote(file) else 0
        h.update(repr((name, status and (status.st_size, status.st_mtime_ns), version)).encode())
    return h.hexdigest()[:32]


def _no_folder() -> None:
    """The folder of the lock is there, or nothing is to be locked."""
