"""Where a checkpoint is built until it is complete: a folder or a store, behind one protocol."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Protocol

from megtool.digests.files import FileDigests
from megtool.errors import FormatError
from megtool.process.worker_identity import WorkerIdentity
from megtool.staging.record import WorkerRecord
from megtool.storage.files import Files


class Place(Protocol):
    """A destination, and the staging area beside it: a `FolderPlace` or a `StorePlace`.

    `tree` is where the files of the checkpoint can be read before the commit, `resumed` are units
    that an earlier run has finished, `messages` are for the user, and `digests` follows what is
    written.
    """

    files: Files
    tree: Path
    resumed: set[int]
    messages: list[str]
    digests: FileDigests
    is_file: bool

    @property
    def destination(self) -> Path:
        """Where the checkpoint appears."""

    @property
    def staging(self) -> Path:
        """The folder beside it."""

    @property
    def is_over(self) -> bool:
        """Whether the checkpoint has appeared, or was discarded."""

    def check(self) -> None:
        """Refuse a destination that cannot or must not be written. Writes nothing."""

    def check_early(self) -> None:
        """Refuse it before there is a plan, unless an interrupted run has work there."""

    def enter(self) -> None:
        """Lock the staging area for a run that writes alone, and resume or discard what is there.

        Raises:
            DestinationError: another run writes there, or the destination must not be written.
        """

    def leave(self) -> None:
        """End without a commit; finished work stays."""

    def require_space(self, num_bytes: int) -> None:
        """Check that so many bytes fit.

        Raises:
            StorageError: they do not.
        """

    def path(self, relative: str) -> Path:
        """Return the path at which a file of the checkpoint is written.

        `relative` is empty for a checkpoint that is a single file.

        Raises:
            FormatError: it is outside the checkpoint.
        """

    def create(self, relative: str, num_bytes: int, cuts: Sequence[int] | None = ()) -> Path:
        """Create a file of its final size and return its path.

        `cuts` are offsets between which `digests` has the digest of each section; None: it has
        none of this file.
        """

    def write(self, relative: str, data: bytes) -> Path:
        """Write a whole small file and return its path."""

    def follow(self, context: object) -> Container[int]:
        """Return the units that need not be compared; `context` learns their digests."""

    def finish(self, unit: int, note: str = "") -> None:
        """Record that all bytes of a unit are written, with a note of one line."""

    def count_copied(self, planned: int) -> int:
        """Return the bytes that did not pass through this process, of those `planned` to."""

    def complete_data(self, *, threads: int = 1) -> None:
        """Make what was written readable; nothing of it is written again."""

    def commit(self, *, fsync: bool = True, threads: int = 1) -> None:
        """Let the checkpoint appear at its destination."""

    def describe_resume(self) -> str:
        """Return the message about a run that ended early."""

    def discard(self) -> None:
        """Remove everything that was staged."""


class SharedRun(Protocol):
    """One worker's part in a run of several that write a place: a `FolderRun` or a `StoreRun`.

    `record` is the worker's own, once it has signed off. The destination `is_published` when it is
    complete, from the same plan, and `publisher` is another worker that has begun to publish, if
    that is known. A publication `is_repeated` if an earlier one was interrupted, which with
    `rewrites_data` may have changed what workers wrote.
    """

    worker: WorkerIdentity
    record: WorkerRecord | None
    is_published: bool
    publisher: int | None
    is_repeated: bool
    rewrites_data: bool

    @property
    def has_all_digests(self) -> bool:
        """Whether the digests of the place have followed everything that this worker wrote."""

    def check(self) -> None:
        """Refuse a destination that cannot be written, unless workers have completed it."""

    def enter(self) -> None:
        """Join the run, or begin it; learn whether it `is_published`, and resume.

        Raises:
            DestinationError: another run writes the destination, or has left its work; or this
                worker is running already.
        """

    def leave(self, *, is_failed: bool) -> None:
        """End this worker; nobody removes what others have finished."""

    def sign_off(self, record: WorkerRecord, paths: Sequence[Path], *, fsync: bool) -> None:
        """Record that the share of this worker is complete, in these files."""

    def check_files(self, record: WorkerRecord, sizes: Mapping[str, int]) -> None:
        """Refuse a record of files that are not there as its worker left them."""

    def names(self) -> list[str]:
        """List what is in the staging area; nothing if the run was given up."""

    def read_record(self, index: int) -> WorkerRecord | None:
        """Read the record of a worker.

        Raises:
            FormatError: it is damaged, or of another run.
        """

    def is_complete(self) -> bool:
        """Find out whether workers have published this plan."""

    def lock_publication(self) -> bool:
        """Exclude other publishers; False if one is at work."""

    def claim_publication(self) -> bool:
        """Claim the publication where locks do not exclude all others; False if one has."""

    def begin_publication(self) -> None:
        """Make the place ready for what completes the checkpoint."""

    def unlock_publication(self) -> None:
        """Let others publish."""

    def leave_trace(self) -> None:
        """Leave a sign of a committed run for workers that are started later."""

    def describe_resume(self) -> str:
        """Return the message about a worker that ended early."""

    def release(self) -> None:
        """Release the locks of this worker."""


def check_inside(relative: str, destination: Path) -> PurePosixPath:
    """Return the path of a file of the checkpoint at `destination`, which is inside it.

    Raises:
        FormatError: it is not.
    """
    pure = PurePosixPath(relative)
    if not pure.parts or pure.is_absolute() or ".." in pure.parts or "\0" in relative:
        raise FormatError(
            f"{relative!r} is not a path inside a checkpoint",
            file=destination,
            error_id="unsafe-path",
        )
    return pure
