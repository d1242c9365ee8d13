"""A data set of tokens for a store: written to a temporary folder, then uploaded, index last."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from megtool.checkpoint.object_upload import upload_object
from megtool.checkpoint.storage.files import Files
from megtool.checkpoint.storage.location import StorePath
from megtool.data.dataset_writer import DATA, INDEX, DatasetFiles, add_suffix, dataset_prefix
from megtool.errors import DestinationError

_CHUNK_BYTES = 8 << 20


class DatasetUpload:
    """`prefix`.bin and `prefix`.idx in a store, with the methods of `DatasetFiles`.

    The temporary folder needs space for both. Where they replace others, the old index goes first
    and the new one comes last, so a data set is never of two runs.
    """

    def __init__(self, prefix: StorePath, files: Files, *, overwrite: bool = False) -> None:
        self.prefix = dataset_prefix(prefix)
        self.staged = Path()
        self._target, self._files, self._overwrite = prefix, files, overwrite
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def check(self) -> None:
        """Refuse a destination that exists.

        Raises:
            DestinationError: one of the objects exists and may not be replaced.
            StorageError: the store refused.
        """
        if not self.prefix.name:
            raise DestinationError(f"{str(self.prefix)!r} is not the name of an object")
        for path in (add_suffix(self.prefix, DATA), add_suffix(self.prefix, INDEX)):
            if not self._overwrite and path.is_file():
                raise DestinationError(
                    "already exists",
                    file=path,
                    hint="name another destination, or replace it: --overwrite",
                    error_id="destination-exists",
                )

    def commit(self, *, fsync: bool = True) -> int:
        """Upload both files; returns their bytes.

        Raises:
            DestinationError: something appeared there meanwhile.
            StorageError: the store refused.
        """
        self.check()
        store = self._target.store
        if self._overwrite:
            for suffix in (INDEX, DATA):
                store.delete([self._object(suffix).key])
        num_bytes = 0
        for suffix in (DATA, INDEX):
            staged, path = add_suffix(self.staged, suffix), self._object(suffix)
            size = staged.stat().st_size
            upload_object(path, size, partial(self._send, staged), self._files, create=True)
            num_bytes += size
        return num_bytes

    def _object(self, suffix: str) -> StorePath:
        return self._target.with_name(add_suffix(self.prefix, suffix).name)

    def _send(self, staged: Path, target: int) -> None:
        offset = 0
        with staged.open("rb") as file:
            while data := file.read(_CHUNK_BYTES):
                self._files.pwrite_all(target, data, offset)
                offset += len(data)

    def __enter__(self) -> Self:
        self.check()
        self._folder = tempfile.TemporaryDirectory(prefix="megtool-tokens-")
        self.staged = Path(self._folder.name) / self.prefix.name
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._folder is not None:
            self._folder.cleanup()


def stage_dataset(
    prefix: Path, files: Files, *, overwrite: bool = False
) -> DatasetFiles | DatasetUpload:
    """A data set that is to be written, on a disk or in a store."""
    if isinstance(prefix, StorePath):
        return DatasetUpload(prefix, files, overwrite=overwrite)
    return DatasetFiles(prefix, files, overwrite=overwrite)
