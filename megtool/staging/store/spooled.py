"""A stage for files that are rewritten before they are complete: a local folder, uploaded whole."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Container, Sequence
from pathlib import Path
from types import TracebackType

from megtool.digests.crc32c import Sidecar
from megtool.digests.files import FileDigests
from megtool.errors import MegtoolError, StorageError
from megtool.process.threads import map_in_threads
from megtool.staging.folder.stage import StagingFolder
from megtool.staging.publication import MARKERS
from megtool.staging.store.stage import StoreStage
from megtool.storage.files import Files

SMALL_BYTES = 64 << 10


class SpooledStage:
    """Writes a checkpoint to a temporary folder, and uploads it at the commit.

    For compressed arrays and databases, whose files change until the last one is written. It takes
    as much space in the folder of temporary files as the checkpoint has, and resumes nothing but
    its uploads.
    """

    def __init__(self, target: StoreStage) -> None:
        self._target = target
        self.files: Files = target.files
        self.tree: Path = target.tree
        self.resumed: set[int] = set()
        self.messages = target.messages
        self.digests = FileDigests()
        self.sidecar: Sidecar | None = None
        self.is_file = target.is_file
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._local: StagingFolder | None = None

    @property
    def destination(self) -> Path:
        """See `CheckpointStage`."""
        return self._target.destination

    @property
    def staging(self) -> Path:
        """See `CheckpointStage`."""
        return self._target.staging

    def check(self) -> None:
        """See `CheckpointStage`."""
        self._target.check()

    def __enter__(self) -> SpooledStage:
        self._target.__enter__()
        try:
            self._folder = tempfile.TemporaryDirectory(prefix="megtool-")
            self._local = StagingFolder(
                Path(self._folder.name).resolve() / self._target.destination.name,
                files=self.files,
                fingerprint="",
                is_file=self.is_file,
            )
            self._local.__enter__()
        except OSError as e:
            error = StorageError(
                f"there is no folder for temporary files: {e.strerror or e}",
                hint="name one with space for the checkpoint in TMPDIR",
            )
            self._target.__exit__(type(error), error, None)
            raise error from e
        except BaseException as e:
            self._target.__exit__(type(e), e, None)
            raise
        self.tree, self.digests = self._local.tree, self._local.digests
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            with contextlib.suppress(*[MegtoolError] if error else []):
                self._close_local()
        finally:
            self._target.__exit__(kind, error, trace)

    def _close_local(self) -> None:
        local, self._local = self._local, None
        folder, self._folder = self._folder, None
        try:
            if local is not None:
                local.discard()
        finally:
            if folder is not None:
                folder.cleanup()

    def _require_local(self) -> StagingFolder:
        if self._local is None:
            raise RuntimeError("a SpooledStage is used inside `with`")
        return self._local

    def require_space(self, num_bytes: int) -> None:
        """See `CheckpointStage`: in the folder of temporary files."""
        try:
            self._require_local().require_space(num_bytes)
        except StorageError as e:
            raise StorageError(
                e.message,
                file=tempfile.gettempdir(),
                hint="this format is assembled on the local disk: name a larger folder in TMPDIR",
                error_id="no-space",
            ) from e

    def path(self, relative: str) -> Path:
        """See `CheckpointStage`."""
        return self._require_local().path(relative)

    def create(self, relative: str, num_bytes: int, cuts: Sequence[int] | None = ()) -> Path:
        """See `CheckpointStage`."""
        return self._require_local().create(relative, num_bytes, cuts)

    def write(self, relative: str, data: bytes) -> Path:
        """See `CheckpointStage`."""
        return self._require_local().write(relative, data)

    def follow(self, context: object) -> Container[int]:
        """See `CheckpointStage`: nothing is finished."""
        return ()

    def finish(self, unit: int, note: str = "") -> None:
        """See `CheckpointStage`."""
        self._require_local().finish(unit, note)

    def count_copied(self, planned: int) -> int:
        """See `CheckpointStage`: everything is uploaded."""
        return 0

    def complete_data(self, *, threads: int = 1) -> None:
        """See `CheckpointStage`: files can be read where they are."""

    def commit(self, *, fsync: bool = True, threads: int = 1) -> None:
        """See `CheckpointStage`.

        Raises:
            DestinationError: another program has written to the destination.
            StorageError: a read or an upload failed.
        """
        local = self._require_local()
        paths = [local.path("")] if self.is_file else sorted(self.files.tree(local.tree)[0])
        self.files.recorder = None
        created = []
        for path in paths:
            name = "" if self.is_file else path.relative_to(local.tree).as_posix()
            status = self.files.stat(path)
            size = 0 if status is None else status.st_size
            if not self.is_file and (path.name in MARKERS or size <= SMALL_BYTES):
                self._target.write(name, self.files.read_whole(path) or b"")
            else:
                created.append((path, self._target.create(name, size, None), size))
        map_in_threads(self._upload, created, threads=threads)
        self._target.commit(fsync=fsync, threads=threads)
        self._close_local()

    def _upload(self, row: tuple[Path, Path, int]) -> None:
        """Write a local file to an object."""
        source, target, size = row
        read, written = self.files.open_read(source), self.files.open_write(target)
        try:
            self.files.copy_range(read, 0, written, 0, size)
        finally:
            self.files.close(read)
            self.files.close(written)

    def describe_resume(self) -> str:
        """See `CheckpointStage`."""
        return self._target.describe_resume()

    def discard(self) -> None:
        """See `CheckpointStage`."""
        self._close_local()
        self._target.discard()
