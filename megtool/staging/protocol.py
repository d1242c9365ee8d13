"""What every stage of a checkpoint under construction can do, on disk or in a store."""

from __future__ import annotations

from collections.abc import Container, Sequence
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Protocol

from megtool.digests.crc32c import Sidecar
from megtool.digests.files import FileDigests
from megtool.errors import FormatError
from megtool.storage.files import Files


class CheckpointStage(Protocol):
    """A `StagingFolder`, or a `StoreStage`: where a checkpoint is written until it is complete.

    `tree` is where its files can be read before the commit, `staging` where its run keeps notes.
    """

    files: Files
    tree: Path
    resumed: set[int]
    messages: list[str]
    digests: FileDigests
    sidecar: Sidecar | None
    is_file: bool

    @property
    def destination(self) -> Path:
        """Where the checkpoint appears."""

    @property
    def staging(self) -> Path:
        """The folder beside it."""

    def check(self) -> None:
        """Refuse a destination that cannot or must not be written. Writes nothing.

        Raises:
            DestinationError: it must not.
        """

    def __enter__(self) -> CheckpointStage: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def require_space(self, num_bytes: int) -> None:
        """Check that so many bytes fit."""

    def path(self, relative: str) -> Path:
        """The path of a file of the checkpoint."""

    def create(self, relative: str, num_bytes: int, cuts: Sequence[int] | None = ()) -> Path:
        """Create a file of its final size and return its path."""

    def write(self, relative: str, data: bytes) -> Path:
        """Write a whole small file and return its path."""

    def follow(self, context: object) -> Container[int]:
        """The units that are finished, and need not be compared; `context` learns their digests."""

    def finish(self, unit: int, note: str = "") -> None:
        """Record that all bytes of a unit are written."""

    def count_copied(self, planned: int) -> int:
        """The bytes that did not pass through this process, of those `planned` to."""

    def complete_data(self, *, threads: int = 1) -> None:
        """Make what was written readable; nothing of it is written again."""

    def commit(self, *, fsync: bool = True, threads: int = 1) -> None:
        """Let the checkpoint appear at its destination."""

    def describe_resume(self) -> str:
        """The message about a run that ended early."""

    def discard(self) -> None:
        """Remove everything that was staged."""


def check_inside(relative: str, destination: Path) -> PurePosixPath:
    """The path of a file of the checkpoint at `destination`, which is inside it.

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
