"""A place for files that are rewritten before they are complete: a local folder, uploaded whole."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Container, Sequence
from pathlib import Path

from megtool.digests.files import FileDigests
from megtool.errors import MegtoolError, StorageError
from megtool.process.threads import map_in_threads
from megtool.staging.folder.place import FolderPlace
from megtool.staging.publication import MARKERS
from megtool.staging.store.place import StorePlace
from megtool.storage.files import Files

SMALL_BYTES = 64 << 10


class SpooledPlace:
    """See `Place`: a temporary folder, whose files are uploaded at the commit.

    For compressed arrays and databases, whose files change until the last one is written. It takes
    as much space in the folder of temporary files as the checkpoint has, and resumes nothing but
    its uploads.
    """

    def __init__(self, target: StorePlace) -> None:
        self._target = target
        self.files: Files = target.files
        self.tree: Path = target.tree
        self.resumed: set[int] = set()
        self.messages = target.messages
        self.digests = FileDigests()
        self.is_file = target.is_file
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._local: FolderPlace | None = None

    @property
    def destination(self) -> Path:
        return self._target.destination

    @property
    def staging(self) -> Path:
        return self._target.staging

    @property
    def is_over(self) -> bool:
        return self._local is None and self._target.is_over

    def check(self) -> None:
        self._target.check()

    def check_early(self) -> None:
        self._target.check_early()

    def enter(self) -> None:
        self._target.enter()
        try:
            self._folder = tempfile.TemporaryDirectory(prefix="megtool-")
            self._local = FolderPlace(
                Path(self._folder.name).resolve() / self._target.destination.name,
                files=self.files,
                fingerprint="",
                is_file=self.is_file,
            )
            self._local.enter()
        except OSError as e:
            error = StorageError(
                f"there is no folder for temporary files: {e.strerror or e}",
                hint="name one with space for the checkpoint in TMPDIR",
            )
            self._leave_target()
            raise error from e
        except BaseException:
            self._leave_target()
            raise
        self.tree, self.digests = self._local.tree, self._local.digests

    def _leave_target(self) -> None:
        with contextlib.suppress(MegtoolError):
            self._target.leave()

    def leave(self) -> None:
        try:
            self._close_local()
        finally:
            if not self._target.is_over:
                self._target.leave()

    def _close_local(self) -> None:
        local, self._local = self._local, None
        folder, self._folder = self._folder, None
        try:
            if local is not None:
                local.discard()
        finally:
            if folder is not None:
                folder.cleanup()

    def _require_local(self) -> FolderPlace:
        if self._local is None:
            raise RuntimeError("a stage is used inside `with`")
        return self._local

    def require_space(self, num_bytes: int) -> None:
        """See `Place`: in the folder of temporary files."""
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
        return self._require_local().path(relative)

    def create(self, relative: str, num_bytes: int, cuts: Sequence[int] | None = ()) -> Path:
        return self._require_local().create(relative, num_bytes, cuts)

    def write(self, relative: str, data: bytes) -> Path:
        return self._require_local().write(relative, data)

    def follow(self, context: object) -> Container[int]:
        """See `Place`: nothing is finished."""
        return ()

    def finish(self, unit: int, note: str = "") -> None:
        self._require_local().finish(unit, note)

    def count_copied(self, planned: int) -> int:
        """See `Place`: everything is uploaded."""
        return 0

    def complete_data(self, *, threads: int = 1) -> None:
        """See `Place`: files can be read where they are."""

    def commit(self, *, fsync: bool = True, threads: int = 1) -> None:
        """See `Place`.

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
                self._target.write(name, self.files.read_whole(path, at_most=None) or b"")
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
        return self._target.describe_resume()

    def discard(self) -> None:
        self._close_local()
        self._target.discard()
