"""A checkpoint under construction: entered, written and committed, by one process or by several."""

from __future__ import annotations

import contextlib
from collections.abc import Container, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from megtool.digests.crc32c import Sidecar
from megtool.digests.files import FileDigests
from megtool.errors import MegtoolError
from megtool.staging.manifest import find_missing_workers
from megtool.staging.place import Place, SharedRun
from megtool.staging.record import WorkerRecord


class Stage:
    """A checkpoint that is written at a place until it is complete; used inside `with`.

    After any interruption the destination is absent or complete, or its readers are told that it
    is not whole. A run that ends early leaves its work, and the next run of the same plan resumes.

    With a `run`, this process is one worker of several: unless the destination `is_published`, and
    unless it has signed off already, it copies its share and signs off. Then it calls
    `begin_publication`, and commits if it gets the records of all. Without one, it does everything.

    `sidecar` are the digests that were written to the checkpoint.
    """

    def __init__(self, place: Place, run: SharedRun | None = None) -> None:
        self.place, self.run = place, run
        self.files, self.is_file, self.messages = place.files, place.is_file, place.messages
        self.sidecar: Sidecar | None = None
        self._is_publisher = False

    @property
    def destination(self) -> Path:
        """Where the checkpoint appears."""
        return self.place.destination

    @property
    def staging(self) -> Path:
        """The staging area beside the destination."""
        return self.place.staging

    @property
    def tree(self) -> Path:
        """Where its files can be read before the commit."""
        return self.place.tree

    @property
    def resumed(self) -> set[int]:
        """Units that an earlier run has finished."""
        return self.place.resumed

    @property
    def digests(self) -> FileDigests:
        """Digests of what this process writes."""
        return self.place.digests

    def check(self) -> None:
        """Refuse a destination that cannot or must not be written. Writes nothing.

        Raises:
            DestinationError: it must not.
        """
        (self.run or self.place).check()

    def check_early(self) -> None:
        """Refuse a destination before any work, when there is no plan yet.

        Raises:
            DestinationError: it must not be written.
        """
        self.place.check_early()

    def __enter__(self) -> Self:
        (self.run or self.place).enter()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.place.is_over:
            return
        with contextlib.suppress(*[MegtoolError] if error else []):
            if self.run is None:
                self.place.leave()
            else:
                self.run.leave(is_failed=error is not None)

    # ---- writing

    def require_space(self, num_bytes: int) -> None:
        self.place.require_space(num_bytes)

    def path(self, relative: str) -> Path:
        return self.place.path(relative)

    def create(self, relative: str, num_bytes: int, cuts: Sequence[int] | None = ()) -> Path:
        return self.place.create(relative, num_bytes, cuts)

    def write(self, relative: str, data: bytes) -> Path:
        return self.place.write(relative, data)

    def follow(self, context: object) -> Container[int]:
        """See `Place`; the publisher has the records of all workers instead."""
        return () if self._is_publisher else self.place.follow(context)

    def finish(self, unit: int, note: str = "") -> None:
        """See `Place`; what the publisher does is not recorded."""
        if not self._is_publisher:
            self.place.finish(unit, note)

    def count_copied(self, planned: int) -> int:
        return self.place.count_copied(planned)

    # ---- publication by workers

    def find_missing(self) -> list[int]:
        """Return the workers that have not signed off; all of them if the run was given up."""
        run = self.require_run()
        return find_missing_workers(run.names(), run.worker.count)

    def begin_publication(self) -> list[WorkerRecord] | None:
        """Become the one that publishes, and read all records; None if another one does or has.

        Raises:
            FormatError: a record is damaged, or of another run.
        """
        run = self.require_run()
        if not self.find_missing() and run.lock_publication():
            if not self.find_missing() and not run.is_complete() and run.claim_publication():
                records = [r for n in range(run.worker.count) if (r := run.read_record(n))]
                if len(records) == run.worker.count:  # else one that had stalled has published
                    run.begin_publication()
                    self._is_publisher = True
                    return records
            run.unlock_publication()
        run.is_published = run.is_complete()
        return None

    def require_run(self) -> SharedRun:
        """Return the run of workers that this process is one of."""
        if self.run is None:
            raise RuntimeError("this process writes alone")
        return self.run

    # ---- the end

    def complete_data(self, *, threads: int = 1) -> None:
        self.place.complete_data(threads=threads)

    def commit(self, *, fsync: bool = True, threads: int = 1) -> None:
        """Let the checkpoint appear at its destination, all of it or nothing.

        Raises:
            DestinationError: another program has written to the destination.
            StorageError: a system call or a request failed; the next run goes on.
        """
        self._require_publisher("commits")
        self.place.commit(fsync=fsync, threads=threads)
        if self.run is not None:
            self.run.is_published = True

    def describe_resume(self) -> str:
        """Return the message about a run that ended early."""
        return (self.run or self.place).describe_resume()

    def discard(self) -> None:
        """Remove everything that was staged, of all workers."""
        self._require_publisher("discards the work of all")
        self.place.discard()

    def _require_publisher(self, deed: str) -> None:
        if self.run is not None and not self._is_publisher:
            raise RuntimeError(f"only the worker that publishes {deed}")
